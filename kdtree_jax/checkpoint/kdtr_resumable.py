"""Writes a KDTR file tensor by tensor, so that a killed writer can go on.

Two files lie beside the one to be: `<name>.part`, which has every tensor at its final
place, and `<name>.part.journal`, text: a line that says what is being written, then a
line with name and CRC32 of each tensor that is. A later run reads those tensors again
and keeps the ones whose CRC32 is right, so it does not matter in which order data and
journal reached the disk, nor what happened to them since. Header and preamble come
last; before them the part is no KDTR file, and the final name appears by a rename.

The header's length depends on how many digits the CRC32s have, and the tensors' places
on that length. It is therefore padded with blanks, which JSON allows, to the length
that CRC32s of ten digits would give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kdtree_jax.checkpoint import kdtr_format as fmt
from kdtree_jax.checkpoint import kdtr_writer
from kdtree_jax.checkpoint.int4 import Int4Tensor
from kdtree_jax.checkpoint.kdtr import open_kdtr
from kdtree_jax.checkpoint.kdtr_format import Header, KdtrError, StrPath, TensorInfo

_CRC_OF_TEN_DIGITS = 2**32 - 1
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class Row:
  """A tensor of the file: name, KDTR dtype and logical shape."""

  name: str
  dtype: str
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Progress:
  """How far a conversion is.

  Attributes:
    stage: "resume" (tensors of an earlier run are read again), "write" or "check".
    done: bytes of tensors behind it.
    total: bytes of tensors of this stage.
    name: the tensor it just finished, or None at the start of the stage.
    damaged: in "resume", the tensor is not as the journal says and is written again.
  """

  stage: str
  done: int
  total: int
  name: str | None = None
  damaged: bool = False


def write_resumable(
  path: StrPath,
  rows: Sequence[Row],
  read: Callable[[str], np.ndarray | Int4Tensor],
  config: Mapping[str, Any],
  metadata: Mapping[str, Any],
  *,
  identity: Mapping[str, Any],
  overwrite: bool = True,
  restart: bool = False,
  progress: Callable[[Progress], None] = lambda _: None,
) -> str:
  """Writes a KDTR file, or finishes one that an earlier call began.

  Equal arguments give equal bytes, however often it was interrupted. The tensors have
  the same places and the same fingerprint as in a file of `write`.

  Args:
    path: file to create.
    rows: the tensors in the order of the file. An int4 row is followed by the row of
      its scales, if `read` gives an Int4Tensor for it.
    read: name to array, or to Int4Tensor for an int4 row; called once for each row that
      is not there yet, but not for the scales of an Int4Tensor.
    config: JSON object of the header.
    metadata: a second one.
    identity: JSON object that says where the values come from. A part of another
      identity, config, metadata or table is not continued.
    overwrite: whether an existing `path` is replaced.
    restart: whether to discard what an earlier call left.
    progress: called after each tensor of each stage.

  Returns:
    The fingerprint of the tensors.

  Raises:
    KdtrError: the header breaks a rule of the format; a value is not what its row says;
      what an earlier call left is of something else, or a file of that name has no
      journal; or the check of what was written found damage (calling again repairs it).
    FileExistsError: `path` exists.
    BlockingIOError: another process is writing `path`.
    OSError: a file cannot be written; what has been is kept for a later call.
  """
  fmt.require_little_endian()
  layout = _Layout.create(Path(path), rows, config, metadata)
  with _Journal.open(layout) as journal:
    # Another process may have finished it since the caller looked.
    if not overwrite and layout.path.exists():
      journal.discard_if_new()
      raise FileExistsError(
        f"path = {path} exists; overwrite=True (kdtree-convert: --overwrite) "
        "replaces it"
      )
    journal.begin(layout, dict(identity), restart)
    with _open_part(layout) as part:
      crcs = _resume(layout, journal, part, progress)
      _write(layout, journal, part, crcs, read, progress)
      header = layout.header(crcs)
      _write_front(layout, part, header)
      part.flush()
      os.fsync(part.fileno())
      if hasattr(os, "posix_fadvise"):  # What is checked comes from the disk.
        os.posix_fadvise(part.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _check(layout, progress)
    os.replace(layout.part, layout.path)
    kdtr_writer.sync_folder(layout.path.parent)
    journal.discard()
  return kdtr_writer.fingerprint(header.tensors)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """Where everything lies, known before the first value."""

  path: Path
  config: dict[str, Any]
  metadata: dict[str, Any]
  infos: tuple[TensorInfo, ...]  # with CRC32s of ten digits
  header_bytes: int
  data_bytes: int

  @classmethod
  def create(
    cls,
    path: Path,
    rows: Sequence[Row],
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
  ) -> _Layout:
    infos, position = [], 0
    for row in rows:
      fmt.check_name(row.name, f"tensor {row.name!r}", path)
      nbytes = fmt.data_nbytes(row.dtype, row.shape)
      infos.append(
        TensorInfo(row.name, row.dtype, row.shape, position, nbytes, _CRC_OF_TEN_DIGITS)
      )
      position = fmt.align(position + nbytes)
    header = Header(dict(config), dict(metadata), tuple(infos))
    for field in ("config", "metadata"):
      fmt.check_json(getattr(header, field), field, path)
    raw = fmt.encode_header(header)
    if len(raw) > fmt.MAX_HEADER_BYTES:
      raise KdtrError(
        path, "header", f"takes {len(raw)} bytes; at most {fmt.MAX_HEADER_BYTES} do"
      )
    fmt.decode_header(raw, position, path)
    return cls(path, header.config, header.metadata, header.tensors, len(raw), position)

  @property
  def part(self) -> Path:
    return self.path.with_name(self.path.name + ".part")

  @property
  def data_start(self) -> int:
    return fmt.align(fmt.PREAMBLE.size + self.header_bytes)

  @property
  def file_bytes(self) -> int:
    return self.data_start + self.data_bytes

  @property
  def tensor_bytes(self) -> int:
    return sum(info.nbytes for info in self.infos)

  def header(self, crcs: Mapping[str, int]) -> Header:
    infos = (dataclasses.replace(i, crc32=crcs[i.name]) for i in self.infos)
    return Header(self.config, self.metadata, tuple(infos))

  def digest(self) -> str:
    """Identifies config, metadata and table."""
    raw = fmt.encode_header(Header(self.config, self.metadata, self.infos))
    return hashlib.sha256(raw).hexdigest()


class _Journal:
  """The list of tensors that have been written; locked while it is open."""

  def __init__(self, path: Path, file: BinaryIO) -> None:
    self.path = path
    self._file = file
    self._new = os.fstat(file.fileno()).st_size == 0
    self.crcs: dict[str, int] = {}

  @classmethod
  @contextlib.contextmanager
  def open(cls, layout: _Layout) -> Iterator[_Journal]:
    path = layout.path.with_name(layout.path.name + ".part.journal")
    while True:
      with open(path, "a+b") as file:
        _lock(file, path)
        if not _is_at(file, path):
          continue  # Who held the lock before has finished, and unlinked it.
        yield cls(path, file)
        return

  def discard(self) -> None:
    """Unlinks the journal, under the lock: nobody else takes it for a live one."""
    if os.name == "nt":
      self._file.close()
    self.path.unlink(missing_ok=True)

  def discard_if_new(self) -> None:
    if self._new:
      self.discard()

  def begin(self, layout: _Layout, identity: dict[str, Any], restart: bool) -> None:
    title = {"journal_of": "kdtr", "layout": layout.digest(), "identity": identity}
    title = json.loads(json.dumps(title))
    self._file.seek(0)
    first = self._file.readline()
    found = _json_line(first)
    if not restart and layout.part.exists():
      if found != title:
        self.discard_if_new()
        why = "has no journal that says what it is"
        if found is not None:
          why = f"belongs to {_differences(found, title)}"
        raise KdtrError(
          layout.part,
          "earlier part",
          f"{why}; delete it, or start anew with restart=True (kdtree-convert: "
          "--restart), which replaces it",
        )
      self._read_entries(len(first))
      return
    self._file.truncate(0)
    layout.part.unlink(missing_ok=True)
    self._append(title)
    os.fsync(self._file.fileno())  # Without its title, no part is continued.
    kdtr_writer.sync_folder(layout.path.parent)

  def _read_entries(self, position: int) -> None:
    """Takes whole lines until one is not; what follows is cut off."""
    for line in self._file:
      entry = _json_line(line)
      if (
        entry is None
        or not isinstance(entry.get("name"), str)
        or type(entry.get("crc32")) is not int
      ):
        break
      self.crcs[entry["name"]] = entry["crc32"]
      position += len(line)
    self._file.truncate(position)

  def add(self, name: str, crc: int) -> None:
    self._append({"name": name, "crc32": crc})

  def _append(self, entry: dict[str, Any]) -> None:
    self._file.write(json.dumps(entry).encode() + b"\n")
    self._file.flush()


def _json_line(line: bytes) -> dict[str, Any] | None:
  """The object of a whole line."""
  if not line.endswith(b"\n"):
    return None
  try:
    value = json.loads(line)
  except ValueError:
    return None
  return value if isinstance(value, dict) else None


def _differences(found: dict[str, Any], title: dict[str, Any]) -> str:
  old, new = found.get("identity"), title["identity"]
  if isinstance(old, dict):
    for key in sorted(set(old) | set(new)):
      if old.get(key) != new.get(key):
        return f"another conversion ({key} {old.get(key)!r}, now {new.get(key)!r})"
  return "another conversion (other config, metadata or tensors)"


def _is_at(file: BinaryIO, path: Path) -> bool:
  """Whether an open file is still the one of that name."""
  try:
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
  except FileNotFoundError:
    return False


def _lock(file: BinaryIO, path: Path) -> None:
  try:
    import fcntl
  except ImportError:  # Windows: nobody stops two writers there.
    return
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise BlockingIOError(
      errno.EWOULDBLOCK, "another process is writing this file", os.fspath(path)
    ) from error
  except OSError:  # Nor on a network's disk without locks.
    pass


@contextlib.contextmanager
def _open_part(layout: _Layout) -> Iterator[BinaryIO]:
  """The part at its full size; bytes that were never written are zero."""
  fresh = not layout.part.exists()
  free = shutil.disk_usage(layout.part.parent).free
  if fresh and layout.file_bytes > free:  # Better now than after an hour.
    raise OSError(
      errno.ENOSPC,
      f"{layout.file_bytes} bytes are needed, {free} are free",
      os.fspath(layout.part),
    )
  with open(layout.part, "x+b" if fresh else "r+b") as file:
    file.truncate(layout.file_bytes)
    yield file


def _resume(
  layout: _Layout,
  journal: _Journal,
  part: BinaryIO,
  progress: Callable[[Progress], None],
) -> dict[str, int]:
  """The tensors of the journal that are in the part as it says."""
  listed = [info for info in layout.infos if info.name in journal.crcs]
  total, done = sum(info.nbytes for info in listed), 0
  crcs: dict[str, int] = {}
  if listed:
    progress(Progress("resume", 0, total))
  for info in listed:
    crc = journal.crcs[info.name]
    intact = _crc_in(part, layout.data_start + info.offset, info.nbytes) == crc
    if intact:
      crcs[info.name] = crc
    done += info.nbytes
    progress(Progress("resume", done, total, info.name, damaged=not intact))
  return crcs


def _crc_in(file: BinaryIO, start: int, nbytes: int) -> int:
  file.seek(start)
  crc = 0
  while nbytes:
    chunk = file.read(min(nbytes, _CHUNK))
    if not chunk:
      return -1
    crc = zlib.crc32(chunk, crc)
    nbytes -= len(chunk)
  return crc


def _write(
  layout: _Layout,
  journal: _Journal,
  part: BinaryIO,
  crcs: dict[str, int],
  read: Callable[[str], np.ndarray | Int4Tensor],
  progress: Callable[[Progress], None],
) -> None:
  """Writes what is missing from `crcs`, and adds it there."""
  total = layout.tensor_bytes
  progress(Progress("write", _bytes_of(layout, crcs), total))
  table = {info.name: info for info in layout.infos}

  def write_value(value: np.ndarray | Int4Tensor, name: str) -> None:
    for row in kdtr_writer.stored_rows(name, value, layout.path):
      name, dtype, shape, data = row
      info = table.get(name)
      if info is None or (info.dtype, info.shape) != (dtype, shape):
        raise KdtrError(
          layout.path,
          f"tensor {name!r}",
          f"is {dtype} {list(shape)}, which the table does not have",
        )
      crc = zlib.crc32(data.data)
      part.seek(layout.data_start + info.offset)
      part.write(data.data)
      part.flush()
      journal.add(name, crc)
      crcs[name] = crc

  done = _bytes_of(layout, crcs)
  for info in layout.infos:
    scales = info.name + kdtr_writer.SCALE_SUFFIX
    own = [info.name]
    if info.dtype == fmt.INT4 and scales in table:
      own.append(scales)
    missing = [name for name in own if name not in crcs]
    if missing:
      write_value(read(info.name), info.name)  # No name here keeps a tensor alive.
      done += sum(table[name].nbytes for name in missing)
      progress(Progress("write", done, total, info.name))


def _bytes_of(layout: _Layout, names: Mapping[str, int]) -> int:
  return sum(info.nbytes for info in layout.infos if info.name in names)


def _write_front(layout: _Layout, part: BinaryIO, header: Header) -> None:
  raw = fmt.encode_header(header).ljust(layout.header_bytes)
  fmt.decode_header(raw, layout.data_bytes, layout.path)
  part.seek(0)
  part.write(kdtr_writer.preamble(layout.file_bytes, raw))
  part.write(raw)


def _check(layout: _Layout, progress: Callable[[Progress], None]) -> None:
  """Reads the finished part as anybody would, every tensor of it."""
  total, done = layout.tensor_bytes, 0
  progress(Progress("check", 0, total))
  with open_kdtr(layout.part) as file:
    for info in layout.infos:
      file.check(info.name)
      done += info.nbytes
      progress(Progress("check", done, total, info.name))
