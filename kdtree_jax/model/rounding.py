"""Copies of arrays with one rounding, in numpy's own types.

numpy copies and casts bfloat16 (a type of ml_dtypes) element by element while it holds
Python's lock. Here they are integers, so that threads work side by side; and arrays are
copied in blocks that stay in the processor's cache, which a transposed copy needs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32 = np.dtype(np.float32)
_BLOCK = 1 << 16  # Elements.


def copy_rounded(into: np.ndarray, source: np.ndarray, finite: bool = False) -> None:
  """`into[...] = source`: every value rounded once, to nearest, ties to even.

  Args:
    into: float32 or bfloat16 of any strides (a transposed view, say).
    source: of the same shape: float64, float32, float16 or bfloat16.
    finite: whether NaN, infinity and what is too large for `into` are refused.

  Raises:
    ValueError: shapes differ, or a value is refused.
  """
  if into.shape != source.shape:
    raise ValueError(f"source is {list(source.shape)}, into {list(into.shape)}")
  if not source.ndim:
    into, source = into[None], source[None]
  target = into.view(np.uint16) if into.dtype == _BF16 else into
  rows = max(1, _BLOCK // max(1, source.size // max(1, len(source))))
  for start in range(0, len(source), rows):
    block = _converted(source[start : start + rows], into.dtype)
    if finite and not _finite(block):
      raise ValueError("holds NaN or infinite values, or overflows its dtype")
    target[start : start + rows] = block


def rounded(values: np.ndarray, dtype: np.typing.DTypeLike) -> np.ndarray:
  """Floats in float32 or bfloat16, rounded once; the same array where it is one."""
  dtype = np.dtype(dtype)
  if values.dtype == dtype:
    return values
  if values.dtype == np.float64 and dtype == _BF16:
    return round_to_bf16(_odd_float32(values)).view(_BF16).reshape(values.shape)
  with np.errstate(over="ignore"):
    return values.astype(dtype)


def _converted(block: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """The block in `dtype`, bfloat16 as its bits in uint16."""
  if block.dtype == _BF16:
    bits = block.view(np.uint16)
    if dtype == _BF16:
      return bits
    return (bits.astype(np.uint32) << 16).view(_F32)
  if dtype != _BF16:
    return rounded(block, dtype)
  if block.dtype == np.float64:
    return round_to_bf16(_odd_float32(block))
  return round_to_bf16(block.astype(_F32, copy=False))


def _finite(block: np.ndarray) -> bool:
  """Whether all values are: float32, or bfloat16 as its bits in uint16.

  Of either sign, infinity and NaN have the largest bits; two maxima write no array.
  """
  if not block.size:
    return True
  signed, infinity = (
    (np.int16, 0x7F80) if block.itemsize == 2 else (np.int32, 0x7F80 << 16)
  )
  bits = block.view(f"u{block.itemsize}")
  below = block.view(signed).max() < infinity
  return bool(below and bits.max() < infinity + (1 << 8 * block.itemsize - 1))


def _odd_float32(values: np.ndarray) -> np.ndarray:
  """float64 to float32 by rounding to odd: another rounding gives that of float64.

  What float32 does not hold becomes its neighbour whose last bit is 1, which is no
  tie of a shorter format and lies on the value's own side of every one (S. Boldo and
  G. Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
  """
  with np.errstate(over="ignore", under="ignore"):
    nearest = np.ascontiguousarray(values).astype(_F32)
  back = nearest.astype(np.float64)
  bits = nearest.view(np.uint32)
  bits -= (np.abs(back) > np.abs(values)).astype(np.uint32)  # Towards zero.
  bits |= (back != values).astype(np.uint32)
  return nearest


def round_to_bf16(values: np.ndarray) -> np.ndarray:
  """float32 to the bits of bfloat16, uint16; NaN stays NaN."""
  bits = np.ascontiguousarray(values).view(np.uint32)
  # Half of the last place that stays, less one where it is even: a carry rounds up.
  high = bits >> 16
  high &= 1
  high += 0x7FFF
  high += bits
  high >>= 16
  result = high.astype(np.uint16)
  nan = np.isnan(values)
  if nan.any():  # Its fraction may be in the half that goes.
    result[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40
  return result
