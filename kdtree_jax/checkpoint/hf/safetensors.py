"""Safetensors files of a directory, read in place through mmap.

The format (huggingface/safetensors, README.md): eight bytes of a little-endian length,
a JSON header of that length that maps names to dtype, shape and byte range, and the
bytes. A sharded checkpoint has `model.safetensors.index.json` too, which maps names to
files.

All headers are read and compared with each other and with the index before any value is
looked at. Values themselves carry no checksum in this format.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kdtree_jax.checkpoint.hf.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
  "BOOL": np.dtype(np.bool_),
  "U8": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "U16": np.dtype(np.uint16),
  "I16": np.dtype(np.int16),
  "U32": np.dtype(np.uint32),
  "I32": np.dtype(np.int32),
  "U64": np.dtype(np.uint64),
  "I64": np.dtype(np.int64),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F32": np.dtype(np.float32),
  "F64": np.dtype(np.float64),
}

_LENGTH = struct.Struct("<Q")
_LARGE = 1 << 16  # Bytes of a tensor from which advice to the system is worth a call.
_MAX_HEADER = 100_000_000  # Bytes; the format's own limit.


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """Where a tensor lies.

  Attributes:
    name: as the file has it.
    file: path of the file.
    dtype: the format's code, a key of `DTYPES`.
    shape: dimensions.
    start: first byte, counted from the beginning of the file.
    stop: the byte after the last.
  """

  name: str
  file: Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int


class SafetensorsDirectory:
  """The tensors of a directory.

  Attributes:
    path: the directory.
    entries: name to entry, sorted by name.
  """

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    """Maps all files and reads their headers; no value is touched.

    Raises:
      FileNotFoundError: the directory does not exist.
      CheckpointError: it holds no safetensors; a file is missing, truncated or breaks a
        rule of the format; a tensor is in two places; index and files disagree.
    """
    if sys.byteorder != "little":
      raise NotImplementedError("safetensors are little-endian; this host is not")
    self.path = Path(directory)
    weight_map = _read_weight_map(self.path)
    self._maps: dict[Path, mmap.mmap] = {}
    entries: dict[str, TensorEntry] = {}
    for path in _files(self.path, weight_map):
      self._maps[path] = _map(path)
      for entry in _read_header(path, self._maps[path]):
        if entry.name in entries:
          raise CheckpointError(
            path,
            f"tensor {entry.name!r}",
            f"is a duplicate: {entries[entry.name].file.name} holds it too",
          )
        entries[entry.name] = entry
    if weight_map is not None:
      _compare(weight_map, entries, self.path / INDEX_FILE)
    self.entries = dict(sorted(entries.items()))

  def read(self, name: str) -> np.ndarray:
    """A tensor's values: a read-only view of the mapped file.

    Raises:
      CheckpointError: there is no such tensor.
    """
    entry = self.entries.get(name)
    if entry is None:
      raise CheckpointError(self.path, f"tensor {name!r}", "is missing")
    count = math.prod(entry.shape)
    if not count:
      return np.empty(entry.shape, DTYPES[entry.dtype])
    self._advise(entry, "MADV_WILLNEED")
    flat = np.frombuffer(
      self._maps[entry.file], DTYPES[entry.dtype], count, entry.start
    )
    return flat.reshape(entry.shape)

  def bytes_of(self, name: str) -> memoryview:
    """A tensor's bytes: a read-only view."""
    entry = self.entries[name]
    return memoryview(self._maps[entry.file])[entry.start : entry.stop]

  def release(self, name: str) -> None:
    """Gives the memory of a tensor's pages back; views stay valid and map them anew."""
    self._advise(self.entries[name], "MADV_DONTNEED")

  def _advise(self, entry: TensorEntry, advice: str) -> None:
    start = entry.start - entry.start % mmap.PAGESIZE
    if entry.stop - entry.start >= _LARGE and hasattr(mmap, advice):
      self._maps[entry.file].madvise(getattr(mmap, advice), start, entry.stop - start)


def weight_files(directory: str | os.PathLike[str]) -> list[Path]:
  """The safetensors files of a directory, by name; none is opened.

  Raises:
    FileNotFoundError: the directory does not exist.
    CheckpointError: it holds no safetensors, its index is damaged, or a file is missing
      that the index names.
  """
  return _files(Path(directory), _read_weight_map(Path(directory)))


def load_json(path: Path) -> dict[str, Any]:
  """A JSON object of a file.

  Raises:
    CheckpointError: the file is missing, not JSON, not an object, or names a member
      twice.
  """
  try:
    text = path.read_text("utf-8")
  except FileNotFoundError as error:
    raise CheckpointError(path, "file", "is missing") from error
  except (OSError, UnicodeDecodeError) as error:
    raise CheckpointError(path, "file", f"cannot be read: {error}") from error
  return parse_json(path, text)


def parse_json(path: Path, text: str) -> dict[str, Any]:
  """As `load_json`, of text that the file holds."""

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
      if key in members:
        raise CheckpointError(path, f"{key!r}", "is a duplicate: it is there twice")
      members[key] = value
    return members

  def constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")

  try:
    value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
  except CheckpointError:
    raise
  except (ValueError, RecursionError) as error:
    raise CheckpointError(path, "JSON", f"is damaged: {error}") from error
  if not isinstance(value, dict):
    raise CheckpointError(path, "JSON", "must be an object")
  return value


