"""Weights of 4 bits in the layout that the matrix products read.

The layout is that of custom_calls/matmul.h: tiles of 16 output features by 64 input
features, 512 bytes of nibbles in the order in which the lanes of a warp need them and
64 bytes of bfloat16 scales, one per feature and 32 input features. It is the only int4
layout at run time, on every device; files keep that of `kdtree_jax.checkpoint.int4`,
which is symmetric and has its scales too, so that `pack` only moves bits.

A weight is `(nibble - 8) * scale`: exact in float32, rounded once to bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

if TYPE_CHECKING:  # That package imports the model, which imports this file.
  from kdtree_jax.checkpoint.int4 import Int4Tensor

TILE_ROWS = 16  # Output features of a tile.
TILE_DEPTH = 64  # Input features of a tile.
TILE_BYTES = 576
GROUP_SIZE = 32  # Input features that share a scale.

# Nonzero scales of which every weight is a bfloat16 in the units of the CUDA kernels,
# see Int4Tiles of custom_calls/matmul_tiles.cuh.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-78, 2.0**42

_NIBBLE_BYTES = 512
_ZEROS = 0x88  # Two nibbles of value 0.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight:
  """Kernels [G, K, N] of G groups (experts) in int4 tiles.

  Attributes:
    tiles: u8 [G, ceil(N / 16), ceil(K / 64), 576].
    depth: K, input features.
    features: N, output features; gate and up together where `gated`.
    gated: rows 0..7 of tile row R are features 8 R .. 8 R + 7 of the first half of N
      (gate), rows 8..15 those of the second half (up). Otherwise row r is feature
      16 R + r.
  """

  tiles: jax.Array
  depth: int = dataclasses.field(metadata={"static": True})
  features: int = dataclasses.field(metadata={"static": True})
  gated: bool = dataclasses.field(default=False, metadata={"static": True})

  @property
  def groups(self) -> int:
    return self.tiles.shape[0]

  @property
  def shape(self) -> tuple[int, int, int]:
    """Logical shape [G, K, N]."""
    return self.groups, self.depth, self.features


def tiles_shape(
  groups: int, depth: int, features: int, gated: bool = False
) -> tuple[int, int, int, int]:
  """Shape of the tiles of kernels [groups, depth, features].

  Raises:
    ValueError: a size that int4 cannot have.
  """
  if depth < 1 or depth % GROUP_SIZE:
    raise ValueError(
      f"depth = {depth} is not allowed: int4 weights need a positive multiple of "
      f"{GROUP_SIZE} input features, one scale for each {GROUP_SIZE}; pad the weight "
      "with zeros, or keep it as floats"
    )
  if features < 1:
    raise ValueError(f"features = {features} is not allowed: it must be 1 or more")
  if gated and features % 2:
    raise ValueError(
      f"features = {features} is not allowed: a gated weight has an even number of "
      "output features, gate's and up's"
    )
  return groups, -(-features // TILE_ROWS), -(-depth // TILE_DEPTH), TILE_BYTES


def check(name: str, weight: Int4Weight) -> None:
  """Raises a ValueError with the argument's name where tiles do not fit the sizes."""
  try:
    G = weight.tiles.shape[0] if weight.tiles.ndim else 0
    shape = tiles_shape(G, weight.depth, weight.features, weight.gated)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error
  if weight.tiles.shape != shape or weight.tiles.dtype != np.uint8:
    raise ValueError(
      f"{name}.tiles is {weight.tiles.dtype} {list(weight.tiles.shape)}; depth = "
      f"{weight.depth} and features = {weight.features} need uint8 {['G', *shape[1:]]}"
    )


def pack(tensor: Int4Tensor, gated: bool = False) -> Int4Weight:
  """Rearranges weights as files hold them into tiles.

  Works group by group: besides the result, no second copy of all is made.

  Args:
    tensor: `kdtree_jax.checkpoint.Int4Tensor` [G, N, K] with groups of 32.
    gated: see `Int4Weight`; the first half of N is gate.

  Returns:
    The weight, with its tiles in numpy.

  Raises:
    ValueError: another rank or group size, K not a multiple of 32, scales that are
      neither 0 nor between 2^-78 and 2^42 in size.
  """
  if len(tensor.shape) != 3:
    raise ValueError(f"tensor must be [G, N, K]; its shape is {list(tensor.shape)}")
  G, N, K = tensor.shape
  tiles = np.empty(tiles_shape(G, K, N, gated), np.uint8)
  for group in range(G):
    tiles[group] = pack_tiles(tensor.packed[group], tensor.scales[group], gated)
  return Int4Weight(tiles, K, N, gated)  # pyright: ignore[reportArgumentType]


