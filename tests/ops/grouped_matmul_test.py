from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import ops, reference

BF16 = ml_dtypes.bfloat16
K, N = 24, 10

product = jax.jit(ops.grouped_matmul)


def arrays(sizes: list[int], seed: int, dtype=np.float32):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(sum(sizes), K)).astype(dtype)
  weights = rng.normal(size=(len(sizes), K, N)).astype(dtype)
  return x, weights, np.array(sizes, np.int32)


SIZES = {
  "even": [3, 3, 3],
  "empty ones": [0, 4, 0, 0, 5, 0],
  "first only": [9, 0, 0],
  "last only": [0, 0, 9],
  "one row each": [1] * 9,
  "one group": [9],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_the_reference(sizes):
  x, weights, group_sizes = arrays(sizes, 0)
  exact = reference.grouped_matmul(
    x.astype(np.float64), weights.astype(np.float64), group_sizes
  )
  # Worst case of sums of K terms, each rounded once per addition and product.
  magnitude = reference.grouped_matmul(np.abs(x), np.abs(weights), group_sizes)
  got = product(x, weights, group_sizes)
  assert got.dtype == np.float32 and got.shape == (9, N)
  assert np.all(np.abs(got - exact) <= (K + 1) * 2.0**-24 * magnitude)


def test_bf16_is_rounded_once():
  """Integers, so that float32 sums are exact."""
  rng = np.random.default_rng(1)
  group_sizes = np.array([5, 0, 4, 7], np.int32)
  x = rng.integers(-16, 17, (16, K)).astype(BF16)
  weights = rng.integers(-16, 17, (4, K, N)).astype(BF16)
  exact = reference.grouped_matmul(
    x.astype(np.float64), weights.astype(np.float64), group_sizes
  )
  want = exact.astype(BF16)
  assert np.mean(want.astype(np.float64) != exact) > 0.2
  got = product(x, weights, group_sizes)
  assert got.dtype == BF16
  np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_are_independent(dtype):
  """A row's bits depend on the row and its group, wherever the row lies."""
  x, weights, group_sizes = arrays([4, 3, 0, 9], 2, dtype)
  groups = np.repeat(np.arange(4), group_sizes)
  before = np.asarray(product(x, weights, group_sizes))
  rng = np.random.default_rng(3)
  # Within the groups.
  order = np.lexsort((rng.random(16), groups))
  after = np.asarray(product(x[order], weights, group_sizes))
  np.testing.assert_array_equal(
    after.view(np.uint8), before[order].view(np.uint8), strict=True
  )
  # Among other rows, with groups of other sizes: row 5, of group 1, lies at 1.
  other = rng.normal(size=x.shape).astype(dtype)
  other[1] = x[5]
  after = np.asarray(product(other, weights, np.array([0, 12, 4, 0], np.int32)))
  np.testing.assert_array_equal(after[1].view(np.uint8), before[5].view(np.uint8))


def test_group_sizes_are_run_time_values():
  x, weights, _ = arrays([4, 4], 4)
  for sizes in ([8, 0], [0, 8], [3, 5]):
    got = product(x, weights, np.array(sizes, np.int32))
    want = reference.grouped_matmul(x, weights, np.array(sizes))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"x": jnp.zeros((3, 5))}, r"\(3, 5\) and \(2, 4, 6\)"),
    ({"x": jnp.zeros((1, 3, 4))}, r"x must be \[M, K\]"),
    ({"weights": jnp.zeros((4, 6))}, r"weights \[G, K, N\]"),
    ({"group_sizes": jnp.zeros((3,), jnp.int32)}, r"group_sizes must be \[2\]"),
    ({"x": jnp.zeros((3, 4), jnp.bfloat16)}, "x is bfloat16 but weights are float32"),
    ({"implementation": "triton"}, "implementation = 'triton'"),
  ],
)
def test_errors_name_the_argument(changes, says):
  arguments = {
    "x": jnp.zeros((3, 4)),
    "weights": jnp.zeros((2, 4, 6)),
    "group_sizes": jnp.array([1, 2]),
  }
  with pytest.raises(ValueError, match=says):
    ops.grouped_matmul(**(arguments | changes))


def test_numpy_arrays_do():
  x, weights, group_sizes = arrays([2, 0, 3], 5)
  got = ops.grouped_matmul(x, weights, group_sizes)
  np.testing.assert_array_equal(got, product(x, weights, group_sizes))
