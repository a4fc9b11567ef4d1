"""Writes safetensors files, tensor by tensor.

A file is the length of a JSON header (u64, little-endian), the header, and the
tensors one after the other. The header has dtypes, shapes and places but no sums of
the contents, so it can be written before the first tensor has been computed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
  "F32": np.dtype("<f4"),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "I32": np.dtype("<i4"),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor that is computed when it is written.

  Attributes:
    name: unique name.
    dtype: a key of `DTYPES`.
    shape: its shape.
    read: gives the array, of that dtype and shape.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_safetensors(
  path: Path, tensors: Sequence[Tensor], progress: Callable[[int], None] | None = None
) -> None:
  """Writes one file and waits until it is on disk.

  Args:
    path: file to create; it must not exist.
    tensors: in the order of the file.
    progress: called with the bytes of each tensor after it has been written.

  Raises:
    ValueError: a tensor is not what it was announced as.
    OSError: the file cannot be written; a part of it may be left.
  """
  # transformers refuses a file whose metadata does not name the framework.
  header: dict[str, object] = {"__metadata__": {"format": "pt"}}
  position = 0
  for tensor in tensors:
    end = position + tensor.nbytes
    header[tensor.name] = {
      "dtype": tensor.dtype,
      "shape": list(tensor.shape),
      "data_offsets": [position, end],
    }
    position = end
  raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
  raw += b" " * (-len(raw) % 8)
  with open(path, "xb") as file:
    file.write(len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors:
      file.write(_contents(tensor))  # No name here keeps a tensor alive.
      if progress is not None:
        progress(tensor.nbytes)
    file.flush()
    os.fsync(file.fileno())


def _contents(tensor: Tensor) -> memoryview:
  array = tensor.read()
  if array.dtype != DTYPES[tensor.dtype] or array.shape != tensor.shape:
    raise ValueError(
      f"tensor {tensor.name!r} is {array.dtype} {list(array.shape)}, not "
      f"{tensor.dtype} {list(tensor.shape)}"
    )
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
