from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.model.rounding import copy_rounded, round_to_bf16

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


@pytest.mark.parametrize("into", [np.float32, BF16])
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (70_001,), (300, 500), (3, 5, 7)])
def test_every_pair_of_dtypes(into, source, shape):
  values = np.random.default_rng(1).standard_normal(shape).astype(source)
  want = values.astype(np.float32).astype(into)
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
