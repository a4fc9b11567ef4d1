from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.model.rounding import copy_rounded, round_to_bf16, rounded

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float16, BF16, np.float64]


def bf16_by_definition(value: float) -> float:
  """The nearest number of eight significant bits, the even one of two."""
  mantissa, exponent = np.frexp(np.float64(value))
  step = np.float64(2) ** max(int(exponent) - 8, -133)
  return float(np.rint(np.float64(value) / step) * step)


def test_bf16_is_rounded_to_nearest_even():
  rng = np.random.default_rng(0)
  size = rng.standard_normal(20_000) * 2.0 ** rng.integers(-130, 120, 20_000)
  ties = 1 + np.arange(64) / 256  # Every other one lies between two numbers.
  edges = [0.0, -0.0, 2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-149, 3.38e38]
  values = np.concatenate([size, ties, -ties, edges]).astype(np.float32)
  got = round_to_bf16(values).view(BF16)
  want = [bf16_by_definition(float(v)) for v in values]
  np.testing.assert_array_equal(got.astype(np.float64), want)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(values))


def test_bf16_of_every_exponent_and_low_half():
  """As ml_dtypes has it, where it is a number."""
  for base in (0x0000_0000, 0x007F_8000, 0x3F7F_0000, 0x7F7E_0000, 0xC000_0000):
    bits = np.arange(base, base + 2**18, dtype=np.uint32)
    values = bits.view(np.float32)
    nan = np.isnan(values)
    got = round_to_bf16(values)
    np.testing.assert_array_equal(got[~nan], values[~nan].astype(BF16).view(np.uint16))
    assert np.isnan(got[nan].view(BF16).astype(np.float32)).all()


def test_nan_stays_and_infinity_too():
  bits = np.array([0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0x7F80_0000, 0xFF80_0000])
  values = bits.astype(np.uint32).view(np.float32)
  got = round_to_bf16(values).view(BF16).astype(np.float32)
  np.testing.assert_array_equal(np.isnan(got), [True, True, True, False, False])
  np.testing.assert_array_equal(got[3:], [np.inf, -np.inf])
  assert round_to_bf16(np.array([3.4e38], np.float32)).view(BF16)[0] == np.inf


def float64_near_ties() -> np.ndarray:
  """Beside numbers of bfloat16 and their middles, where float32 is too coarse to see
  the side; down to its subnormals and up to its largest."""
  size = 2.0 ** np.arange(-140, 128)[:, None, None]
  middles = size * (1 + np.arange(0, 4) / 256)[:, None]
  near = 2.0 ** -np.array([24, 25, 26, 30, 40, 45])
  values = middles * (1 + np.concatenate([near, -near, [0.0]]))
  values = values[np.abs(values) < float(ml_dtypes.finfo(BF16).max)]
  return np.concatenate([values, -values])


def test_float64_is_rounded_once():
  values = float64_near_ties()
  want = [bf16_by_definition(v) for v in values]
  got = rounded(values, BF16)
  np.testing.assert_array_equal(got.astype(np.float64), want)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(values))
  into = np.empty(values.shape, BF16)
  copy_rounded(into, values)
  assert into.tobytes() == got.tobytes()
  # Twice, by way of float32, is something else.
  assert (values.astype(np.float32).astype(BF16) != got).sum() > 1000
  assert rounded(np.array([1 + 2.0**-8 + 2.0**-40]), BF16)[0] == 1.0078125
  odd = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0, 1e-300])
  np.testing.assert_array_equal(
    rounded(odd, BF16).astype(np.float32),
    np.array([np.nan, np.inf, -np.inf, np.inf, -np.inf, 0, 0], np.float32),
  )


@pytest.mark.parametrize("into", [np.float32, BF16])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(into, source, bad):
  for shape, index in (((), ()), ((3,), 1), ((200, 700), (199, 699))):
    values = np.ones(shape, source)
    values[index] = bad
    target = np.zeros(shape, into)
    with pytest.raises(ValueError, match="holds NaN or infinite"):
      copy_rounded(target, values, finite=True)
    copy_rounded(target, values)
    np.testing.assert_array_equal(target.astype(np.float64), values.astype(np.float64))


def test_the_largest_numbers_are_finite():
  for into, largest in ((np.float32, np.float32), (BF16, BF16)):
    most = np.array(
      [ml_dtypes.finfo(largest).max, ml_dtypes.finfo(largest).min], np.float64
    )
    target = np.zeros(2, into)
    copy_rounded(target, most, finite=True)
    np.testing.assert_array_equal(target.astype(np.float64), most)
    with pytest.raises(ValueError, match="overflows"):
      copy_rounded(target, most * 1.01, finite=True)


@pytest.mark.parametrize("into", [np.float32, BF16])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (70_001,), (300, 500), (3, 5, 7)])
def test_every_pair_of_dtypes(into, source, shape):
  values = np.random.default_rng(1).standard_normal(shape).astype(source)
  want = rounded(values, into)
  if source != np.float64:
    assert want.tobytes() == values.astype(np.float32).astype(into).tobytes()
  got = np.empty(shape, into)
  copy_rounded(got, values)
  assert got.tobytes() == want.tobytes()
  got = np.empty(shape[::-1], into)
  copy_rounded(got.T, values)
  assert got.tobytes() == np.ascontiguousarray(want.T).tobytes()
  if values.ndim == 2:  # Neither contiguous.
    got = np.zeros((shape[1], 2 * shape[0]), into)
    copy_rounded(got[:, ::2].T, values[::-1])
    assert got[:, ::2].tobytes() == np.ascontiguousarray(want[::-1].T).tobytes()
    assert not got[:, 1::2].any()


def test_shapes_must_agree():
  with pytest.raises(ValueError, match=r"source is \[3\], into \[4\]"):
    copy_rounded(np.zeros(4), np.zeros(3))
