"""Rotary position embedding with YaRN, from angles to rotated features.

Sources: RoPE, arXiv 2104.09864, section 3.2; YaRN, arXiv 2309.00071, section 3.2,
with the band edges and clamps of modeling_deepseek.py (DeepSeek-V3's remote code),
class DeepseekV3YarnRotaryEmbedding.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from kdtree_jax.config import YarnConfig

AngleDtype = Literal["float64", "float32"]


class RopeTable(NamedTuple):
  """Cosines and sines of every pair's angle, times the amplitude."""

  cos: np.ndarray  # f32[length, P/2]
  sin: np.ndarray  # f32[length, P/2]


def yarn_band(head_dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
  """The pairs between which YaRN blends from unscaled to interpolated.

  Returns:
    (low, high): pairs up to `low` keep their frequency, pairs from `high` on
    are divided by `factor`.
  """

  def edge(rotations: float) -> float:
    """The (fractional) pair that turns this often within the original context."""
    context = yarn.original_max_position_embeddings
    turns = context / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(theta))

  low = math.floor(edge(yarn.beta_fast))
  high = math.ceil(edge(yarn.beta_slow))
  # The upper clamp is head_dim - 1, not the last pair: the published code's.
  return max(low, 0), min(high, head_dim - 1)


def inverse_frequencies(
  head_dim: int,
  theta: float,
  yarn: YarnConfig | None,
  angle_dtype: AngleDtype = "float64",
) -> np.ndarray:
  """Radians per position of each pair: `theta ** (-2 i / head_dim)`, blended.

  Args:
    head_dim: number of rotated features P.
    theta: base of the frequencies.
    yarn: YaRN values, or None for plain RoPE.
    angle_dtype: dtype of every step. The power is rounded once to it, since a
      float32 power has no defined last bit.

  Returns:
    [P/2] of dtype `angle_dtype`.
  """
  dtype = np.dtype(angle_dtype).type
  exponents = np.arange(0, head_dim, 2).astype(dtype) / dtype(head_dim)
  periods = (np.float64(theta) ** exponents.astype(np.float64)).astype(dtype)
  if yarn is None:
    return dtype(1) / periods
  low, high = yarn_band(head_dim, theta, yarn)
  width = high - low if high != low else 0.001
  pairs = np.arange(head_dim // 2).astype(dtype)
  keep = dtype(1) - np.clip((pairs - dtype(low)) / dtype(width), 0, 1).astype(dtype)
  unscaled = dtype(1) / periods
  interpolated = dtype(1) / (dtype(yarn.factor) * periods)
  return interpolated * (dtype(1) - keep) + unscaled * keep


def rope_rows(
  positions: np.ndarray,
  head_dim: int,
  theta: float,
  yarn: YarnConfig | None,
  angle_dtype: AngleDtype = "float64",
  amplitude: float = 1.0,
) -> RopeTable:
  """The rows of `rope_table` at some positions (i32[T])."""
  frequencies = inverse_frequencies(head_dim, theta, yarn, angle_dtype)
  angles = np.asarray(positions).astype(frequencies.dtype)[:, None] * frequencies
  exact = angles.astype(np.float64)
  return RopeTable(
    cos=(np.cos(exact) * amplitude).astype(np.float32),
    sin=(np.sin(exact) * amplitude).astype(np.float32),
  )


def rope_table(
  head_dim: int,
  length: int,
  theta: float,
  yarn: YarnConfig | None,
  angle_dtype: AngleDtype = "float64",
  amplitude: float = 1.0,
) -> RopeTable:
  """Cosines and sines for positions 0 to `length - 1`.

  Args:
    head_dim: number of rotated features P, even.
    length: number of positions.
    theta: base of the frequencies.
    yarn: YaRN values, or None for plain RoPE.
    angle_dtype: "float64", or "float32" for angles formed as Hugging Face's
      code forms them. Either way cos and sin are taken of the angle in float64
      and rounded once.
    amplitude: factor on cos and sin.

  Returns:
    (cos f32[length, P/2], sin f32[length, P/2]).

  Raises:
    ValueError: `head_dim` is odd or `length` is negative.
  """
  if head_dim <= 0 or head_dim % 2:
    raise ValueError(f"head_dim = {head_dim} must be positive and even")
  if length < 0:
    raise ValueError(f"length = {length} must be 0 or more")
  positions = np.arange(length)
  return rope_rows(positions, head_dim, theta, yarn, angle_dtype, amplitude)


def rotate(
  x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleave: bool
) -> np.ndarray:
  """Rotates every pair of the last axis.

  Args:
    x: features [T, ..., P].
    cos: f32[T, P/2].
    sin: f32[T, P/2].
    interleave: whether features (2i, 2i+1) of `x` form pair i; otherwise
      (i, i + P/2) do.

  Returns:
    [T, ..., P] in the dtype of `x`, always in half-split order: the first
    members of all pairs, then the second ones.
  """
  wide = x.astype(np.promote_types(x.dtype, np.float32), copy=False)
  half = x.shape[-1] // 2
  if interleave:
    first, second = wide[..., 0::2], wide[..., 1::2]
  else:
    first, second = wide[..., :half], wide[..., half:]
  shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (half,)
  cos, sin = cos.reshape(shape), sin.reshape(shape)
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return np.concatenate(rotated, axis=-1).astype(x.dtype)


def rope(
  x: np.ndarray, positions: np.ndarray, table: RopeTable, interleave: bool
) -> np.ndarray:
  """Rotates features to their positions, by rows of a table.

  Args:
    x: features [T, ..., P].
    positions: i32[T], each less than the table's length.
    table: result of `rope_table`, or a pair (cos, sin).
    interleave: see `rotate`.

  Returns:
    [T, ..., P] in the dtype of `x`, in half-split order.

  Raises:
    ValueError: a position is outside the table.
  """
  cos, sin = table
  positions = np.asarray(positions)
  if positions.size and not 0 <= positions.min() <= positions.max() < len(cos):
    raise ValueError(
      f"positions run from {positions.min()} to {positions.max()}; "
      f"the table covers 0 to {len(cos) - 1}"
    )
  return rotate(x, cos[positions], sin[positions], interleave)
