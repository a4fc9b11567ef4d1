from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import dequantize
from kdtree_jax.checkpoint.hf.formats import dequantize_fp8, int4_from_words
from kdtree_jax.checkpoint.int4 import unpack_int4

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16


def e4m3(byte: int) -> float:
  """OCP's FP8, by its definition: sign, four bits of exponent, three of fraction."""
  sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
  size = fraction / 512 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
  return -size if sign else size


def test_every_fp8_value():
  codes = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
  scale = np.float32(0.3)
  got = dequantize_fp8(codes[None].view(E4M3), np.full((1, 2), scale))
  want = np.array([[e4m3(int(b)) for b in codes]], np.float32) * scale
  assert got.dtype == np.float32
  # Bits, so that the sign of a zero counts.
  np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(
  "shape", [(1, 1), (128, 128), (129, 127), (300, 130), (576, 256)]
)
@pytest.mark.parametrize("scale_dtype", [np.float32, BF16, ml_dtypes.float8_e8m0fnu])
def test_a_scale_belongs_to_its_block(shape, scale_dtype):
  rng = np.random.default_rng(0)
  values = rng.integers(0, 0x7F, shape, dtype=np.uint8).view(E4M3)
  blocks = tuple(-(-size // 128) for size in shape)
  scales = (2.0 ** rng.integers(-9, 3, blocks)).astype(scale_dtype)
  if scale_dtype == np.float32:
    scales *= rng.random(blocks, np.float32)
  got = dequantize_fp8(values, scales)
  for row in {0, shape[0] // 2, shape[0] - 1}:
    for column in {0, shape[1] // 2, shape[1] - 1}:
      scale = scales[row // 128, column // 128].astype(np.float32)
      assert got[row, column] == values[row, column].astype(np.float32) * scale


@pytest.mark.parametrize(
  ("values", "scales", "reason"),
  [
    (np.zeros((4, 4), np.uint8), np.ones((1, 1)), "must be float8_e4m3fn"),
    (np.zeros((4, 4), ml_dtypes.float8_e5m2), np.ones((1, 1)), "float8_e4m3fn"),
    (np.zeros(4, E4M3), np.ones(1), r"\[out, in\]"),
    (np.zeros((129, 4), E4M3), np.ones((1, 1)), r"they must be \[2, 1\]"),
    (np.zeros((4, 4), E4M3), np.ones((1, 2)), r"they must be \[1, 1\]"),
    (np.full((4, 4), np.nan, E4M3), np.ones((1, 1)), "NaN or infinite"),
    (np.ones((4, 4), E4M3), np.full((1, 1), np.inf), "NaN or infinite"),
    (np.full((4, 4), 448, E4M3), np.full((1, 1), 1e38), "NaN or infinite"),
  ],
)
def test_fp8_that_is_refused(values, scales, reason):
  with pytest.raises(ValueError, match=reason):
    dequantize_fp8(values, scales.astype(np.float32))


def test_int4_bits():
  """Values -8 .. 7: two words whose nibbles count up, the lowest first."""
  words = np.array([[0x76543210, 0xFEDCBA98] * 2], np.uint32).view(np.int32)
  tensor = int4_from_words(words, np.array([[0.5]], BF16))
  want = np.tile(np.arange(-8, 8), 2)[None]
  np.testing.assert_array_equal(unpack_int4(tensor.packed), want)
  np.testing.assert_array_equal(dequantize(tensor), want * np.float32(0.5))
  assert tensor.shape == (1, 32) and tensor.group_size == 32


def test_int4_is_not_copied():
  words = np.random.default_rng(0).integers(0, 99, (6, 8), dtype=np.int32)
  scales = np.ones((6, 2), BF16)
  tensor = int4_from_words(words, scales)
  assert np.shares_memory(tensor.packed, words) and tensor.scales is scales


@pytest.mark.parametrize(
  ("words", "scales", "reason"),
  [
    (np.zeros((2, 4), np.uint32), np.ones((2, 1), BF16), "must be int32"),
    (np.zeros(4, np.int32), np.ones((1,), BF16), r"\[out, in / 8\]"),
    (np.zeros((2, 4), np.int32), np.ones((2, 1), np.float16), "must be bfloat16"),
    (np.zeros((2, 4), np.int32), np.ones((1, 1), BF16), "do not fit"),
    (np.zeros((2, 4), np.int32), np.ones((2, 2), BF16), "groups are of 16"),
  ],
)
def test_int4_that_is_refused(words, scales, reason):
  with pytest.raises(ValueError, match=reason):
    int4_from_words(words, scales)
