from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.ops.matmul import einsum, matmul

BF16 = ml_dtypes.bfloat16

product = jax.jit(matmul)


def random(shape: tuple[int, ...], seed: int, dtype=np.float32) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_same_bits(got, want) -> None:
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype and got.shape == want.shape
  np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_float32_product_is_a_true_one():
  x, w = random((7, 200), 0), random((200, 31), 1)
  exact = x.astype(np.float64) @ w.astype(np.float64)
  # Sums of 200 products, rounded one by one: 7 sqrt(200) 2^-24 of the terms'
  # magnitudes but for a chance of e^-24 (Higham & Mary 2019). The inputs alone
  # rounded to TF32 add sqrt(200) 2^-11 of a term, ten times as much.
  bound = 7 * 200**0.5 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w))
  got = product(x, w)
  assert got.dtype == np.float32
  assert np.all(np.abs(got - exact) <= bound)
  assert np.any(product(x.astype(BF16), w.astype(BF16)) - exact > bound)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
def test_bf16_product_is_the_float32_one_rounded_once(rows):
  """Upcast first, as on a CPU: every row, the last ones too."""
  x, w = random((rows, 200), 2, BF16), random((200, 31), 3, BF16)
  wide = product(x.astype(np.float32), w.astype(np.float32))
  got = product(x, w)
  assert_same_bits(got, np.asarray(wide).astype(BF16))


def test_bf16_sums_are_not_rounded_on_the_way():
  """Integers, so that float32 sums are exact: any other rounding would show."""
  rng = np.random.default_rng(4)
  x = rng.integers(-8, 9, (9, 640)).astype(BF16)
  w = rng.integers(-8, 9, (640, 24)).astype(BF16)
  exact = x.astype(np.int64) @ w.astype(np.int64)
  assert np.mean(exact != exact.astype(BF16).astype(np.int64)) > 0.2
  assert_same_bits(product(x, w), exact.astype(np.float32).astype(BF16))
  assert_same_bits(
    jax.jit(lambda x, w: einsum("nk,km->nm", x, w))(x, w), exact.astype(np.float32)
  )


def test_einsum_of_bf16_rounds_to_the_dtype_that_is_asked_for():
  x, w = random((2, 5, 3, 16), 5, BF16), random((3, 16, 8), 6, BF16)
  wide = np.einsum("bnhc,hcr->bnhr", x.astype(np.float64), w.astype(np.float64))
  single = jax.jit(lambda x, w: einsum("bnhc,hcr->bnhr", x, w))(x, w)
  narrow = jax.jit(lambda x, w: einsum("bnhc,hcr->bnhr", x, w, BF16))(x, w)
  assert single.dtype == np.float32
  np.testing.assert_allclose(single, wide, rtol=0, atol=17 * 2.0**-24 * 40)
  assert_same_bits(narrow, np.asarray(single).astype(BF16))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_are_independent(dtype):
  """At a fixed number of rows, a row's bits follow it to any place."""
  x, w = random((33, 96), 7, dtype), random((96, 50), 8, dtype)
  straight = np.asarray(product(x, w))
  rng = np.random.default_rng(9)
  for _ in range(5):
    order = rng.permutation(33)
    assert_same_bits(product(x[order], w), straight[order])
  # The other rows' content does not matter, were it not a number.
  other = np.full_like(x, np.nan)
  for row in (0, 15, 32):
    other[row] = x[row]
    assert_same_bits(product(other, w)[row], straight[row])


def test_leading_axes_are_rows():
  x, w = random((2, 3, 4, 16), 10), random((16, 5), 11)
  flat = product(x.reshape(24, 16), w)
  assert_same_bits(product(x, w), np.asarray(flat).reshape(2, 3, 4, 5))
