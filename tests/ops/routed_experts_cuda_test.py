"""routed_experts' custom call against float64 and the XLA form, and its bits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.checkpoint import dequantize, quantize
from kdtree_jax.ops import int4_weight
from tests.ops import products
from tests.ops.custom_calls import assert_same_bits, replayed
from tests.ops.products import BF16, F32, normal
from tests.ops.routed_experts_test import rows_of

pytestmark = pytest.mark.gpu

TOKENS = 160


@dataclasses.dataclass(frozen=True)
class Case:
  """Experts of one kind and size; `axis` is that of gate_up that counts them."""

  E: int
  D: int
  F: int
  k: int
  dtype: Any
  axis: int = 0
  int4: bool = False

  @functools.cache  # noqa: B019 (a handful of cases)
  def kernels(self) -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """As the op takes them, and as floats [E, D, 2F] and [E, F, D]."""
    rng = np.random.default_rng((self.E, self.D))
    gate_up = normal(rng, self.E, self.D, 2 * self.F) * self.D**-0.5
    down = normal(rng, self.E, self.F, self.D) * self.F**-0.5
    if not self.int4:
      floats = gate_up.astype(self.dtype), down.astype(self.dtype)
      return (np.moveaxis(floats[0], 0, self.axis), floats[1]), floats
    tensors = quantize(gate_up.swapaxes(1, 2)), quantize(down.swapaxes(1, 2))
    packed = int4_weight.pack(tensors[0], gated=True), int4_weight.pack(tensors[1])
    floats = [dequantize(t, self.dtype).swapaxes(1, 2) for t in tensors]
    return jax.tree.map(jnp.asarray, packed), (floats[0], floats[1])

  def rows(self, tokens: int = TOKENS) -> tuple[np.ndarray, ...]:
    return rows_of(tokens, self.D, self.E, self.k, self.dtype)

  def run(self, rows: Any, kernels: Any, implementation: str = "cuda") -> jax.Array:
    return ops.routed_experts(
      *rows, *kernels, experts_axis=self.axis, implementation=implementation
    )

  @property
  def error(self) -> float:
    """What errors add up to as a random walk, relative to the result.

    That of some five roundings to the dtype; in float32, of the sums' own D and F too.
    """
    roundings = 16 if self.dtype == BF16 else 16 + self.D + self.F
    return products.HALF_ULP[np.dtype(self.dtype)] * roundings**0.5

  def want(self, x, experts, weights) -> tuple[np.ndarray, np.ndarray]:
    """In float64 and the bound; ids out of range add nothing."""
    gate_up, down = self.kernels()[1]
    outputs = np.zeros((*experts.shape, self.D))
    bound = np.zeros_like(outputs)
    for e in range(self.E):
      token, slot = np.nonzero(experts == e)
      inner, dinner = products.gated(x[token], gate_up[e], self.dtype)
      found = products.rounded(*products.sums(inner, down[e], dinner), self.dtype)
      outputs[token, slot], bound[token, slot] = found
    weights = weights.astype(np.float64)[..., None]
    sizes = np.sum(weights * (np.abs(outputs) + bound), axis=1)
    total = np.sum(weights * bound, axis=1) + self.k * 2.0**-23 * sizes
    return products.rounded(np.sum(weights * outputs, axis=1), total, self.dtype)


CASES = {
  "bf16": Case(24, 256, 160, 4, BF16),
  "bf16, a few experts beside each other": Case(8, 256, 160, 4, BF16, axis=1),
  "bf16, in parts": Case(4, 4096, 48, 2, BF16),
  "float32": Case(24, 200, 50, 4, F32),
  "float32, beside each other": Case(8, 128, 64, 3, F32, axis=1),
  "int4": Case(40, 512, 256, 8, BF16, int4=True),
  "int4, ends inside of a tile": Case(9, 96, 160, 3, BF16, int4=True),
  "int4, in parts": Case(4, 4096, 64, 2, BF16, int4=True),
  "int4, float32": Case(12, 160, 96, 4, F32, int4=True),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def rms(x: Any) -> float:
  return float(np.sqrt(np.mean(np.square(np.asarray(x).astype(np.float64)))))


@every_case
def test_tokens_are_right_and_the_same_in_any_company(case):
  """Any number of tokens from 1 to 160, in any order, alone, and 480 of them."""
  kernels, _ = case.kernels()
  rows = case.rows()
  order = np.random.default_rng(2).permutation(TOKENS)
  places = [np.arange(TOKENS)[-n:] for n in range(1, TOKENS + 1)]
  places += [order, np.arange(3 * TOKENS) % TOKENS]
  parts = [tuple(a[place] for a in rows) for place in places]
  found = products.in_company(case.run, parts, kernels)
  everything = found[TOKENS - 1]
  value, bound = case.want(*rows)
  products.check(everything, value, bound)
  assert rms(everything.astype(np.float64) - value) < case.error * rms(value)
  for place, some in zip(places, found, strict=True):
    assert_same_bits(everything[place], some, f"of {len(place)} tokens,")


@pytest.mark.parametrize("name", ["bf16", "float32, beside each other", "int4"])
def test_the_xla_form_agrees(name):
  case = CASES[name]
  kernels, _ = case.kernels()
  rows = case.rows(33)
  cuda, xla = (
    np.asarray(jax.jit(functools.partial(case.run, implementation=i))(rows, kernels))
    for i in ("cuda", "xla")
  )
  _, bound = case.want(*rows)
  products.check(cuda, xla.astype(np.float64), 2 * bound)
  error = rms(cuda.astype(np.float64) - xla.astype(np.float64))
  assert error < 2**0.5 * case.error * rms(xla)


@pytest.mark.parametrize("name", ["bf16", "float32", "int4"])
def test_ids_of_any_value_and_an_expert_named_twice(name):
  """One program, one shape: only the ids differ."""
  case = CASES[name]
  kernels, _ = case.kernels()
  x, experts, weights = case.rows(24)
  run = jax.jit(case.run)
  before = np.asarray(run((x, experts, weights), kernels))
  for bad in (-1, -(2**31), case.E, 2**31 - 1):
    ids = experts.copy()
    ids[::2, 1] = bad
    ids[3] = bad
    got = np.asarray(run((x, ids, weights), kernels))
    products.check(got, *case.want(x, ids, weights))
    assert not got[3].any()
    assert_same_bits(before[[1, 5, 7]], got[[1, 5, 7]])
  nobody = np.full_like(experts, case.E)
  assert not np.asarray(run((x, nobody, weights), kernels)).any()
  twice = experts.copy()
  twice[:, 1] = twice[:, 0]
  same = np.zeros_like(experts)  # All slots of all tokens: more rows than a chunk has.
  for ids in (twice, same):
    got = np.asarray(run((x, ids, weights), kernels))
    products.check(got, *case.want(x, ids, weights))
    # Alone, a token has its bits.
    alone = case.run((x[4:5], ids[4:5], weights[4:5]), kernels)
    assert_same_bits(got[4:5], alone)


@pytest.mark.parametrize("name", ["bf16", "float32", "int4"])
def test_what_is_not_finite_stays_in_its_row_and_expert(name):
  case = CASES[name]
  kernels, _ = case.kernels()
  x, experts, weights = case.rows(24)
  experts[experts == 5] = 6  # Nobody asks for this one.
  run = jax.jit(case.run)
  before = np.asarray(run((x, experts, weights), kernels))
  x[0], x[7, 3], weights[9, 1] = np.nan, np.inf, np.nan
  if not case.int4:
    kernels = tuple(kernel.copy() for kernel in kernels)
    for kernel in kernels:
      kernel[5] = np.nan
  after = np.asarray(run((x, experts, weights), kernels))
  bad = [0, 7, 9]
  assert np.isnan(after[[0, 9]].astype(np.float32)).all()
  good = np.delete(np.arange(24), bad)
  assert_same_bits(before[good], after[good])


@pytest.mark.parametrize("name", ["bf16", "float32", "int4"])
def test_captured_calls_give_the_bits_of_the_first(name):
  case = CASES[name]
  kernels, _ = case.kernels()
  rows = case.rows(17)
  got = replayed(case.run)(rows, kernels)
  products.check(got, *case.want(*rows))


def test_no_tokens():
  for name in ("bf16", "float32", "int4"):
    case = CASES[name]
    kernels, _ = case.kernels()
    assert case.run(case.rows(0), kernels).shape == (0, case.D)