def pack_tiles(packed: Any, scales: Any, gated: bool = False) -> Any:
  """The tiles of one group, in numpy or, for JAX's arrays, on their device.

  Args:
    packed: u8 [N, K / 2] nibbles of value + 8, the low one first.
    scales: bf16 [N, K / 32], 0 or between 2^-78 and 2^42 in size. JAX's are not looked
      at.
    gated: see `Int4Weight`.

  Returns:
    u8 [ceil(N / 16), ceil(K / 64), 576].

  Raises:
    ValueError: as `pack`, and arrays of another shape or dtype.
  """
  if packed.ndim != 2 or packed.dtype != np.uint8:
    raise ValueError(
      f"packed must be uint8 [N, K / 2]; it is {packed.dtype} {list(packed.shape)}"
    )
  N, K = packed.shape[0], 2 * packed.shape[1]
  _, R, C, _ = tiles_shape(1, K, N, gated)
  _check_scales(scales, (N, K // GROUP_SIZE))
  xp: Any = jnp if isinstance(packed, jax.Array) else np

  # Row 16 R + 8 h + g of all tiles, see matmul.h; k = 16 j + 8 e + 2 t + parity.
  rows = _tile_rows(xp, packed, C * TILE_DEPTH // 2, _ZEROS, gated)
  rows = rows.reshape(R, 2, 8, C, 4, 2, 4)  # [R, h, g, C, j, e, t]
  low, high = rows[:, 0], rows[:, 1]
  # Bytes of even and of odd k; their low nibbles are of row g, the high of g + 8.
  even = (low & 0xF) | ((high & 0xF) << 4)
  odd = (low >> 4) | (high & 0xF0)
  words = xp.stack([even, odd], axis=-1)  # [R, g, C, j, e, t, parity]
  nibbles = words.transpose(0, 2, 1, 5, 3, 6, 4).reshape(R, C, _NIBBLE_BYTES)

  bits = _bits(scales)
  bits = _tile_rows(xp, bits, C * TILE_DEPTH // GROUP_SIZE, 0, gated)
  bits = bits.reshape(R, 2, 8, C, 2).transpose(0, 3, 2, 4, 1)  # [R, C, g, s, h]
  halves = xp.stack([bits & 0xFF, bits >> 8], axis=-1).astype(np.uint8)
  return xp.concatenate([nibbles, halves.reshape(R, C, 64)], axis=-1)


def unpack(weight: Int4Weight) -> tuple[np.ndarray, np.ndarray]:
  """The inverse of `pack`, in numpy.

  Returns:
    (i8 [G, N, K] values in [-8, 7], bf16 [G, N, K / 32] scales).

  Raises:
    ValueError: tiles that do not fit the weight's sizes.
  """
  check("weight", weight)
  G, K, N = weight.shape
  values = np.empty((G, N, K), np.int8)
  scales = np.empty((G, N, K // GROUP_SIZE), ml_dtypes.bfloat16)
  for group in range(G):
    nibbles, bits = _parts(np, np.asarray(weight.tiles[group])[None])
    # [R, C, g, t, j, parity, e, h] to [R, h, g, C, j, e, t, parity].
    nibbles = nibbles[0].transpose(0, 7, 2, 1, 4, 6, 3, 5).astype(np.int8) - 8
    values[group] = _features(nibbles, weight)[:, :K]
    bits = bits[0].transpose(0, 4, 2, 1, 3)  # [R, h, g, C, s]
    found = _features(bits, weight)[:, : K // GROUP_SIZE]
    scales[group] = np.ascontiguousarray(found).view(ml_dtypes.bfloat16)
  return values, scales


def dequantize(weight: Int4Weight, dtype: jax.typing.DTypeLike) -> jax.Array:
  """The kernels as floats; jit-able.

  Args:
    weight: G kernels.
    dtype: float32 (exact) or bfloat16 (rounded once).

  Returns:
    [G, K, N] of `dtype`, features in their own order: gate | up where `gated`.

  Raises:
    ValueError: another dtype, or tiles that do not fit the weight's sizes.
  """
  check("weight", weight)
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
    raise ValueError(f"dtype = {dtype} is not allowed: float32 or bfloat16")
  G, K, N = weight.shape
  R, C = weight.tiles.shape[1:3]
  nibbles, bits = _parts(jnp, jnp.asarray(weight.tiles))
  values = nibbles.astype(jnp.float32) - 8
  scales = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
  # [G, R, C, g, t, s, j', parity, e, h] times [G, R, C, g, s, h].
  values = values.reshape(G, R, C, 8, 4, 2, 2, 2, 2, 2)
  values = values * scales[:, :, :, :, None, :, None, None, None, :]
  if dtype == jnp.bfloat16:
    # The cast alone is not enough: XLA drops a pair of casts there and back.
    values = jax.lax.reduce_precision(values, 8, 7)
  # To [G, C, s, j', e, t, parity] and then R, h, g, or h, R, g where gated.
  order = (9, 1, 3) if weight.gated else (1, 9, 3)
  values = values.transpose(0, 2, 5, 6, 8, 4, 7, *order).astype(dtype)
  values = values.reshape(G, C * TILE_DEPTH, R * TILE_ROWS)[:, :K]
  if weight.gated:
    return values.reshape(G, K, 2, R * 8)[..., : N // 2].reshape(G, K, N)
  return values[..., :N]


def take(weight: Int4Weight, groups: jax.Array) -> Int4Weight:
  """Some of the kernels: i32 [M] to a weight of M groups, one for each entry."""
  return dataclasses.replace(weight, tiles=weight.tiles[groups])


def random_int4(
  key: jax.Array,
  groups: int,
  depth: int,
  features: int,
  gated: bool = False,
  scale: float = 1.0,
) -> Int4Weight:
  """Random weights of mean 0, made as tiles: no floats, one group at a time.

  Args:
    key: JAX's random key.
    groups: G.
    depth: K, a multiple of 32.
    features: N.
    gated: see `Int4Weight`.
    scale: standard deviation of the weights, about.

  Raises:
    ValueError: sizes that int4 cannot have.
  """
  _, R, C, _ = tiles_shape(groups, depth, features, gated)
  mask = _inside(depth, features, gated)
  # Values are -7..7 and once more 0; the mean of their squares is 17.5.
  unit = scale / 17.5**0.5

  def one(key: jax.Array) -> jax.Array:
    for_values, for_scales = jax.random.split(key)
    words = jax.random.bits(for_values, (R, C, _NIBBLE_BYTES // 4), jnp.uint32)
    # A nibble of 0, value -8, would make the mean negative: it becomes 8, value 0.
    any_bit = words | (words >> 1) | (words >> 2) | (words >> 3)
    words = words | ((~any_bit & jnp.uint32(0x11111111)) << 3)
    nibbles = jax.lax.bitcast_convert_type(words, jnp.uint8)
    scales = jax.random.uniform(for_scales, (R, C, 32), jnp.float32, 0.75, 1.25)
    scales = jax.lax.bitcast_convert_type(
      (unit * scales).astype(jnp.bfloat16), np.uint8
    )
    tiles = [nibbles.reshape(R, C, -1), scales.reshape(R, C, -1)]
    return jnp.concatenate(tiles, axis=-1)

  tiles = jax.lax.map(one, jax.random.split(key, groups))
  if mask is not None:
    tiles = (tiles & mask) | (_no_weights() & ~mask)
  return Int4Weight(tiles, depth, features, gated)


def check_scales(scales: Any) -> None:
  """Raises where numpy's scales are of a size that tiles cannot have.

  The CUDA kernels compute in units in which larger and smaller ones would not be exact;
  files may have any that are finite.

  Raises:
    ValueError: a scale that is neither 0 nor between 2^-78 and 2^42 in size.
  """
  sizes = np.abs(scales.astype(np.float32))
  # Written so that NaN fails as well.
  fits = (sizes == 0) | ((sizes >= SMALLEST_SCALE) & (sizes <= LARGEST_SCALE))
  if not fits.all():
    worst = scales[tuple(np.argwhere(~fits)[0])]
    raise ValueError(
      f"scales hold {worst}; they must be 0 or between 2^-78 and 2^42 in size"
    )


def _check_scales(scales: Any, shape: tuple[int, ...]) -> None:
  if scales.shape != shape:
    how = "one per output feature and 32 input features"
    raise ValueError(f"scales must be {list(shape)}, {how}; they are {scales.shape}")
  if scales.dtype != ml_dtypes.bfloat16:
    raise ValueError(f"scales must be bfloat16; they are {scales.dtype}")
  if not isinstance(scales, jax.Array):
    check_scales(scales)


def _bits(scales: Any) -> Any:
  if isinstance(scales, jax.Array):
    return jax.lax.bitcast_convert_type(scales, jnp.uint16)
  return np.ascontiguousarray(scales).view(np.uint16)


def _tile_rows(xp: Any, rows: Any, width: int, filler: int, gated: bool) -> Any:
  """Rows [N, M] in the order of tiles, with filler: [ceil(N / 16) * 16, width]."""
  N = rows.shape[0]
  R = -(-N // TILE_ROWS)
  parts = rows.reshape(2 if gated else 1, -1, rows.shape[1])
  beyond = TILE_ROWS * R // len(parts) - parts.shape[1]
  padding = ((0, 0), (0, beyond), (0, width - rows.shape[1]))
  parts = xp.pad(parts, padding, constant_values=filler)
  if gated:
    parts = parts.reshape(2, R, 8, width).transpose(1, 0, 2, 3)
  return parts.reshape(R * TILE_ROWS, width)


def _features(rows: np.ndarray, weight: Int4Weight) -> np.ndarray:
  """[R, 2, 8, ...] of all tiles to [N, the rest], features in their own order."""
  R, N = rows.shape[0], weight.features
  if weight.gated:
    halves = rows.swapaxes(0, 1).reshape(2, R * 8, -1)
    return halves[:, : N // 2].reshape(N, -1)
  return rows.reshape(R * TILE_ROWS, -1)[:N]


def _parts(xp: Any, tiles: Any) -> tuple[Any, Any]:
  """Nibbles u8 [G, R, C, g, t, j, parity, e, h] and scales' bits u16 [..., g, s, h]."""
  lead = tiles.shape[:3]
  pairs = tiles[..., :_NIBBLE_BYTES].reshape(*lead, 8, 4, 4, 2, 2)
  nibbles = xp.stack([pairs & 0xF, pairs >> 4], axis=-1)
  halves = tiles[..., _NIBBLE_BYTES:].reshape(*lead, 8, 2, 2, 2).astype(np.uint16)
  return nibbles, halves[..., 0] | (halves[..., 1] << 8)


def _inside(depth: int, features: int, gated: bool) -> np.ndarray | None:
  """u8 [R, C, 576]: which bits of the tiles are weights' and scales'; None: all."""
  rows = features // 2 if gated else features
  if depth % TILE_DEPTH == 0 and rows % (8 if gated else 16) == 0:
    return None
  packed = np.full((features, depth // 2), 0x77, np.uint8)
  ones = np.ones((features, depth // GROUP_SIZE), ml_dtypes.bfloat16)
  tiles = pack_tiles(packed, ones, gated)
  nibbles = np.where(tiles[..., :512] & 0x0F == 7, 0x0F, 0).astype(np.uint8)
  nibbles |= np.where(tiles[..., :512] >> 4 == 7, 0xF0, 0).astype(np.uint8)
  pairs = tiles[..., 512:].reshape(*tiles.shape[:2], 32, 2)
  scales = np.where(pairs.any(-1, keepdims=True), 0xFF, 0).astype(np.uint8)
  scales = np.broadcast_to(scales, pairs.shape).reshape(*tiles.shape[:2], 64)
  return np.concatenate([nibbles, scales], axis=-1)


def _no_weights() -> np.ndarray:
  """u8 [576]: a tile of zeros."""
  return np.repeat(np.array([_ZEROS, 0], np.uint8), (512, 64))
