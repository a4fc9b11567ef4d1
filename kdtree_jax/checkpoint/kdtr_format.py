"""What a KDTR file is made of: preamble, dtypes, header and their rules.

Reader and writer share this module, and the writer passes its own header
through `decode_header`, so a file that was written is a file that can be read.
The byte-level description is docs/kdtr.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
import struct
import sys
from typing import Any

import ml_dtypes
import numpy as np

MAGIC = b"KDTR"
VERSION = 1
ALIGNMENT = 64

# magic, version, file bytes, header bytes, CRC32 of the header, CRC32 of the
# 28 bytes before it.
PREAMBLE = struct.Struct("<4sIQQII")

# Room for the 140,000 tensors of the largest models; a bound on what a hostile
# header can make the JSON parser allocate.
MAX_HEADER_BYTES = 64 << 20

_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 48
_MAX_NAME_BYTES = 1024
_MAX_JSON_DEPTH = 64

_SURROGATE = "holds an unpaired surrogate, which UTF-8 cannot hold"

INT4 = "int4"
DTYPES: dict[str, np.dtype] = {
  "f64": np.dtype("<f8"),
  "f32": np.dtype("<f4"),
  "f16": np.dtype("<f2"),
  "bf16": np.dtype(ml_dtypes.bfloat16),
  "i64": np.dtype("<i8"),
  "i32": np.dtype("<i4"),
  "i16": np.dtype("<i2"),
  "i8": np.dtype("i1"),
  "u8": np.dtype("u1"),
  "u32": np.dtype("<u4"),
  "bool": np.dtype("?"),
}

StrPath = str | os.PathLike[str]


class KdtrError(ValueError):
  """A KDTR file breaks a rule of the format, or would if it were written.

  Attributes:
    path: the file.
    field: the part of it: "magic", "config.rope_theta", "tensor 'x'.offset".
    reason: what is wrong there.
  """

  def __init__(self, path: StrPath, field: str, reason: str) -> None:
    super().__init__(os.fspath(path), field, reason)
    self.path = os.fspath(path)
    self.field = field
    self.reason = reason

  def __str__(self) -> str:
    return f"{self.path}: {self.field}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """A row of the tensor table.

  Attributes:
    name: unique name.
    dtype: "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "u32",
      "bool" or "int4".
    shape: logical shape; the last dimension of int4 is even.
    offset: first byte, counted from the start of the data section.
    nbytes: length of the data without padding ("bytes" in the header).
    crc32: CRC32 (zlib's) of these bytes.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  offset: int
  nbytes: int
  crc32: int


@dataclasses.dataclass(frozen=True)
class Header:
  """Everything that the JSON header holds."""

  config: dict[str, Any]
  metadata: dict[str, Any]
  tensors: tuple[TensorInfo, ...]


def align(position: int) -> int:
  """`position` rounded up to a multiple of 64."""
  return -(-position // ALIGNMENT) * ALIGNMENT


def data_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
  """Bytes that a tensor takes without padding."""
  elements = math.prod(shape)
  return elements // 2 if dtype == INT4 else elements * DTYPES[dtype].itemsize


def require_little_endian() -> None:
  """Refuses a big-endian host, on which views of a file would be wrong."""
  if sys.byteorder != "little":
    raise NotImplementedError("KDTR files hold little-endian data; this host does not")


def check_json(value: object, field: str, path: StrPath) -> None:
  """Checks that `value` is JSON which every reader takes the same way.

  Allowed are None, bool, str, integers of 64 bits, finite floats, and lists,
  tuples and string-keyed dicts of them, nested 64 deep at most.

  Raises:
    KdtrError: naming the member, as in "config.rope_scaling.factor".
  """
  # The place is kept in parts and joined only for a message: joined at every
  # level, a long key above many members would cost their product.
  _check_json(value, [field], path)


def _check_json(value: object, place: list[str], path: StrPath) -> None:
  def fail(reason: str) -> KdtrError:
    return KdtrError(path, "".join(place), reason)

  if len(place) > _MAX_JSON_DEPTH:
    raise fail(f"nested more than {_MAX_JSON_DEPTH} levels deep")
  if value is None or isinstance(value, bool):
    return
  if isinstance(value, str):
    if not _is_utf8(value):
      raise fail(_SURROGATE)
  elif type(value) is int:
    if not -(2**63) <= value < 2**63:
      raise fail("an integer must fit 64 bits")
  elif type(value) is float:
    if not math.isfinite(value):
      raise fail(f"{value} is not a finite number")
  elif isinstance(value, dict):
    for key, member in value.items():
      if not isinstance(key, str):
        raise fail(f"key {reprlib.repr(key)} must be a string")
      if not _is_utf8(key):
        raise fail(_SURROGATE)
      place.append(f".{key}")
      _check_json(member, place, path)
      place.pop()
  elif isinstance(value, list | tuple):
    for index, member in enumerate(value):
      place.append(f"[{index}]")
      _check_json(member, place, path)
      place.pop()
  else:
    raise fail(f"JSON cannot hold a {type(value).__name__}")


def check_name(name: object, field: str, path: StrPath) -> None:
  """Checks a tensor's name.

  Raises:
    KdtrError: naming `field`.
  """
  if not isinstance(name, str) or not name:
    raise KdtrError(path, field, "must be a non-empty string")
  if not _is_utf8(name):
    raise KdtrError(path, field, _SURROGATE)
  if len(name.encode("utf-8")) > _MAX_NAME_BYTES:
    raise KdtrError(path, field, f"is longer than {_MAX_NAME_BYTES} bytes")
  if any(c < " " or c == "\x7f" for c in name):
    raise KdtrError(path, field, "holds a control character")


def encode_header(header: Header) -> bytes:
  """The JSON bytes of a header. Equal headers give equal bytes."""
  table = [
    {
      "name": t.name,
      "dtype": t.dtype,
      "shape": list(t.shape),
      "offset": t.offset,
      "bytes": t.nbytes,
      "crc32": t.crc32,
    }
    for t in header.tensors
  ]
  document = {"config": header.config, "metadata": header.metadata, "tensors": table}
  return json.dumps(
    document, ensure_ascii=False, allow_nan=False, separators=(",", ":")
  ).encode("utf-8")


def decode_header(raw: bytes, data_bytes: int, path: StrPath) -> Header:
  """Parses a header and checks every rule that it must keep.

  Args:
    raw: the JSON bytes.
    data_bytes: length of the data section that the table must fill exactly.
    path: the file, for messages.

  Raises:
    KdtrError: naming the field that breaks a rule.
  """

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
      if key in members:
        raise KdtrError(path, "header", f"key {reprlib.repr(key)} appears twice")
      members[key] = value
    return members

  try:
    document = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
  except KdtrError:
    raise
  except (ValueError, RecursionError) as error:
    raise KdtrError(path, "header", f"not valid JSON: {error}") from error
  _check_keys(document, {"config", "metadata", "tensors"}, "header", path)
  for field in ("config", "metadata"):
    if not isinstance(document[field], dict):
      raise KdtrError(path, field, "must be a JSON object")
    check_json(document[field], field, path)
  if not isinstance(document["tensors"], list):
    raise KdtrError(path, "tensors", "must be a JSON array")
  tensors = tuple(
    _decode_tensor(row, index, path) for index, row in enumerate(document["tensors"])
  )
  _check_layout(tensors, data_bytes, path)
  return Header(document["config"], document["metadata"], tensors)


def _is_utf8(text: str) -> bool:
  """False for text with an unpaired surrogate, which a JSON escape can make."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return False
  return True


def _check_keys(value: object, keys: set[str], field: str, path: StrPath) -> None:
  if not isinstance(value, dict):
    raise KdtrError(path, field, "must be a JSON object")
  for key in sorted(keys - set(value)):
    raise KdtrError(path, f"{field}.{key}", "is missing")
  for key in value:
    if key not in keys:
      raise KdtrError(path, field, f"has the unknown key {reprlib.repr(key)}")


def _decode_tensor(row: Any, index: int, path: StrPath) -> TensorInfo:
  field = f"tensors[{index}]"
  _check_keys(row, {"name", "dtype", "shape", "offset", "bytes", "crc32"}, field, path)
  name = row["name"]
  check_name(name, f"{field}.name", path)

  field = f"tensor {name!r}"
  dtype = row["dtype"]
  if not isinstance(dtype, str) or (dtype not in DTYPES and dtype != INT4):
    raise KdtrError(
      path, f"{field}.dtype", f"{reprlib.repr(dtype)} is not one of {[*DTYPES, INT4]}"
    )
  shape = _decode_shape(row["shape"], dtype, f"{field}.shape", path)
  for key, limit in (("offset", 2**63), ("bytes", 2**63), ("crc32", 2**32)):
    if type(row[key]) is not int or not 0 <= row[key] < limit:
      raise KdtrError(
        path, f"{field}.{key}", f"must be an integer from 0 to {limit - 1}"
      )
  if row["bytes"] != data_nbytes(dtype, shape):
    raise KdtrError(
      path,
      f"{field}.bytes",
      f"is {row['bytes']}, but {dtype} {list(shape)} takes {data_nbytes(dtype, shape)}",
    )
  return TensorInfo(name, dtype, shape, row["offset"], row["bytes"], row["crc32"])


def _decode_shape(value: Any, dtype: str, field: str, path: StrPath) -> tuple[int, ...]:
  if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
    raise KdtrError(
      path, field, f"must be an array of at most {_MAX_DIMENSIONS} dimensions"
    )
  elements = 1
  for dimension in value:
    if type(dimension) is not int or dimension < 0:
      raise KdtrError(path, field, "dimensions must be integers of 0 or more")
    # Zeros count as ones, so that no product of dimensions overflows anywhere.
    elements *= max(dimension, 1)
    if elements > _MAX_ELEMENTS:
      raise KdtrError(path, field, f"has more than {_MAX_ELEMENTS} elements")
  if dtype == INT4 and (not value or value[-1] % 2):
    raise KdtrError(
      path, field, f"is {value}: int4 needs a last dimension, and an even one"
    )
  return tuple(value)


def _check_layout(
  tensors: tuple[TensorInfo, ...], data_bytes: int, path: StrPath
) -> None:
  """One tensor after the other, no gap, no overlap, up to the end of the file."""
  names: set[str] = set()
  position = 0
  for tensor in tensors:
    field = f"tensor {tensor.name!r}"
    if tensor.name in names:
      raise KdtrError(path, field, "appears twice in the tensor table")
    names.add(tensor.name)
    if tensor.offset % ALIGNMENT:
      raise KdtrError(
        path,
        f"{field}.offset",
        f"{tensor.offset} is not a multiple of {ALIGNMENT} (misaligned)",
      )
    if tensor.offset < position:
      raise KdtrError(
        path,
        f"{field}.offset",
        f"{tensor.offset} overlaps what lies before it, which ends at {position}",
      )
    if tensor.offset > position:
      raise KdtrError(
        path,
        f"{field}.offset",
        f"{tensor.offset} leaves a gap: the tensor must start at {position}",
      )
    position = align(tensor.offset + tensor.nbytes)
    if position > data_bytes:
      raise KdtrError(
        path,
        f"{field}.bytes",
        f"the tensor ends at {position}, beyond the {data_bytes} bytes of data",
      )
  if position != data_bytes:
    raise KdtrError(
      path,
      "file size",
      f"{data_bytes - position} bytes follow the last tensor",
    )
