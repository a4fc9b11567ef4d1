"""Each rule of the KDTR format has its error, which names file and field."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import kdtr, kdtr_format
from kdtree_jax.checkpoint.int4 import quantize
from kdtree_jax.checkpoint.kdtr import KdtrError
from tests.checkpoint.kdtr_bytes import assemble


def row(**changes: Any) -> dict[str, Any]:
  """A row of the table for 64 bytes of zeros."""
  return {
    "name": "x",
    "dtype": "f32",
    "shape": [16],
    "offset": 0,
    "bytes": 64,
    "crc32": zlib.crc32(bytes(64)),
  } | changes


def document(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
  return {"config": {}, "metadata": {}, "tensors": list(rows)} | changes


NESTED: Any = 1
for _ in range(70):
  NESTED = [NESTED]


@pytest.mark.parametrize(
  ("tensors", "config", "field", "reason"),
  [
    ({"x": np.ones(3, np.complex64)}, {}, "tensor 'x'.dtype", "complex64"),
    ({"x": np.array(["a"])}, {}, "tensor 'x'.dtype", "is not one of"),
    ({"x": np.array([None])}, {}, "tensor 'x'.dtype", "is not one of"),
    ({"x": np.ones(3, np.uint64)}, {}, "tensor 'x'.dtype", "uint64"),
    ({"x": [1, 2]}, {}, "tensor 'x'", "must be an array"),
    ({"x": np.ones(3, ml_dtypes.int4)}, {}, "tensor 'x'.shape", "even"),
    ({"x": np.ones((), ml_dtypes.int4)}, {}, "tensor 'x'.shape", "even"),
    ({"": np.ones(3)}, {}, "tensors[0].name", "non-empty"),
    ({"a\nb": np.ones(3)}, {}, "tensors[0].name", "control character"),
    ({"\ud800": np.ones(3)}, {}, "tensors[0].name", "surrogate"),
    ({"x" * 1025: np.ones(3)}, {}, "tensors[0].name", "1024"),
    (
      {"w": quantize(np.ones((1, 32))), "w_scale": np.ones(3)},
      {},
      "tensor 'w_scale'",
      "twice",
    ),
    ({}, [], "config", "must be a mapping"),
    ({}, {"rope": {"theta": float("nan")}}, "config.rope.theta", "finite"),
    ({}, {"a": [0, float("-inf")]}, "config.a[1]", "finite"),
    ({}, {"a": 2**63}, "config.a", "64 bits"),
    ({}, {1: "x"}, "config", "must be a string"),
    ({}, {"a": np.float32(1)}, "config.a", "float32"),
    ({}, {"a": {"b", "c"}}, "config.a", "set"),
    ({}, {"a": "\udc00"}, "config.a", "surrogate"),
    ({}, {"\udc00": 1}, "config", "surrogate"),
    ({}, {"a": NESTED}, None, "nested"),
  ],
)
def test_write_refuses(tmp_path: Path, tensors, config, field, reason):
  path = tmp_path / "x.kdtr"
  with pytest.raises(KdtrError) as error:
    kdtr.write(path, tensors, config)
  assert reason in str(error.value)
  assert field is None or error.value.field == field
  assert error.value.path == str(path)
  assert os.listdir(tmp_path) == []


def test_write_refuses_bools_beyond_one(tmp_path: Path):
  array = np.array([0, 1, 2], np.uint8).view(np.bool_)
  with pytest.raises(KdtrError, match="0 or 1"):
    kdtr.write(tmp_path / "x.kdtr", {"x": array}, {})
  assert os.listdir(tmp_path) == []


def test_error_pickles():
  error = KdtrError(Path("a.kdtr"), "magic", "is wrong")
  copy = pickle.loads(pickle.dumps(error))
  assert str(copy) == str(error) == "a.kdtr: magic: is wrong"
  assert (copy.path, copy.field, copy.reason) == ("a.kdtr", "magic", "is wrong")


ZEROS = bytes(64)
VALID = assemble(document(row()), ZEROS)


def patched(offset: int, value: bytes, fix_crc: bool = True) -> bytes:
  """The valid file with other bytes in its preamble."""
  contents = bytearray(VALID)
  contents[offset : offset + len(value)] = value
  if fix_crc:
    contents[28:32] = struct.pack("<I", zlib.crc32(contents[:28]))
  return bytes(contents)


def header_text(text: str) -> bytes:
  return assemble(text, ZEROS)


BROKEN = {
  "empty": (b"", "file size", "truncated"),
  "short": (b"KDTR", "file size", "truncated"),
  "magic": (patched(0, b"KDTX"), "magic", "not a KDTR file"),
  "newer": (patched(4, struct.pack("<I", 2)), "version", "2 is newer than 1"),
  "version 0": (patched(4, struct.pack("<I", 0)), "version", "does not exist"),
  "preamble": (patched(8, b"\1", fix_crc=False), "preamble", "CRC32"),
  "truncated": (VALID[:-1], "file size", "truncated"),
  "trailing": (VALID + b"\0", "file size", "bytes follow"),
  "header longer than allowed": (
    patched(16, struct.pack("<Q", 2**63)),
    "header length",
    "allowed",
  ),
  "header longer than file": (
    patched(16, struct.pack("<Q", len(VALID))),
    "header length",
    "beyond",
  ),
  "header crc": (patched(24, b"\0\0"), "header", "CRC32"),
  "header padding": (
    VALID[:-65] + b"\1" + VALID[-64:],
    "header",
    "padding is not zero",
  ),
  "no JSON": (header_text("{"), "header", "not valid JSON"),
  "empty header": (header_text(""), "header", "not valid JSON"),
  "BOM": (header_text("\ufeff{}"), "header", "not valid JSON"),
  "not UTF-8": (assemble(b"\xff\xfe", ZEROS), "header", "not valid JSON"),
  "two documents": (header_text("{} {}"), "header", "not valid JSON"),
  "deep": (header_text("[" * 100_000), "header", "not valid JSON"),
  "long number": (header_text("9" * 5000), "header", "not valid JSON"),
  "duplicate key": (
    header_text('{"config":{},"config":{},"metadata":{},"tensors":[]}'),
    "header",
    "'config' appears twice",
  ),
  "array": (header_text("[]"), "header", "must be a JSON object"),
  "no tensors": (
    header_text('{"config":{},"metadata":{}}'),
    "header.tensors",
    "is missing",
  ),
  "unknown key": (document(extra=1), "header", "unknown key 'extra'"),
  "config": (document(config=[]), "config", "must be a JSON object"),
  "metadata": (document(metadata=None), "metadata", "must be a JSON object"),
  "NaN": (document(config={"a": float("nan")}), "config.a", "finite"),
  "infinity": (
    header_text('{"config":{"a":[-1e999]},"metadata":{},"tensors":[]}'),
    "config.a[0]",
    "finite",
  ),
  "long integer": (document(metadata={"a": 10**30}), "metadata.a", "64 bits"),
  "surrogate": (document(config={"a": "\ud800"}), "config.a", "surrogate"),
  "tensors": (document(tensors={}), "tensors", "must be a JSON array"),
  "row": (document(tensors=[1]), "tensors[0]", "must be a JSON object"),
  "row key": (document(row(stride=1)), "tensors[0]", "unknown key 'stride'"),
  "name": (document(row(name=1)), "tensors[0].name", "string"),
  "dtype": (document(row(dtype="f8")), "tensor 'x'.dtype", "'f8' is not one of"),
  "dtype list": (document(row(dtype=["f32"])), "tensor 'x'.dtype", "is not one of"),
  "shape": (document(row(shape=16)), "tensor 'x'.shape", "array"),
  "negative": (document(row(shape=[-4, -4])), "tensor 'x'.shape", "0 or more"),
  "fraction": (document(row(shape=[16.0])), "tensor 'x'.shape", "integers"),
  "boolean": (document(row(shape=[16, True])), "tensor 'x'.shape", "integers"),
  "overflow": (document(row(shape=[2**32, 2**32])), "tensor 'x'.shape", "more than"),
  "overflow by zero": (
    document(row(shape=[0, 2**62], bytes=0)),
    "tensor 'x'.shape",
    "more than",
  ),
  "rank": (document(row(shape=[1] * 33)), "tensor 'x'.shape", "at most 32"),
  "odd int4": (
    document(row(dtype="int4", shape=[2, 3], bytes=3)),
    "tensor 'x'.shape",
    "an even one",
  ),
  "bytes": (document(row(bytes=63)), "tensor 'x'.bytes", "takes 64"),
  "bytes type": (document(row(bytes="64")), "tensor 'x'.bytes", "integer"),
  "negative offset": (document(row(offset=-64)), "tensor 'x'.offset", "integer"),
  "crc range": (document(row(crc32=2**32)), "tensor 'x'.crc32", "integer"),
  "misaligned": (document(row(offset=1)), "tensor 'x'.offset", "misaligned"),
  "gap": (document(row(offset=64)), "tensor 'x'.offset", "gap"),
  "overlap": (
    document(row(), row(name="y")),
    "tensor 'y'.offset",
    "overlaps",
  ),
  "out of file": (
    document(row(shape=[17], bytes=68)),
    "tensor 'x'.bytes",
    "beyond the 64 bytes",
  ),
  "far out of file": (
    document(row(shape=[2**40], bytes=2**42)),
    "tensor 'x'.bytes",
    "beyond the 64 bytes",
  ),
  "twice": (
    document(row(shape=[0], bytes=0, crc32=0), row()),
    "tensor 'x'",
    "appears twice",
  ),
  "not filled": (document(), "file size", "64 bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_open_refuses(tmp_path: Path, case: str):
  contents, field, reason = BROKEN[case]
  if isinstance(contents, dict):
    contents = assemble(contents, ZEROS)
  path = tmp_path / "x.kdtr"
  path.write_bytes(contents)
  with pytest.raises(KdtrError) as error:
    kdtr.open_kdtr(path)
  assert error.value.field == field
  assert reason in error.value.reason
  assert str(path) in str(error.value)


def test_the_valid_file_of_the_cases_above_is_valid(tmp_path: Path):
  path = tmp_path / "x.kdtr"
  path.write_bytes(VALID)
  np.testing.assert_array_equal(kdtr.open_kdtr(path).read("x"), np.zeros(16))


def test_header_limit(tmp_path: Path, monkeypatch):
  path = tmp_path / "x.kdtr"
  path.write_bytes(VALID)
  monkeypatch.setattr(kdtr_format, "MAX_HEADER_BYTES", 50)
  with pytest.raises(KdtrError, match="at most 50"):
    kdtr.write(tmp_path / "y.kdtr", {}, {"long": "x" * 50})
  with pytest.raises(KdtrError, match="more than the 50 allowed"):
    kdtr.open_kdtr(path)


DAMAGED = {
  "data": (assemble(document(row()), b"\1" + bytes(63)), "tensor 'x'.crc32", "CRC32"),
  "padding": (
    assemble(
      document(row(shape=[15], bytes=60, crc32=zlib.crc32(bytes(60)))),
      bytes(63) + b"\1",
    ),
    "tensor 'x'",
    "padding is not zero",
  ),
  "bool": (
    assemble(
      document(row(dtype="bool", shape=[64], crc32=zlib.crc32(b"\2" * 64))), b"\2" * 64
    ),
    "tensor 'x'",
    "0 or 1",
  ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_data_is_never_returned(tmp_path: Path, case: str):
  contents, field, reason = DAMAGED[case]
  path = tmp_path / "x.kdtr"
  path.write_bytes(contents)
  file = kdtr.open_kdtr(path)
  for attempt in (lambda: file.read("x"), file.verify, lambda: file.read("x")):
    with pytest.raises(KdtrError) as error:
      attempt()
    assert error.value.field == field
    assert reason in error.value.reason
  with pytest.raises(KdtrError):
    kdtr.open_kdtr(path, verify="open")


def test_unknown_tensor(tmp_path: Path):
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"x": np.ones(3)}, {})
  file = kdtr.open_kdtr(path)
  for method in (file.read, file.info, file.read_packed):
    with pytest.raises(KdtrError, match="tensor 'y': is not in the file"):
      method("y")
