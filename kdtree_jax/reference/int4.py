"""Int4 weights in the tiles that the kernels read, taken apart as documented.

Source: the layout in custom_calls/matmul.h. One group (expert) at a time.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np


def unpack_int4(
  tiles: np.ndarray, depth: int, features: int, gated: bool = False
) -> tuple[np.ndarray, np.ndarray]:
  """Values and scales of one group of int4 weights.

  Args:
    tiles: u8 [ceil(N / 16), ceil(K / 64), 576].
    depth: K, a multiple of 32.
    features: N.
    gated: rows 0..7 of a tile are of the first half of N, rows 8..15 of the second.

  Returns:
    (i8 [N, K] values in [-8, 7], f32 [N, K / 32] scales).
  """
  n = np.arange(features)
  if gated:
    half, n = np.divmod(n, features // 2)
    tile_row, row = n // 8, 8 * half + n % 8
  else:
    tile_row, row = n // 16, n % 16
  tile_row, g, high_row = tile_row[:, None], row[:, None] % 8, row[:, None] // 8

  k = np.arange(depth)
  tile, inside = k // 64, k % 64
  word, pair = inside // 16, inside % 16 // 2  # Pair 0..7: k = 2 pair, 2 pair + 1.
  lane = 4 * g + pair % 4
  # The lowest nibbles of a word: rows g, g + 8 of pair t, of pair t + 4; then k + 1.
  nibble = 4 * (inside % 2) + 2 * (pair // 4) + high_row
  byte = tiles[tile_row, tile, 16 * lane + 4 * word + nibble // 2]
  values = (byte >> 4 * (nibble % 2)) & 0xF

  group = np.arange(depth // 32)
  address = 512 + 8 * g + 4 * (group % 2) + 2 * high_row
  low, high = (tiles[tile_row, group // 2, address + i] for i in range(2))
  bits = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
  return values.astype(np.int8) - 8, bits.view(ml_dtypes.bfloat16).astype(np.float32)


def dequantize_int4(
  tiles: np.ndarray,
  depth: int,
  features: int,
  gated: bool = False,
  dtype: np.typing.DTypeLike = np.float32,
) -> np.ndarray:
  """`value * scale` of one group, [K, N]: exact in float32, else rounded once."""
  values, scales = unpack_int4(tiles, depth, features, gated)
  exact = values.astype(np.float32) * np.repeat(scales, 32, axis=-1)
  return exact.T.astype(dtype, copy=False)