def _read_weight_map(directory: Path) -> dict[str, str] | None:
  """The index, or None where there is a single file."""
  if not directory.is_dir():
    raise FileNotFoundError(f"directory = {directory} does not exist")
  single, index = directory / SINGLE_FILE, directory / INDEX_FILE
  if single.exists() and index.exists():
    raise CheckpointError(
      index, SINGLE_FILE, "lies beside the index; only one of the two may be there"
    )
  if index.exists():
    return _read_index(index)
  if not single.exists():
    raise CheckpointError(
      directory, SINGLE_FILE, f"is missing, and so is {INDEX_FILE}: no weights here"
    )
  return None


def _files(directory: Path, weight_map: dict[str, str] | None) -> list[Path]:
  if weight_map is None:
    return [directory / SINGLE_FILE]
  tensors = {file: tensor for tensor, file in reversed(weight_map.items())}
  for file, tensor in sorted(tensors.items()):
    path, what = directory / file, f"tensor {tensor!r}"
    try:
      found = path.is_file()
    except OSError as error:  # A name of 300 characters, for one.
      raise CheckpointError(
        path, what, f"{INDEX_FILE} names this file, which cannot be read: {error}"
      ) from error
    if not found:
      raise CheckpointError(
        path, what, f"{INDEX_FILE} names this file, which is missing"
      )
  return [directory / file for file in sorted(tensors)]


def _read_index(path: Path) -> dict[str, str]:
  weight_map = load_json(path).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise CheckpointError(path, "weight_map", "must map tensor names to files")
  for name, file in weight_map.items():
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
      raise CheckpointError(
        path, f"tensor {name!r}", f"{file!r} is not the name of a file beside the index"
      )
  return weight_map


def _map(path: Path) -> mmap.mmap:
  try:
    with open(path, "rb") as file:
      if os.fstat(file.fileno()).st_size < _LENGTH.size:
        raise CheckpointError(path, "header", "the file is truncated: it has no header")
      contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as error:
    raise CheckpointError(path, "file", f"cannot be read: {error}") from error
  if hasattr(mmap, "MADV_RANDOM"):
    # The system would read far ahead for headers and samples; `read` asks for tensors.
    contents.madvise(mmap.MADV_RANDOM)
  return contents


def _read_header(path: Path, contents: mmap.mmap) -> list[TensorEntry]:
  """The entries in the order of the file, checked to cover it without gaps."""
  size = len(contents)
  (length,) = _LENGTH.unpack_from(contents)
  data = _LENGTH.size + length
  if length > _MAX_HEADER:
    raise CheckpointError(path, "header", f"{length} bytes are more than {_MAX_HEADER}")
  if data > size:
    raise CheckpointError(
      path, "header", f"the file is truncated: it ends at byte {size} of {data}"
    )
  try:
    text = contents[_LENGTH.size : data].decode("utf-8")
  except UnicodeDecodeError as error:
    raise CheckpointError(path, "header", f"is damaged: {error}") from error
  header = parse_json(path, text)
  header.pop("__metadata__", None)
  entries = [_entry(path, name, row, data) for name, row in header.items()]
  entries.sort(key=lambda entry: (entry.start, entry.stop))
  end = data
  for entry in entries:
    if entry.start != end:
      how = "overlaps another tensor" if entry.start < end else "follows unused bytes"
      raise CheckpointError(path, f"tensor {entry.name!r}", how)
    if entry.stop > size:
      raise CheckpointError(
        path,
        f"tensor {entry.name!r}",
        f"the file is truncated: it has {size} bytes, the tensor ends at {entry.stop}",
      )
    end = entry.stop
  if end != size:
    raise CheckpointError(path, "header", f"{size - end} bytes belong to no tensor")
  return entries


def _entry(path: Path, name: str, row: Any, data: int) -> TensorEntry:
  what = f"tensor {name!r}"
  if not isinstance(row, dict):
    raise CheckpointError(path, what, "its row of the header is not an object")
  dtype: Any = row.get("dtype")
  shape: Any = row.get("shape")
  offsets: Any = row.get("data_offsets")
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise CheckpointError(
      path, what, f"dtype {dtype!r} is not supported; there are {', '.join(DTYPES)}"
    )
  if not _sizes(shape):
    raise CheckpointError(path, what, f"shape {shape!r} is not a list of sizes")
  if not _sizes(offsets) or len(offsets) != 2:
    raise CheckpointError(path, what, f"data_offsets {offsets!r} are not two offsets")
  start, stop = offsets
  needed = math.prod(shape) * DTYPES[dtype].itemsize
  if stop - start != needed:
    raise CheckpointError(
      path, what, f"{stop - start} bytes cannot be {dtype} {shape}, which are {needed}"
    )
  return TensorEntry(name, path, dtype, tuple(shape), data + start, data + stop)


def _sizes(value: Any) -> bool:
  return isinstance(value, list) and all(
    isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63
    for size in value
  )


def _compare(
  weight_map: dict[str, str], entries: dict[str, TensorEntry], index: Path
) -> None:
  for name, file in weight_map.items():
    entry = entries.get(name)
    if entry is None:
      raise CheckpointError(
        index.parent / file,
        f"tensor {name!r}",
        f"{INDEX_FILE} says it is here; it is not",
      )
    if entry.file.name != file:
      raise CheckpointError(
        entry.file, f"tensor {name!r}", f"{INDEX_FILE} says it is in {file}"
      )
  for name, entry in entries.items():
    if name not in weight_map:
      raise CheckpointError(
        entry.file, f"tensor {name!r}", f"is unexpected: {INDEX_FILE} does not name it"
      )
