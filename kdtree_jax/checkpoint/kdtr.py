"""KDTR, the container for weights, config and golden outputs.

One file, shared by Python and C++: a fixed preamble, a JSON header, and 64-byte
aligned little-endian tensors that are read in place through mmap. Every byte is
covered by a CRC32 or must be zero, and the reader checks it before it hands out
numbers, so a damaged file is an error and never a slightly different model.
The byte-level description is docs/kdtr.md.

  kdtr.write("model.kdtr", {"w": w}, config={"kind": "example"})
  with kdtr.open_kdtr("model.kdtr") as file:
    w = file.read("w")
"""

from __future__ import annotations

import mmap
import os
import stat
import zlib
from typing import Any, Literal, Self

import numpy as np

from kdtree_jax.checkpoint import kdtr_format as fmt
from kdtree_jax.checkpoint.int4 import unpack_int4
from kdtree_jax.checkpoint.kdtr_format import KdtrError, StrPath, TensorInfo
from kdtree_jax.checkpoint.kdtr_writer import SCALE_SUFFIX, fingerprint, write

__all__ = [
  "SCALE_SUFFIX",
  "KdtrError",
  "KdtrFile",
  "TensorInfo",
  "fingerprint",
  "open_kdtr",
  "write",
]


def open_kdtr(path: StrPath, *, verify: Literal["read", "open"] = "read") -> KdtrFile:
  """Opens a KDTR file for reading.

  Args:
    path: the file.
    verify: "read" checks the CRC32 of a tensor when it is first read, "open"
      checks all of them now. Either way no unchecked number is returned. The
      header is always checked here.

  Returns:
    The open file.

  Raises:
    KdtrError: the file breaks a rule of the format; the message names the field.
    OSError: the file cannot be opened.
  """
  if verify not in ("read", "open"):
    raise ValueError(f'verify = {verify!r} is not allowed: "read" or "open"')
  fmt.require_little_endian()
  contents = _map(path)
  header, data_start = _read_header(contents, path)
  file = KdtrFile(path, header, contents[data_start:])
  if verify == "open":
    file.verify()
  return file


