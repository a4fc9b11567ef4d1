"""Symmetric int4 with one bfloat16 scale per group of 32 input features.

This is the layout in which Kimi K2.x ships its routed experts (llm-compressor's
`pack-quantized` format, compressors/pack_quantized/helpers.py of
vllm-project/compressed-tensors): a nibble holds `value + 8` (offset binary),
the low nibble of a byte comes first, and a weight is
`(nibble - 8) * scale`. Four significant bits times a bfloat16 scale need at
most twelve bits, so the product is exact in float32 and rounded exactly once
when a bfloat16 weight is asked for.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

GROUP_SIZE = 32

# A group of zeros still needs a scale to divide by (THUDM/slime's fake-quant
# kernel uses the same floor).
_SCALE_FLOOR = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Int4Tensor:
  """A weight quantised along its last dimension.

  Attributes:
    packed: uint8 [..., in / 2], two nibbles a byte, low nibble first.
    scales: bfloat16 [..., in / group_size].
  """

  packed: np.ndarray
  scales: np.ndarray

  def __post_init__(self) -> None:
    if self.packed.dtype != np.uint8 or self.packed.ndim < 1:
      raise ValueError(
        f"packed must be uint8 [..., in / 2], got {self.packed.dtype} "
        f"{list(self.packed.shape)}"
      )
    if self.scales.dtype != ml_dtypes.bfloat16:
      raise ValueError(f"scales must be bfloat16, got {self.scales.dtype}")
    columns = 2 * self.packed.shape[-1]
    if (
      self.scales.shape[:-1] != self.packed.shape[:-1]
      or self.scales.ndim != self.packed.ndim
      or self.scales.shape[-1] == 0
      or columns == 0
      or columns % self.scales.shape[-1]
      or (columns // self.scales.shape[-1]) % 2
    ):
      raise ValueError(
        f"scales {list(self.scales.shape)} do not fit packed "
        f"{list(self.packed.shape)}: one scale per group of an even number of "
        "input features is needed"
      )

  @property
  def shape(self) -> tuple[int, ...]:
    """Logical shape [..., in]."""
    return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

  @property
  def group_size(self) -> int:
    """Input features that share a scale."""
    return 2 * self.packed.shape[-1] // self.scales.shape[-1]


def pack_int4(values: np.ndarray) -> np.ndarray:
  """Packs integers in [-8, 7] two per byte.

  Args:
    values: integers [..., n], n even.

  Returns:
    uint8 [..., n / 2]: values + 8 as nibbles, low nibble first.

  Raises:
    ValueError: n is odd, or a value is outside of [-8, 7].
  """
  values = np.asarray(values)
  if values.ndim < 1 or values.shape[-1] % 2:
    raise ValueError(
      f"values has shape {list(values.shape)}: int4 is packed two per byte, so the "
      "last dimension must be even"
    )
  if values.size and (values.min() < -8 or values.max() > 7):
    raise ValueError("values must lie in [-8, 7] to fit int4")
  nibbles = (values.astype(np.int8) + 8).astype(np.uint8)
  return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: np.ndarray) -> np.ndarray:
  """The inverse of `pack_int4`.

  Args:
    packed: uint8 [..., n / 2].

  Returns:
    int8 [..., n], values in [-8, 7].
  """
  packed = np.asarray(packed)
  if packed.dtype != np.uint8 or packed.ndim < 1:
    raise ValueError(
      f"packed must be uint8 [..., n / 2], got {packed.dtype} {list(packed.shape)}"
    )
  values = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.int8)
  values[..., 0::2] = packed & 0xF
  values[..., 1::2] = packed >> 4
  values -= 8
  return values


def quantize(weight: np.ndarray, group_size: int = GROUP_SIZE) -> Int4Tensor:
  """Rounds a weight to int4 with one scale per group of input features.

  `scale = max(amax(group) / 7, 1e-5)` rounded to bfloat16, and
  `value = clip(rint(weight / scale), -8, 7)`, where the scale after its
  rounding is used, so that the stored scale is the one that was divided by
  (THUDM/slime, int4 fake quantisation).

  Args:
    weight: float32 [..., in] (a Linear weight is [out, in]).
    group_size: input features per scale, even.

  Returns:
    The packed weight and its scales.

  Raises:
    ValueError: `in` is not a multiple of `group_size`, or a weight is not
      finite.
  """
  if group_size < 2 or group_size % 2:
    raise ValueError(f"group_size = {group_size} must be even and at least 2")
  weight = np.asarray(weight, np.float32)
  if weight.ndim < 1 or weight.shape[-1] == 0 or weight.shape[-1] % group_size:
    raise ValueError(
      f"weight has shape {list(weight.shape)}: its last dimension must be a positive "
      f"multiple of group_size = {group_size}"
    )
  if not np.isfinite(weight).all():
    raise ValueError("weight holds NaN or infinite values, which int4 cannot hold")
  groups = weight.reshape(*weight.shape[:-1], -1, group_size)
  amax = np.abs(groups).max(axis=-1)
  scales = np.maximum(amax / np.float32(7), np.float32(_SCALE_FLOOR)).astype(
    ml_dtypes.bfloat16
  )
  ratios = groups / scales.astype(np.float32)[..., None]
  values = np.clip(np.rint(ratios), -8, 7).astype(np.int8)
  return Int4Tensor(pack_int4(values.reshape(weight.shape)), scales)


def check_scales(tensor: Int4Tensor) -> None:
  """Raises a ValueError for scales under which a weight is not a finite float32."""
  # Written so that NaN fails as well.
  scales = np.abs(tensor.scales.astype(np.float32))
  if not (scales <= np.finfo(np.float32).max / 8).all():
    raise ValueError("scales hold NaN, infinite or too large values")


def dequantize(
  tensor: Int4Tensor, dtype: np.typing.DTypeLike = np.float32
) -> np.ndarray:
  """The weights `(nibble - 8) * scale`.

  Args:
    tensor: packed weight and scales.
    dtype: float32 (exact) or bfloat16 (the exact product rounded once).

  Returns:
    [..., in] of `dtype`.

  Raises:
    ValueError: another dtype, or a scale whose products overflow float32.
  """
  dtype = np.dtype(dtype)
  if dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
    raise ValueError(f"dtype = {dtype} is not allowed: float32 or bfloat16")
  check_scales(tensor)
  scales = tensor.scales.astype(np.float32)
  values = unpack_int4(tensor.packed).astype(np.float32)
  groups = values.reshape(*scales.shape, tensor.group_size)
  groups *= scales[..., None]
  return groups.reshape(tensor.shape).astype(dtype, copy=False)
