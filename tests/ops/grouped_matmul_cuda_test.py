"""grouped_matmul's custom call against float64, its bits, and what int4 weighs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.checkpoint import Int4Tensor, dequantize
from kdtree_jax.ops import int4_weight
from tests.ops import products
from tests.ops.custom_calls import assert_same_bits, replayed
from tests.ops.products import BF16, F32, normal, whole

pytestmark = pytest.mark.gpu

ROWS, GROUPS = 160, 5

cuda = functools.partial(ops.grouped_matmul, implementation="cuda")

# dtype of rows, K, N: parts of K, ends inside of a tile, many features.
FLOATS = [
  (BF16, 4096, 72),
  (BF16, 1040, 136),
  (BF16, 272, 1032),
  (F32, 2048, 60),
  (F32, 131, 37),
]
INT4 = [
  (BF16, 4096, 80),
  (BF16, 1088, 100),
  (BF16, 96, 1000),
  (BF16, 32, 7),
  (F32, 2048, 80),
  (F32, 96, 37),
]


def int4(rng: np.random.Generator, G: int, K: int, N: int, lowest: int, highest: int):
  """Weights with all 16 values, scales of both signs and of sizes 2^lowest .."""
  packed = rng.integers(0, 256, (G, N, K // 2), dtype=np.uint8)
  signs = rng.choice([-1.0, 1.0], (G, N, K // 32))
  sizes = 2.0 ** rng.integers(lowest, highest + 1, signs.shape)
  scales = signs * sizes * rng.uniform(1, 2, signs.shape)
  return Int4Tensor(packed, scales.astype(BF16))


def on_device(tensor: Int4Tensor) -> int4_weight.Int4Weight:
  return jax.tree.map(jnp.asarray, int4_weight.pack(tensor))


def draw(kind: str, dtype: Any, K: int, N: int) -> tuple[Any, np.ndarray]:
  """Weights as the op takes them, and as floats [G, K, N] of the dtype."""
  rng = np.random.default_rng((K, N))
  if kind == "float":
    weights = normal(rng, GROUPS, K, N, dtype=dtype)
    return weights, weights
  tensor = int4(rng, GROUPS, K, N, -4, 1)
  return on_device(tensor), dequantize(tensor, dtype).swapaxes(1, 2)


def by_numpy(x: np.ndarray, weights: np.ndarray, groups: np.ndarray):
  """In float64 and the bound, rows whose group is `GROUPS` being zero."""
  value = np.zeros((len(x), weights.shape[2]))
  bound = np.zeros_like(value)
  for g in range(len(weights)):
    rows = groups == g
    value[rows], bound[rows] = products.rounded(
      *products.sums(x[rows], weights[g]), x.dtype
    )
  return value, bound


def sizes_of(groups: np.ndarray) -> np.ndarray:
  return np.bincount(groups, minlength=GROUPS)[:GROUPS].astype(np.int32)


@pytest.mark.parametrize(
  ("kind", "dtype", "K", "N"),
  [("float", *case) for case in FLOATS] + [("int4", *case) for case in INT4],
)
def test_rows_are_right_and_the_same_in_any_company(kind, dtype, K, N):
  """At every number of rows from 1 to 160, and at 480, in groups of any sizes."""
  weights, floats = draw(kind, dtype, K, N)
  rng = np.random.default_rng(N)
  x = normal(rng, ROWS, K, dtype=dtype)
  # One group is empty, two have half of all rows and more than a chunk.
  groups = np.sort(rng.choice(GROUPS, ROWS, p=[0.1, 0.5, 0, 0.35, 0.05]))
  places = [np.sort(rng.permutation(ROWS)[:n]) for n in range(1, ROWS + 1)]
  # In another order within the groups, and each row three times.
  places.append(np.lexsort((rng.random(ROWS), groups)))
  places.append(np.repeat(np.arange(ROWS), 3))
  parts = [(x[rows], sizes_of(groups[rows])) for rows in places]
  found = products.in_company(lambda part, w: cuda(part[0], w, part[1]), parts, weights)
  everything = found[ROWS - 1]
  products.check(everything, *by_numpy(x, floats, groups))
  for rows, some in zip(places, found, strict=True):
    assert_same_bits(everything[rows], some, f"of {len(rows)} rows,")


SIZES = {
  "even": [32, 32, 32, 32, 32],
  "one group has all": [0, 0, ROWS, 0, 0],
  "the first has all": [ROWS, 0, 0, 0, 0],
  "one row": [0, 0, 0, 1, ROWS - 1],
  "less than all rows": [3, 0, 70, 0, 11],
  "none": [0, 0, 0, 0, 0],
  "more than all rows": [100, 50, 30, 20, 10],
  "the first has too many": [ROWS + 7, 5, 0, 0, 0],
  "numbers that are none": [-3, 20, -(2**31), 2**31 - 1, 5],
}


@pytest.mark.parametrize("kind", ["bf16", "f32", "int4", "int4 f32"])
def test_any_sizes_are_safe(kind):
  """Whole numbers, so that each row is exact; one program for all sizes."""
  rng = np.random.default_rng(3)
  K, N = 320, 104
  dtype = F32 if "f32" in kind else BF16
  x = whole(rng, ROWS, K, dtype=dtype)
  if kind.startswith("int4"):
    packed = rng.integers(0, 256, (GROUPS, N, K // 2), dtype=np.uint8)
    tensor = Int4Tensor(packed, np.ones((GROUPS, N, K // 32), BF16))
    weights, floats = on_device(tensor), dequantize(tensor, dtype).swapaxes(1, 2)
  else:
    weights = floats = whole(rng, GROUPS, K, N, dtype=dtype)
  run = jax.jit(cuda)
  for name, sizes in SIZES.items():
    got = run(x, weights, np.array(sizes, np.int32))
    ends = np.cumsum(np.maximum(np.array(sizes, np.int64), 0))
    groups = np.searchsorted(ends, np.arange(ROWS), side="right")
    exact = np.zeros((ROWS, N))
    for g in range(GROUPS):
      rows = groups == g
      exact[rows] = products.wide(x[rows])[0] @ products.wide(floats[g])[0]
    # Zeros of either sign.
    np.testing.assert_array_equal(got, exact.astype(dtype), name)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("K", "N"), [(512, 80), (96, 21)])
def test_int4_weights_have_the_bits_of_their_floats(dtype, K, N):
  """Scales of every size from 2^-60 to 2^40, a row of one 1 for each weight."""
  tensor = int4(np.random.default_rng(K), 2, K, N, -60, 39)
  rows = np.concatenate([np.eye(K)] * 2).astype(dtype)
  got = jax.jit(cuda)(rows, on_device(tensor), np.array([K, K], np.int32))
  want = dequantize(tensor, dtype).swapaxes(1, 2).reshape(2 * K, N)
  # A sum with zeros is +0, where a weight may be -0.
  assert_same_bits(np.where(want == 0, np.zeros((), dtype), want), got)
  assert np.unique(want.astype(np.float64)).size > 1000


@pytest.mark.parametrize("kind", ["bf16", "f32", "int4"])
def test_what_is_not_finite_stays_in_its_row_and_group(kind):
  rng = np.random.default_rng(5)
  K, N = 320, 72
  dtype = F32 if kind == "f32" else BF16
  x = normal(rng, ROWS, K, dtype=dtype)
  sizes = np.array([20, 0, 64, 70, 6], np.int32)
  weights: Any = normal(rng, GROUPS, K, N, dtype=dtype)
  if kind == "int4":
    weights = on_device(int4(rng, GROUPS, K, N, -4, 1))
  run = jax.jit(cuda)
  before = np.asarray(run(x, weights, sizes))
  bad = [0, 21, 22, 90, 159]
  x[0], x[21, 3], x[22, K - 1], x[90, 7], x[159, 64] = (
    np.nan,
    np.inf,
    -np.inf,
    np.nan,
    np.inf,
  )
  if kind != "int4":
    weights[1] = np.nan  # It has no row.
  after = np.asarray(run(x, weights, sizes))
  good = np.delete(np.arange(ROWS), bad)
  assert_same_bits(before[good], after[good])
  # 0 times infinity is not a number, any other weight gives infinity.
  assert not np.isfinite(after[bad].astype(np.float32)).any()


def test_captured_calls_give_the_bits_of_the_first():
  rng = np.random.default_rng(6)
  sizes = np.array([3, 0, 20, 0, 10], np.int32)
  weights = [draw("float", BF16, 256, 72), draw("float", F32, 131, 37)]
  weights += [draw("int4", BF16, 256, 80), draw("int4", F32, 96, 37)]
  rows = [normal(rng, 40, floats.shape[1], dtype=floats.dtype) for _, floats in weights]

  def everything(rows, weights, sizes):
    return [cuda(x, w, sizes) for x, w in zip(rows, weights, strict=True)]

  found = replayed(everything)(rows, [w for w, _ in weights], sizes)
  groups = np.repeat(np.arange(GROUPS + 1), [*sizes, 40 - sizes.sum()])
  for x, (_, floats), got in zip(rows, weights, found, strict=True):
    products.check(got, *by_numpy(x, floats, groups))


def test_odd_sizes_no_rows_and_one_group():
  """What is copied first in bf16; then nothing to do."""
  rng = np.random.default_rng(8)
  x, w = whole(rng, 30, 50, dtype=BF16), whole(rng, 3, 50, 31, dtype=BF16)
  got = jax.jit(cuda)(x, w, np.array([10, 0, 15], np.int32))
  (x64, w64), groups = products.wide(x, w), np.repeat([0, 2], [10, 15])
  exact = np.concatenate([np.einsum("mk,mkn->mn", x64[:25], w64[groups])])
  assert_same_bits(np.pad(exact, ((0, 5), (0, 0))).astype(BF16), got)
  assert cuda(x[:0], w, np.zeros(3, np.int32)).shape == (0, 31)
  one = jax.jit(cuda)(x, w[:1], np.array([30], np.int32))
  assert_same_bits((x64 @ w64[0]).astype(BF16), one)