class KdtrFile:
  """A KDTR file that is open for reading; made by `open_kdtr`.

  Tensors are read-only views of the mapped file. They stay valid after the file
  has been closed, or replaced by `write`; a file must not be changed in place
  while it is open.

  Attributes:
    path: the file.
    config: the header's config.
    metadata: the header's metadata.
    names: tensor names in the order of the file.
    fingerprint: SHA-256 (hex) of names, dtypes, shapes and CRCs; identifies the
      weights.
  """

  def __init__(self, path: StrPath, header: fmt.Header, data: np.ndarray) -> None:
    self.path = os.fspath(path)
    self.config: dict[str, Any] = header.config
    self.metadata: dict[str, Any] = header.metadata
    self.names = tuple(t.name for t in header.tensors)
    self._infos = {t.name: t for t in header.tensors}
    self._data: np.ndarray | None = data
    self._verified: set[str] = set()

  @property
  def fingerprint(self) -> str:
    return fingerprint(tuple(self._infos.values()))

  def info(self, name: str) -> TensorInfo:
    """The tensor's row of the table.

    Raises:
      KdtrError: there is no such tensor.
    """
    if name not in self._infos:
      raise KdtrError(self.path, f"tensor {name!r}", "is not in the file")
    return self._infos[name]

  def read(self, name: str) -> np.ndarray:
    """The tensor's values in its logical shape.

    Returns:
      A read-only view of the file; for int4, the values unpacked to a new int8
      array (`read_packed` gives the view).

    Raises:
      KdtrError: no such tensor, its bytes are damaged, or the file is closed.
    """
    info = self.info(name)
    if info.dtype == fmt.INT4:
      return unpack_int4(self.read_packed(name))
    return self._checked(info).view(fmt.DTYPES[info.dtype]).reshape(info.shape)

  def read_packed(self, name: str) -> np.ndarray:
    """An int4 tensor as it is stored.

    Returns:
      Read-only view, uint8 [..., n / 2] of an int4 tensor [..., n]: nibbles hold
      value + 8, low nibble first.

    Raises:
      KdtrError: as `read`, or the tensor is not int4.
    """
    info = self.info(name)
    if info.dtype != fmt.INT4:
      raise KdtrError(
        self.path, f"tensor {name!r}.dtype", f"is {info.dtype}; only int4 is packed"
      )
    return self._checked(info).reshape(*info.shape[:-1], info.shape[-1] // 2)

  def check(self, name: str) -> None:
    """Checks a tensor that has not been checked yet.

    Raises:
      KdtrError: no such tensor, or its bytes are damaged.
    """
    self._checked(self.info(name))

  def verify(self) -> None:
    """Checks every tensor that has not been checked yet.

    Raises:
      KdtrError: naming the first damaged tensor.
    """
    for info in self._infos.values():
      self._checked(info)

  def close(self) -> None:
    """Ends reading. The map goes when the last view of it does."""
    self._data = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _checked(self, info: TensorInfo) -> np.ndarray:
    """The tensor's bytes, after the check that its first use needs."""
    if self._data is None:
      raise KdtrError(self.path, "file", "is closed")
    end = info.offset + info.nbytes
    raw = self._data[info.offset : end]
    if info.name in self._verified:
      return raw
    found = zlib.crc32(raw.data)
    if found != info.crc32:
      raise KdtrError(
        self.path,
        f"tensor {info.name!r}.crc32",
        f"the data has CRC32 {found:08x}, the table says {info.crc32:08x}: "
        "the file is damaged",
      )
    if self._data[end : fmt.align(end)].any():
      raise KdtrError(self.path, f"tensor {info.name!r}", "padding is not zero")
    if info.dtype == "bool" and raw.size and raw.max() > 1:
      raise KdtrError(self.path, f"tensor {info.name!r}", "a bool must be 0 or 1")
    self._verified.add(info.name)
    return raw


def _map(path: StrPath) -> np.ndarray:
  """The whole file as a read-only uint8 array over its mapped pages."""
  if not stat.S_ISREG(os.stat(path).st_mode):
    raise KdtrError(path, "file", "is not a regular file")
  with open(path, "rb") as file:
    size = os.fstat(file.fileno()).st_size
    if size < fmt.PREAMBLE.size:
      raise KdtrError(
        path,
        "file size",
        f"{size} bytes are fewer than the {fmt.PREAMBLE.size} of the preamble "
        "(truncated, or not a KDTR file)",
      )
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
  return np.frombuffer(mapped, np.uint8)


def _read_header(contents: np.ndarray, path: StrPath) -> tuple[fmt.Header, int]:
  """Checks everything before the data; returns the header and the data's start."""
  preamble = contents[: fmt.PREAMBLE.size].tobytes()
  magic, version, file_bytes, header_bytes, header_crc, preamble_crc = (
    fmt.PREAMBLE.unpack(preamble)
  )
  if magic != fmt.MAGIC:
    raise KdtrError(path, "magic", f"is {magic!r}, not {fmt.MAGIC!r}: not a KDTR file")
  if version > fmt.VERSION:
    raise KdtrError(
      path,
      "version",
      f"{version} is newer than {fmt.VERSION}, the newest that this reader knows",
    )
  if version != fmt.VERSION:
    raise KdtrError(path, "version", f"{version} does not exist")
  if zlib.crc32(preamble[:-4]) != preamble_crc:
    raise KdtrError(path, "preamble", "CRC32 does not match: the file is damaged")
  if file_bytes != contents.size:
    what = "truncated" if contents.size < file_bytes else "bytes follow the end"
    raise KdtrError(
      path,
      "file size",
      f"the file has {contents.size} bytes, its preamble says {file_bytes} ({what})",
    )
  # Bounds before slices: data_start is at most the file's size from here on.
  if header_bytes > fmt.MAX_HEADER_BYTES:
    raise KdtrError(
      path,
      "header length",
      f"{header_bytes} bytes are more than the {fmt.MAX_HEADER_BYTES} allowed",
    )
  header_end = fmt.PREAMBLE.size + header_bytes
  data_start = fmt.align(header_end)
  if data_start > contents.size:
    raise KdtrError(
      path,
      "header length",
      f"the header ends at {header_end}, beyond the file's {contents.size} bytes",
    )
  raw = contents[fmt.PREAMBLE.size : header_end].tobytes()
  if zlib.crc32(raw) != header_crc:
    raise KdtrError(path, "header", "CRC32 does not match: the file is damaged")
  if contents[header_end:data_start].any():
    raise KdtrError(path, "header", "padding is not zero")
  return fmt.decode_header(raw, contents.size - data_start, path), data_start
