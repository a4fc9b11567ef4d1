"""Stored weights to arrays: FP8 with block scales, packed int4.

FP8 (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and inference/kernel.py): e4m3 with one
scale for each 128x128 block, the last ones partial. The scales are called
`weight_scale_inv`, but a weight is `value * scale`.

Int4 (vllm-project/compressed-tensors, compressors/pack_quantized): element k of a row
stands in bits `4 * (k % 8)` of the little-endian word `k // 8`, plus 8. Read as bytes
that is `Int4Tensor`'s own layout, so nothing is computed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.checkpoint.hf.quantization import BLOCK
from kdtree_jax.checkpoint.int4 import GROUP_SIZE, Int4Tensor

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
FLOATS = ("BF16", "F16", "F32", "F64")


def fp8_scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Shape of the block scales of a weight [out, in]."""
  return tuple(-(-size // BLOCK) for size in shape)


def dequantize_fp8(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The weights `value * scale` of FP8 with block scales.

  Args:
    values: float8_e4m3fn [out, in].
    scales: floats [ceil(out / 128), ceil(in / 128)].

  Returns:
    float32 [out, in]: the float32 product, rounded once.

  Raises:
    ValueError: other dtypes or shapes, or a weight that is not finite.
  """
  if values.dtype != FP8 or values.ndim != 2:
    raise ValueError(
      f"values must be float8_e4m3fn [out, in]; they are {values.dtype} "
      f"{list(values.shape)}"
    )
  if scales.shape != fp8_scales_shape(values.shape):
    raise ValueError(
      f"scales {list(scales.shape)} do not fit values {list(values.shape)}: they must "
      f"be {list(fp8_scales_shape(values.shape))}, one for each {BLOCK}x{BLOCK} block"
    )
  scales = scales.astype(np.float32)
  codes = values.view(np.uint8)
  weights = np.empty(values.shape, np.float32)
  for row, row_scales in enumerate(scales):  # Blocks of rows, so that little is copied.
    block = weights[row * BLOCK : (row + 1) * BLOCK]
    # A table, since numpy casts this type under Python's lock.
    np.take(_FP8_VALUES, codes[row * BLOCK : (row + 1) * BLOCK], out=block, mode="clip")
    with np.errstate(over="ignore"):  # Overflow is what is looked for.
      block *= np.repeat(row_scales, BLOCK)[: values.shape[1]]
    if not np.isfinite(block).all():
      raise ValueError("weights are NaN or infinite")
  return weights


def int4_from_words(words: np.ndarray, scales: np.ndarray) -> Int4Tensor:
  """Compressed-tensors' packed int4 as an Int4Tensor; views, nothing is copied.

  Args:
    words: int32 [out, in / 8].
    scales: bfloat16 [out, in / 32].

  Raises:
    ValueError: other dtypes or shapes.
  """
  if words.dtype != np.int32 or words.ndim != 2:
    raise ValueError(
      f"words must be int32 [out, in / 8]; they are {words.dtype} {list(words.shape)}"
    )
  tensor = Int4Tensor(np.ascontiguousarray(words).view(np.uint8), scales)
  if tensor.group_size != GROUP_SIZE:
    raise ValueError(f"groups are of {tensor.group_size}, not of {GROUP_SIZE}")
  return tensor
