"""The custom calls of matmul, gated_matmul and head_matmul against float64, their bits.

The sizes of weights take each way through the kernels: K in one and in several parts,
which are blocks of a cluster, K and N that end inside of a tile, with and without
copies of 16 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops import products
from tests.ops.custom_calls import assert_same_bits, replayed
from tests.ops.products import BF16, F32, normal, whole

pytestmark = pytest.mark.gpu

ROWS = 160


@dataclasses.dataclass(frozen=True)
class Case:
  """Weights of one kind and size.

  Attributes:
    K, N: sizes; N of gate and up together where `gated`.
    x, w, out: dtypes.
    by_feature, gated: as in the ops.
  """

  K: int
  N: int
  x: Any = BF16
  w: Any = BF16
  out: Any = BF16
  by_feature: bool = False
  gated: bool = False

  def run(self, x: jax.Array, w: jax.Array) -> jax.Array:
    if self.gated:
      return ops.gated_matmul(x, w, "cuda")
    return ops.matmul(x, w, "cuda", out_dtype=self.out, by_feature=self.by_feature)

  def draw(self, make: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows and weights; `make` is `normal` or `whole`."""
    rng = np.random.default_rng((self.K, self.N, seed))
    shape = (self.N, self.K) if self.by_feature else (self.K, self.N)
    w = make(rng, *shape)
    if self.gated and make is normal:
      w = w * self.K**-0.5  # Not all gates open or shut.
    return make(rng, ROWS, self.K, dtype=self.x), w.astype(self.w)

  def want(self, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and the bound of the error."""
    w = w.T if self.by_feature else w
    if self.gated:
      return products.gated(x, w, self.out)
    return products.rounded(*products.sums(x, w), self.out)


CASES = {
  "bf16, eight parts": Case(4096, 200),
  "bf16, four parts": Case(2048, 136),
  "bf16, two parts that end in a slab": Case(1040, 40),
  "bf16, one part": Case(272, 72),
  "bf16, many features": Case(64, 4104),
  "bf16, less than a step": Case(16, 8),
  "bf16 to float32, by feature": Case(1040, 97, out=F32, by_feature=True),
  "bf16, by feature, one part": Case(256, 4096, out=F32, by_feature=True),
  "bf16, gated": Case(1024, 2 * 104, gated=True),
  "bf16, gated, one part": Case(80, 2 * 72, gated=True),
  "float32, split": Case(2048, 100, F32, F32, F32),
  "float32, odd": Case(515, 51, F32, F32, F32),
  "float32, by feature": Case(200, 1001, F32, F32, F32, by_feature=True),
  "float32, many features": Case(160, 4500, F32, F32, F32),
  "float32, gated": Case(300, 2 * 50, F32, F32, F32, gated=True),
  "bf16 by float32": Case(1032, 96, BF16, F32, F32),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_rows_are_right_and_the_same_in_any_company(case):
  """At every number of rows from 1 to 160, wherever they are, and at 2,085."""
  x, w = case.draw(normal)
  got = products.check_every_number_of_rows(case.run, x, w)
  products.check(got, *case.want(x, w))


@pytest.mark.parametrize(
  "case", [c for c in CASES.values() if not c.gated], ids=lambda c: f"{c.K}-{c.N}"
)
def test_no_term_is_missing(case):
  """Integers, whose sums are exact: rounded once, nothing else."""
  x, w = case.draw(whole)
  got = jax.jit(case.run)(x, w)
  exact = products.wide(x)[0] @ products.wide(w.T if case.by_feature else w)[0]
  assert_same_bits(exact.astype(case.out), got)


# Sizes that the bf16 kernel gets after copying them.
ODD = [
  Case(50, 31),
  Case(7, 1, out=F32),
  Case(21, 13, by_feature=True),
  Case(100, 2 * 13, gated=True),
  Case(32, 2 * 4, gated=True),
  Case(33, 2 * 8, gated=True),
]


def test_odd_sizes_in_bf16():
  drawn = [(case.draw(normal), case.draw(whole)) for case in ODD]

  @jax.jit
  def run(drawn):
    return [
      [case.run(x[:rows], w) for x, w in pairs for rows in (1, 9, ROWS)]
      for case, pairs in zip(ODD, drawn, strict=True)
    ]

  for case, pairs, found in zip(ODD, drawn, run(drawn), strict=True):
    for i, (x, w) in enumerate(pairs):
      one, nine, everything = map(np.asarray, found[3 * i : 3 * i + 3])
      assert everything.dtype == case.out
      products.check(everything, *case.want(x, w))
      assert_same_bits(everything[:1], one)
      assert_same_bits(everything[:9], nine)
    if not case.gated:
      x, w = products.wide(*pairs[1])
      exact = x @ (w.T if case.by_feature else w)
      assert_same_bits(exact.astype(case.out), everything)


HEADS = {
  "bf16": ((3, 64, 96, 80), BF16),  # heads, K, width of x, N
  "bf16, in parts": ((2, 2048, 2048, 72), BF16),
  "bf16, odd": ((5, 20, 27, 9), BF16),
  "float32": ((3, 128, 192, 64), F32),
  "float32, odd": ((2, 37, 50, 21), F32),
}


@pytest.mark.parametrize(("sizes", "dtype"), HEADS.values(), ids=HEADS)
def test_heads(sizes, dtype):
  H, K, X, N = sizes
  rng = np.random.default_rng(K)
  x, w = normal(rng, ROWS, H, X, dtype=dtype), normal(rng, H, K, N, dtype=dtype)
  x[..., K:] = np.nan  # Not read.
  run = functools.partial(ops.head_matmul, implementation="cuda")
  if K % 16 and dtype == BF16:  # Copied first: not at every number of rows.
    got, one = products.in_company(run, [x, x[-1:]], w)
    assert_same_bits(got[-1:], one)
  else:
    got = products.check_every_number_of_rows(run, x, w)
  for head in range(H):
    value, bound = products.sums(x[:, head, :K], w[head])
    products.check(got[:, head], *products.rounded(value, bound, dtype))


def everything(x, w, gate_and_up, heads, narrow, by_feature):
  cuda = {"implementation": "cuda"}
  return (
    ops.matmul(x, w, **cuda),
    ops.gated_matmul(x, gate_and_up, **cuda),
    ops.head_matmul(x.reshape(len(x), 2, -1), heads, **cuda),
    ops.matmul(narrow, w, out_dtype=jnp.float32, **cuda),
    ops.matmul(x, by_feature, by_feature=True, **cuda),
  )


def inputs(dtype: Any, rows: int) -> list[np.ndarray]:
  rng = np.random.default_rng(7)
  shapes = [(rows, 1024), (1024, 48), (1024, 96), (2, 512, 40)]
  arrays = [normal(rng, *shape, dtype=dtype) for shape in shapes]
  narrow = normal(rng, rows, 1024, dtype=BF16)
  return [*arrays, narrow, normal(rng, 40, 1024, dtype=dtype)]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_captured_calls_give_the_bits_of_the_first(dtype):
  arrays = inputs(dtype, 33)
  found = replayed(everything)(*arrays)
  case = Case(1024, 48, dtype, dtype, dtype)
  products.check(found[0], *case.want(*arrays[:2]))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_what_is_not_finite_stays_in_its_row(dtype):
  x, w, gate_and_up, heads, narrow, by_feature = inputs(dtype, 40)
  run = jax.jit(everything)
  before = jax.device_get(run(x, w, gate_and_up, heads, narrow, by_feature))
  bad = [1, 8, 22, 39]
  for array in (x, narrow):
    array[1], array[8, 3], array[22, 1023], array[39, 600] = (
      np.nan,
      np.nan,
      np.inf,
      -np.inf,
    )
  after = jax.device_get(run(x, w, gate_and_up, heads, narrow, by_feature))
  good = np.delete(np.arange(40), bad)
  assert_same_bits([y[good] for y in before], [y[good] for y in after])
  for y in after:
    finite = np.isfinite(y.astype(np.float32).reshape(40, -1))
    assert not finite[bad].all(axis=-1).any()


def test_no_rows_and_several_axes():
  x, w, gate_and_up, heads, *_ = inputs(BF16, 24)
  assert ops.matmul(x[:0], w, "cuda").shape == (0, 48)
  assert ops.gated_matmul(x[:0], gate_and_up, "cuda").shape == (0, 48)
  assert ops.head_matmul(x[:0].reshape(0, 2, 512), heads, "cuda").shape == (0, 2, 40)
  flat = ops.matmul(x, w, "cuda")
  stacked = ops.matmul(x.reshape(2, 3, 4, 1024), w, "cuda")
  assert_same_bits(np.asarray(flat).reshape(2, 3, 4, 48), stacked)
  mapped = jax.jit(jax.vmap(lambda x: ops.matmul(x, w, "cuda")))(x.reshape(4, 6, 1024))
  assert_same_bits(np.asarray(flat).reshape(4, 6, 48), mapped)


def test_gradients_are_those_of_the_xla_form():
  x, w, gate_and_up, heads, *_ = inputs(F32, 9)

  def loss(arrays, implementation):
    x, w, gate_and_up, heads = arrays
    one = ops.matmul(x, w, implementation)
    two = ops.gated_matmul(x, gate_and_up, implementation)
    three = ops.head_matmul(x.reshape(9, 2, 512), heads, implementation)
    # Linear, so that the forms' own last bits do not reach the gradient.
    return jnp.sum(one[:, :40] * 2) + jnp.sum(two) + jnp.sum(three)

  arrays = (x, w, gate_and_up / 32, heads)
  cuda, xla = (
    jax.jit(jax.grad(loss), static_argnums=1)(arrays, i) for i in ("cuda", "xla")
  )
  # The forms' programs are compiled apart: sums of up to 1,024 terms of size 1.
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-3), cuda, xla)
