"""Writes KDTR files, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from kdtree_jax.checkpoint import kdtr_format as fmt
from kdtree_jax.checkpoint.int4 import Int4Tensor, pack_int4
from kdtree_jax.checkpoint.kdtr_format import KdtrError, StrPath, TensorInfo

SCALE_SUFFIX = "_scale"

_CODES = {dtype: code for code, dtype in fmt.DTYPES.items()}


def write(
  path: StrPath,
  tensors: Mapping[str, np.ndarray | Int4Tensor],
  config: Mapping[str, Any],
  metadata: Mapping[str, Any] | None = None,
) -> str:
  """Writes tensors, a config and metadata to one KDTR file.

  The file appears under its name only when it is complete and on disk: it is
  written to a temporary name in the same folder, synchronised and renamed. On
  any exception the temporary file is removed, and a file that was there before
  stays as it was. Equal arguments give equal bytes.

  Args:
    path: file to create or replace.
    tensors: names to arrays of a KDTR dtype, in the order of the file. An array
      of `ml_dtypes.int4` is packed two per byte. An `Int4Tensor` is stored as
      two tensors: `name` (int4) and `name + "_scale"` (bf16). Each value is
      looked up twice (for the table, then for the data), so a mapping may
      produce large tensors when asked.
    config: JSON object, free in form.
    metadata: a second JSON object, for what does not describe the tensors.

  Returns:
    The fingerprint of the tensors (see `fingerprint`).

  Raises:
    KdtrError: a dtype, shape or name that the format does not hold, or a config
      that JSON does not hold. Nothing is written then.
    OSError: the folder cannot be written.
  """
  fmt.require_little_endian()
  objects: dict[str, dict[str, Any]] = {}
  for field, value in (("config", config), ("metadata", metadata or {})):
    if not isinstance(value, Mapping):
      raise KdtrError(path, field, f"must be a mapping, not {type(value).__name__}")
    objects[field] = dict(value)
    fmt.check_json(objects[field], field, path)

  table: list[TensorInfo] = []
  position = 0
  for name, dtype, shape, data in _stored(tensors, path):
    info = TensorInfo(name, dtype, shape, position, data.nbytes, zlib.crc32(data.data))
    table.append(info)
    position = fmt.align(position + data.nbytes)
  raw = fmt.encode_header(fmt.Header(**objects, tensors=tuple(table)))
  if len(raw) > fmt.MAX_HEADER_BYTES:
    raise KdtrError(
      path, "header", f"takes {len(raw)} bytes; at most {fmt.MAX_HEADER_BYTES} do"
    )
  fmt.decode_header(raw, position, path)

  with _replacing(Path(path)) as file:
    data_start = fmt.align(fmt.PREAMBLE.size + len(raw))
    file.write(preamble(data_start + position, raw))
    file.write(raw)
    _pad(file)
    for info, (name, dtype, shape, data) in zip(
      table, _stored(tensors, path), strict=True
    ):
      found = TensorInfo(
        name, dtype, shape, info.offset, data.nbytes, zlib.crc32(data.data)
      )
      if found != info:
        raise KdtrError(path, f"tensor {name!r}", "changed while it was being written")
      file.write(data.data)
      _pad(file)
  return fingerprint(table)


def fingerprint(tensors: list[TensorInfo] | tuple[TensorInfo, ...]) -> str:
  """SHA-256 (hex) over the sorted table of names, dtypes, shapes and CRCs.

  It identifies a model's weights as stored: a drafter names the fingerprint of
  the target that it was trained on. Config, metadata and the order of the
  tensors do not enter.
  """
  digest = hashlib.sha256()
  for t in sorted(tensors, key=lambda t: t.name):
    shape = ",".join(map(str, t.shape))
    digest.update(f"{t.name}\t{t.dtype}\t{shape}\t{t.crc32:08x}\n".encode())
  return digest.hexdigest()


def preamble(file_bytes: int, raw_header: bytes) -> bytes:
  """The first bytes of a file of this size and header."""
  checked = fmt.PREAMBLE.pack(
    fmt.MAGIC, fmt.VERSION, file_bytes, len(raw_header), zlib.crc32(raw_header), 0
  )[:-4]
  return checked + zlib.crc32(checked).to_bytes(4, "little")


# A tensor as it is stored: name, dtype, logical shape, flat uint8 data.
StoredRow = tuple[str, str, tuple[int, ...], np.ndarray]


def stored_rows(
  name: str, value: np.ndarray | Int4Tensor, path: StrPath
) -> Iterator[StoredRow]:
  """What an array, or nibbles and scales of an Int4Tensor, are stored as.

  Raises:
    KdtrError: a dtype or shape that the format does not hold.
  """
  if isinstance(value, Int4Tensor):
    yield name, fmt.INT4, value.shape, _flat(value.packed)
    yield f"{name}{SCALE_SUFFIX}", "bf16", value.scales.shape, _flat(value.scales)
  else:
    yield name, *_encode(value, f"tensor {name!r}", path)


def _stored(
  tensors: Mapping[str, np.ndarray | Int4Tensor], path: StrPath
) -> Iterator[StoredRow]:
  """The rows of all tensors in file order."""
  for index, name in enumerate(tensors):
    fmt.check_name(name, f"tensors[{index}].name", path)
    yield from stored_rows(name, tensors[name], path)


def _encode(
  value: np.ndarray, field: str, path: StrPath
) -> tuple[str, tuple[int, ...], np.ndarray]:
  if not hasattr(value, "dtype") or not hasattr(value, "shape"):
    raise KdtrError(path, field, f"must be an array, not a {type(value).__name__}")
  array = np.asarray(value)
  if array.dtype == ml_dtypes.int4:
    if array.ndim < 1 or array.shape[-1] % 2:
      raise KdtrError(
        path, f"{field}.shape", "int4 needs a last dimension, and an even one"
      )
    return fmt.INT4, array.shape, _flat(pack_int4(array.astype(np.int8)))
  if array.dtype.byteorder == ">":
    array = array.astype(array.dtype.newbyteorder("<"))
  code = _CODES.get(array.dtype)
  if code is None:
    raise KdtrError(
      path, f"{field}.dtype", f"{array.dtype} is not one of {[*fmt.DTYPES, fmt.INT4]}"
    )
  data = _flat(array)
  if code == "bool" and data.size and data.max() > 1:
    raise KdtrError(path, field, "a bool must be 0 or 1")
  return code, array.shape, data


def _flat(array: np.ndarray) -> np.ndarray:
  return np.asarray(array, order="C").reshape(-1).view(np.uint8)


def _pad(file: BinaryIO) -> None:
  position = file.tell()
  file.write(bytes(fmt.align(position) - position))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
  """A new file that takes the place of `path` once the block ends well."""
  temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
  try:
    # "x" and not tempfile: the file gets the permissions that the umask gives.
    with open(temporary, "xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
  """Waits until the names in a folder are on disk, where the system can."""
  if os.name == "posix":
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
