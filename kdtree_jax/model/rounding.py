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


def copy_rounded(into: np.ndarray, source: np.ndarray) -> None:
  """`into[...] = source`: every value rounded once, to nearest, ties to even.

  Args:
    into: any strides (a transposed view, say) and dtype.
    source: of the same shape.

  Raises:
    ValueError: shapes differ.
  """
  if into.shape != source.shape:
    raise ValueError(f"source is {list(source.shape)}, into {list(into.shape)}")
  if not source.ndim:
    into[...] = source
    return
  target = into.view(np.uint16) if into.dtype == _BF16 else into
  rows = max(1, _BLOCK // max(1, source.size // max(1, len(source))))
  for start in range(0, len(source), rows):
    block = source[start : start + rows]
    target[start : start + rows] = _converted(block, into.dtype)


def _converted(block: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """The block in `dtype`, bfloat16 as its bits in uint16."""
  if block.dtype == _BF16:
    bits = block.view(np.uint16)
    if dtype == _BF16:
      return bits
    block = (bits.astype(np.uint32) << 16).view(_F32)
  if dtype != _BF16:
    return block
  return round_to_bf16(block.astype(_F32, copy=False))


def round_to_bf16(values: np.ndarray) -> np.ndarray:
  """float32 to the bits of bfloat16, uint16; NaN stays NaN."""
  bits = np.ascontiguousarray(values).view(np.uint32)
  # Half of the last place that stays, less one where it is even: a carry rounds up.
  rounded = bits >> 16
  rounded &= 1
  rounded += 0x7FFF
  rounded += bits
  rounded >>= 16
  result = rounded.astype(np.uint16)
  nan = np.isnan(values)
  if nan.any():  # Its fraction may be in the half that goes.
    result[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40
  return result
