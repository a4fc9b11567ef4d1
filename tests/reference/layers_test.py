from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.reference import layers

BF16 = ml_dtypes.bfloat16


def test_rms_norm_casts_before_the_weight():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((40, 32)).astype(BF16)
  weight = (1 + 0.2 * rng.standard_normal(32)).astype(np.float32)
  got = layers.rms_norm(x, weight, 1e-5)
  exact = x.astype(np.float64)
  exact /= np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-5)
  want = exact.astype(np.float32).astype(BF16) * weight.astype(BF16)
  np.testing.assert_array_equal(got, want)
  fused = (exact * weight.astype(BF16).astype(np.float64)).astype(np.float32)
  assert got.dtype == BF16 and np.any(got != fused.astype(BF16))


def test_silu_rounds_once():
  x = np.linspace(-20, 20, 1001).astype(BF16)
  wide = x.astype(np.float64)
  want = (wide / (1 + np.exp(-wide))).astype(np.float32).astype(BF16)
  np.testing.assert_array_equal(layers.silu(x), want)


def test_sigmoid_at_the_ends():
  x = np.array([-1e4, -80.0, 0.0, 80.0, 1e4], np.float32)
  with np.errstate(all="raise", under="ignore"):
    got = layers.sigmoid(x)
  np.testing.assert_allclose(got, [0, np.exp(-80.0), 0.5, 1, 1], rtol=1e-6)


def test_swiglu_in_closed_form():
  x = np.array([[1.0, 2.0]])
  gate = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
  up = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 0.0]])
  down = np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
  sig = 1 / (1 + np.exp(-np.array([1.0, 2.0, 3.0])))
  inner = np.array([1 * sig[0] * 2, 2 * sig[1] * 1, 3 * sig[2] * 2])
  np.testing.assert_allclose(layers.swiglu(x, gate, up, down)[0], down @ inner)


def test_log_softmax_is_the_formula_bit_for_bit():
  rng = np.random.default_rng(1)
  x = (4 * rng.standard_normal((20, 300))).astype(np.float32)
  x[3, 5] = -np.inf
  got = layers.log_softmax(x)
  top = x.max(axis=-1, keepdims=True)
  want = x - (top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))
  np.testing.assert_array_equal(got, want)
  wide = x.astype(np.float64)
  exact = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
  # Two roundings of numbers below 32, and a sum of 300 terms.
  np.testing.assert_allclose(got, exact, atol=1e-5)
  assert got[3, 5] == -np.inf


def test_log_softmax_of_rows_without_a_distribution_is_nan():
  x = np.array([[-np.inf, -np.inf], [np.nan, 0.0], [np.inf, 0.0], [0.0, 0.0]], "f4")
  got = layers.log_softmax(x)
  assert np.all(np.isnan(got[:2])) and np.isnan(got[2]).any()
  np.testing.assert_allclose(got[3], np.log(0.5), rtol=1e-7)


def test_dtypes_follow_the_input():
  for dtype, out in [(np.float64, np.float64), (np.float32, np.float32), (BF16, "f4")]:
    x = np.ones((2, 3), dtype)
    assert layers.softmax(x).dtype == out
    assert layers.log_softmax(x).dtype == out
    assert layers.linear(x, np.ones((4, 3), np.float32)).dtype == dtype
