"""Int4 weights in the tiles that the kernels read, by the addresses of their parts.

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
  tile_row, tile, byte, shift = _nibbles(depth, features, gated)
  values = (tiles[tile_row, tile, byte] >> shift) & 0xF
  tile_row, tile, address = _scales(depth, features, gated)
  low, high = (tiles[tile_row, tile, address + i] for i in range(2))
  bits = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
  return values.astype(np.int8) - 8, bits.view(ml_dtypes.bfloat16).astype(np.float32)


def pack_int4(
  values: np.ndarray, scales: np.ndarray, gated: bool = False
) -> np.ndarray:
  """The inverse of `unpack_int4`.

  Args:
    values: integers [N, K] in [-8, 7], K a multiple of 32.
    scales: [N, K / 32], exact in bfloat16.
    gated: as in `unpack_int4`; N is even.

  Returns:
    u8 [ceil(N / 16), ceil(K / 64), 576], the value 0 where N or K end inside a tile.
  """
  features, depth = values.shape
  tiles = np.zeros((-(-features // 16), -(-depth // 64), 576), np.uint8)
  tiles[..., :512] = 0x88
  tile_row, tile, byte, shift = _nibbles(depth, features, gated)
  # 8 in its place becomes the nibble; other bits stay. A byte has two.
  change = ((values.astype(np.int64) + 8) ^ 8).astype(np.uint8) << shift
  np.bitwise_xor.at(tiles, (tile_row, tile, byte), change)
  tile_row, tile, address = _scales(depth, features, gated)
  bits = np.ascontiguousarray(scales.astype(ml_dtypes.bfloat16)).view(np.uint16)
  tiles[tile_row, tile, address] = bits & 0xFF
  tiles[tile_row, tile, address + 1] = bits >> 8
  return tiles


def _rows(features: int, gated: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Of each feature, as columns: row of tiles, row in it modulo 8, and which half."""
  n = np.arange(features)[:, None]
  if gated:
    half, n = np.divmod(n, features // 2)
    return n // 8, n % 8, half
  return n // 16, n % 8, n % 16 // 8


def _nibbles(depth: int, features: int, gated: bool) -> tuple[np.ndarray, ...]:
  """Where the values [N, K] lie: row of tiles, tile, byte in it, bits to shift by."""
  tile_row, g, high_row = _rows(features, gated)
  k = np.arange(depth)
  tile, inside = k // 64, k % 64
  word, pair = inside // 16, inside % 16 // 2  # Pair 0..7: k = 2 pair, 2 pair + 1.
  lane = 4 * g + pair % 4
  # The lowest nibbles of a word: rows g, g + 8 of pair t, of pair t + 4; then k + 1.
  nibble = 4 * (inside % 2) + 2 * (pair // 4) + high_row
  byte = 16 * lane + 4 * word + nibble // 2
  return tile_row, tile, byte, (4 * (nibble % 2)).astype(np.uint8)


def _scales(depth: int, features: int, gated: bool) -> tuple[np.ndarray, ...]:
  """Where the scales [N, K / 32] lie: row of tiles, tile, first byte of two in it."""
  tile_row, g, high_row = _rows(features, gated)
  group = np.arange(depth // 32)
  return tile_row, group // 2, 512 + 8 * g + 4 * (group % 2) + 2 * high_row


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
