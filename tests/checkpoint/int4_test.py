"""Int4 with group scales: layout, rounding, exactness, errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint.int4 import (
  Int4Tensor,
  dequantize,
  pack_int4,
  quantize,
  unpack_int4,
)

BF16 = ml_dtypes.bfloat16


def test_pack_puts_value_plus_8_low_nibble_first():
  packed = pack_int4(np.arange(-8, 8, dtype=np.int8))
  # As little-endian 32-bit words, the values that compressed-tensors packs:
  # 0x76543210, 0xfedcba98.
  assert packed.view("<u4").tolist() == [0x76543210, 0xFEDCBA98]


def test_unpack_inverts_pack():
  values = np.random.default_rng(0).integers(-8, 8, (3, 5, 64)).astype(np.int8)
  packed = pack_int4(values)
  assert packed.shape == (3, 5, 32)
  assert packed.dtype == np.uint8
  np.testing.assert_array_equal(unpack_int4(packed), values)
  np.testing.assert_array_equal(pack_int4(unpack_int4(packed)), packed)
  assert unpack_int4(np.zeros((0, 4), np.uint8)).shape == (0, 8)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (np.zeros(3, np.int8), "even"),
    (np.zeros((), np.int8), "even"),
    (np.array([8, 0]), "[-8, 7]"),
    (np.array([0, -9]), "[-8, 7]"),
  ],
)
def test_pack_refuses(values: np.ndarray, message: str):
  with pytest.raises(ValueError) as error:
    pack_int4(values)
  assert message in str(error.value)


def test_unpack_refuses_other_dtypes():
  with pytest.raises(ValueError, match="uint8"):
    unpack_int4(np.zeros(4, np.int8))


def test_quantize_by_hand():
  # One row, two groups. The first has amax 14, so scale 2: 1.0 is a tie between
  # 0 and 1 (rint takes the even one), 3.0 one between 1 and 2. The second is all
  # zero and takes the floor, 1e-5 in bfloat16.
  weight = np.zeros((1, 64), np.float32)
  weight[0, :6] = [14, -14, 1, 3, -5, 4.1]
  tensor = quantize(weight)
  assert tensor.scales.dtype == BF16
  assert tensor.scales.astype(np.float32).tolist() == [[2.0, float(BF16(1e-5))]]
  assert unpack_int4(tensor.packed)[0, :7].tolist() == [7, -7, 0, 2, -2, 2, 0]
  assert tensor.packed[0, :3].tolist() == [0x1F, 0xA8, 0xA6]
  assert (tensor.packed[0, 16:] == 0x88).all()
  assert tensor.shape == (1, 64)
  assert tensor.group_size == 32


def test_quantize_matches_a_scalar_definition():
  rng = np.random.default_rng(1)
  weight = (rng.standard_normal((8, 96)) * np.exp(rng.normal(size=(8, 1)))).astype("f4")
  tensor = quantize(weight)
  values = unpack_int4(tensor.packed)
  for row in range(8):
    for group in range(3):
      block = weight[row, 32 * group : 32 * (group + 1)]
      scale = BF16(max(np.float32(np.abs(block).max()) / np.float32(7), 1e-5))
      assert tensor.scales[row, group] == scale
      for i, w in enumerate(block):
        want = min(max(int(np.rint(w / np.float32(scale))), -8), 7)
        assert values[row, 32 * group + i] == want


def test_quantization_error_is_half_a_step():
  weight = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
  tensor = quantize(weight)
  scales = np.repeat(tensor.scales.astype(np.float32), 32, axis=-1)
  # Rounding gives half a step. The scale is itself rounded to 8 bits, so the
  # group's largest value is 7 (1 + 2**-8) steps at most: still nearest to 7, and
  # nothing is clipped. Division and product in float32 add ulps of 7.
  error = np.abs(dequantize(tensor) - weight) / scales
  assert error.max() <= 0.5 + 8 * 2.0**-23
  assert error.max() > 0.49


def test_quantize_is_idempotent():
  # What was quantised once survives a second time, bit for bit: a checkpoint that
  # is read as float32 and saved again does not drift.
  rng = np.random.default_rng(3)
  weight = rng.standard_normal((64, 256)).astype(np.float32)
  weight *= np.exp(rng.normal(size=(64, 1)) * 4).astype(np.float32)
  weight[0] = 0
  first = quantize(weight)
  second = quantize(dequantize(first))
  np.testing.assert_array_equal(first.packed, second.packed)
  np.testing.assert_array_equal(first.scales, second.scales)


def random_tensor(seed: int) -> Int4Tensor:
  rng = np.random.default_rng(seed)
  packed = rng.integers(0, 256, (16, 64), dtype=np.uint8)
  scales = np.exp(rng.normal(size=(16, 4)) * 10).astype(BF16)
  return Int4Tensor(packed, scales)


def test_dequantize_is_exact_in_float32():
  tensor = random_tensor(4)
  exact = unpack_int4(tensor.packed).astype(np.float64) * np.repeat(
    tensor.scales.astype(np.float64), 32, axis=-1
  )
  result = dequantize(tensor)
  assert result.dtype == np.float32
  np.testing.assert_array_equal(result.astype(np.float64), exact)


def test_dequantize_rounds_once_to_bfloat16():
  tensor = random_tensor(5)
  exact = dequantize(tensor).view(np.uint32)
  # Round to nearest even on the bits, independent of ml_dtypes.
  rounded = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint16)
  result = dequantize(tensor, "bfloat16")
  assert result.dtype == BF16
  np.testing.assert_array_equal(result.view(np.uint16), rounded)
  assert (result.astype(np.float32) != dequantize(tensor)).any()


def test_other_group_sizes_and_ranks():
  weight = np.random.default_rng(6).standard_normal((2, 3, 64)).astype(np.float32)
  tensor = quantize(weight, group_size=16)
  assert tensor.group_size == 16
  assert tensor.scales.shape == (2, 3, 4)
  stacked = dequantize(tensor)
  for expert in range(2):
    np.testing.assert_array_equal(
      dequantize(quantize(weight[expert], group_size=16)), stacked[expert]
    )


@pytest.mark.parametrize(
  ("weight", "group_size", "message"),
  [
    (np.zeros((4, 48), np.float32), 32, "group_size = 32"),
    (np.zeros((4, 0), np.float32), 32, "positive multiple"),
    (np.zeros((), np.float32), 32, "positive multiple"),
    (np.zeros((4, 33), np.float32), 33, "must be even"),
    (np.full((1, 32), np.nan, np.float32), 32, "NaN"),
    (np.full((1, 32), np.inf, np.float32), 32, "infinite"),
  ],
)
def test_quantize_refuses(weight: np.ndarray, group_size: int, message: str):
  with pytest.raises(ValueError) as error:
    quantize(weight, group_size)
  assert message in str(error.value)


def test_dequantize_refuses():
  tensor = random_tensor(7)
  with pytest.raises(ValueError, match="float32 or bfloat16"):
    dequantize(tensor, np.float16)
  for bad in (np.nan, np.inf, 1e38):
    scales = tensor.scales.copy()
    scales[3, 1] = bad
    with pytest.raises(ValueError, match="scales"):
      dequantize(Int4Tensor(tensor.packed, scales))


@pytest.mark.parametrize(
  ("packed", "scales", "message"),
  [
    (np.zeros((2, 16), np.int8), np.zeros((2, 1), BF16), "packed must be uint8"),
    (np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.float32), "must be bfloat16"),
    (np.zeros((2, 16), np.uint8), np.zeros((3, 1), BF16), "do not fit"),
    (np.zeros((2, 16), np.uint8), np.zeros((2, 3), BF16), "do not fit"),
    (np.zeros((2, 16), np.uint8), np.zeros((2, 0), BF16), "do not fit"),
    (np.zeros((2, 16), np.uint8), np.zeros((2, 32), BF16), "do not fit"),
    (np.zeros((2, 16), np.uint8), np.zeros(2, BF16), "do not fit"),
  ],
)
def test_int4_tensor_refuses(packed: np.ndarray, scales: np.ndarray, message: str):
  with pytest.raises(ValueError, match=message):
    Int4Tensor(packed, scales)
