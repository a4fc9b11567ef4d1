"""Thousands of damaged KDTR files: each an error, or exactly the true data.

Damage without new CRCs must give `KdtrError` or the true contents. Damage that
repairs the CRCs is a file that somebody else wrote: `KdtrError`, or what its own
header says, from within its own bytes. Any other exception fails the test.
"""

from __future__ import annotations

import copy
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import kdtr
from kdtree_jax.checkpoint.int4 import quantize, unpack_int4
from kdtree_jax.checkpoint.kdtr import KdtrError
from tests.checkpoint.kdtr_bytes import assemble, parse

NUMPY = {
  "f64": "<f8",
  "f32": "<f4",
  "f16": "<f2",
  "bf16": ml_dtypes.bfloat16,
  "i64": "<i8",
  "i32": "<i4",
  "i16": "<i2",
  "i8": "i1",
  "u8": "u1",
  "u32": "<u4",
  "bool": "?",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
  """A small file with every dtype, an empty tensor, a scalar and an odd length."""
  rng = np.random.default_rng(0)
  tensors: dict[str, Any] = {
    code: rng.integers(0, 2, (3, 5)).astype(dtype) for code, dtype in NUMPY.items()
  }
  tensors["f32"] = rng.standard_normal((3, 5)).astype(np.float32)
  tensors["empty"] = np.zeros((0, 4))
  tensors["scalar"] = np.float64(2.5)
  tensors["w"] = quantize(rng.standard_normal((2, 64)))
  path = tmp_path_factory.mktemp("original") / "x.kdtr"
  kdtr.write(path, tensors, {"kind": "fuzz", "eps": 1e-6, "list": [1, None, "é"]})
  return path.read_bytes()


def read_all(path: Path) -> dict[str, Any]:
  """Everything that the reader gives, with a KdtrError in place of a tensor."""
  with kdtr.open_kdtr(path) as file:
    found: dict[str, Any] = {"config": file.config, "metadata": file.metadata}
    for name in file.names:
      try:
        found[f"tensor {name}"] = file.read(name)
      except KdtrError as error:
        found[f"tensor {name}"] = error
    return found


def expected(contents: bytes) -> dict[str, Any]:
  """What a file holds according to its own header."""
  raw, data = parse(contents)
  header = json.loads(raw)
  result: dict[str, Any] = {k: header[k] for k in ("config", "metadata")}
  for row in header["tensors"]:
    begin, end = row["offset"], row["offset"] + row["bytes"]
    assert 0 <= begin <= end <= len(data)
    assert zlib.crc32(data[begin:end]) == row["crc32"]
    shape = row["shape"]
    if row["dtype"] == "int4":
      packed = np.frombuffer(data[begin:end], np.uint8)
      array = unpack_int4(packed.reshape([*shape[:-1], shape[-1] // 2]))
    else:
      array = np.frombuffer(data[begin:end], NUMPY[row["dtype"]]).reshape(shape)
    result[f"tensor {row['name']}"] = array
  return result


def refused(
  path: Path, contents: bytes, truth: Callable[[], dict[str, Any]]
) -> int | None:
  """Number of tensors that were refused, or None where the whole file was.

  Fails unless everything else is the truth, bit for bit.
  """
  # A new file each time: some file systems flush one that is truncated and rewritten.
  path.unlink(missing_ok=True)
  path.write_bytes(contents)
  try:
    found = read_all(path)
  except KdtrError as error:
    assert str(path) in str(error)
    assert error.field
    return None
  good = truth()
  assert list(found) == list(good)
  errors = 0
  for key, value in found.items():
    if isinstance(value, KdtrError):
      errors += 1
    elif isinstance(value, np.ndarray):
      assert value.dtype == good[key].dtype
      assert value.shape == good[key].shape
      assert value.tobytes() == good[key].tobytes()
    else:
      assert value == good[key]
  return errors


def test_the_original_is_read_whole(original: bytes, tmp_path: Path):
  assert refused(tmp_path / "x", original, lambda: expected(original)) == 0


def test_flipped_bits(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(1)
  # Each bit of the preamble, and 3,000 others.
  bits = [*range(256), *rng.choice(np.arange(256, 8 * len(original)), 3000, False)]
  truth = expected(original)
  opened = 0
  for bit in bits:
    contents = bytearray(original)
    contents[bit // 8] ^= 1 << (bit % 8)
    errors = refused(tmp_path / "x", bytes(contents), lambda: truth)
    # No bit is without cover: the file is refused, or the one tensor it is part of.
    assert errors in (None, 1)
    opened += errors is not None
  assert opened > 800


def test_set_bytes_and_copied_blocks(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(2)
  truth = expected(original)
  for _ in range(800):
    contents = bytearray(original)
    if rng.random() < 0.5:
      for at in rng.integers(0, len(contents), rng.integers(1, 9)):
        contents[at] = rng.integers(256)
    else:
      size = int(rng.integers(1, 200))
      a, b = (int(x) for x in rng.integers(0, len(contents) - size, 2))
      contents[b : b + size] = contents[a : a + size]
    errors = refused(tmp_path / "x", bytes(contents), lambda: truth)
    assert (errors == 0) == (contents == original)


def test_truncated_and_extended(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(3)
  damaged = [b"\0" + original, original + b"\0", original + bytes(64), original * 2]
  for length in [*range(100), *rng.integers(100, len(original), 300)]:
    cut = int(rng.integers(1, len(original) - length + 1))
    damaged += [original[:length], original[:length] + original[length + cut :]]
  for contents in damaged:
    assert refused(tmp_path / "x", contents, dict) is None


VALUES = [
  -1,
  0,
  1,
  2,
  16,
  63,
  64,
  65,
  128,
  2**31,
  2**32,
  2**48,
  2**62,
  2**63,
  2**64,
  10**40,
  0.5,
  64.0,
  1e400,
  float("nan"),
  True,
  None,
  "",
  "f32",
  "int4",
  "x\u0000y",
  "\u00e9",
  [],
  [0],
  [-1, -1],
  [2**32, 2**32],
  [0, 2**63],
  [1] * 40,
  [3, 5],
  [15],
  [[3], 5],
  {},
  {"name": "f32"},
]


def edited(header: dict[str, Any], rng: np.random.Generator) -> Iterator[str]:
  """Changes a header in place; yields what was done, for the message."""
  rows = header["tensors"]
  a, b = (int(x) for x in rng.integers(0, len(rows), 2))
  key = str(rng.choice(["name", "dtype", "shape", "offset", "bytes", "crc32"]))
  value = copy.deepcopy(VALUES[int(rng.integers(len(VALUES)))])
  kind = int(rng.integers(12))
  if kind == 0:
    rows[a][key], rows[b][key] = rows[b][key], rows[a][key]
    yield f"swapped {key} of {a} and {b}"
  elif kind == 1:
    rows[a][key] = value
    yield f"{key} of {a} = {value!r}"
  elif kind == 2:
    rows[a]["offset"] = rows[b]["offset"]
    yield f"{a} placed over {b}"
  elif kind == 3:
    rows[a]["offset"] += int(rng.integers(-200, 200))
    yield f"offset of {a} moved"
  elif kind == 4:
    rows[a], rows[b] = rows[b], rows[a]
    yield f"rows {a} and {b} swapped"
  elif kind == 5:
    del rows[a]
    yield f"row {a} removed"
  elif kind == 6:
    rows.insert(b, dict(rows[a]))
    yield f"row {a} repeated at {b}"
  elif kind == 7:
    del rows[a][key]
    yield f"{key} of {a} removed"
  elif kind == 8:
    member = str(rng.choice(["config", "metadata", "tensors", "other"]))
    header[member] = value
    yield f"{member} = {value!r}"
  else:
    # Another reading of the same bytes, which a reader cannot tell from the truth.
    rows[a]["dtype"] = str(rng.choice([*NUMPY, "int4"]))
    width = (
      0.5 if rows[a]["dtype"] == "int4" else np.dtype(NUMPY[rows[a]["dtype"]]).itemsize
    )
    rows[a]["shape"] = [int(rows[a]["bytes"] / width)]
    yield f"{a} read as {rows[a]['dtype']}"


def test_edited_headers_with_new_crcs(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(4)
  raw, stored = parse(original)
  header = json.loads(raw)
  opened = 0
  for _ in range(2500):
    changed = copy.deepcopy(header)
    done = [what for _ in range(rng.integers(1, 4)) for what in _edit(changed, rng)]
    contents = assemble(changed, stored)
    try:
      opened += refused(tmp_path / "x", contents, lambda c=contents: own(c)) is not None
    except Exception as error:
      raise AssertionError(f"after: {done}") from error
  assert 100 < opened < 2400


def _edit(header: dict[str, Any], rng: np.random.Generator) -> list[str]:
  # An earlier edit may have left nothing to edit.
  try:
    return list(edited(header, rng))
  except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
    return []


def own(contents: bytes) -> dict[str, Any]:
  """`expected` for a file that may hold tensors whose CRC is wrong.

  Those must be refused, so they are given a truth that no array is equal to.
  """
  raw, data = parse(contents)
  header = json.loads(raw)
  rows = header["tensors"]
  header["tensors"] = [
    row
    for row in rows
    if zlib.crc32(data[row["offset"] :][: row["bytes"]]) == row["crc32"]
  ]
  truth = expected(assemble(header, data))
  keys = ["config", "metadata", *(f"tensor {row['name']}" for row in rows)]
  return {key: truth.get(key, np.empty(0, np.complex64)) for key in keys}


def test_changed_header_text_with_new_crcs(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(5)
  text, stored = parse(original)
  opened = 0
  for _ in range(1500):
    raw = bytearray(text)
    for _ in range(rng.integers(1, 3)):
      at = int(rng.integers(len(raw)))
      choice = rng.random()
      if choice < 0.4:
        raw[at] ^= 1 << rng.integers(8)
      elif choice < 0.7:
        raw[at] = int(rng.choice(list(b'0123456789-.eE[]{},:"\\u ')))
      elif choice < 0.85:
        del raw[at : at + int(rng.integers(1, 20))]
      else:
        raw[at:at] = raw[: int(rng.integers(1, 40))]
    contents = assemble(bytes(raw), stored)
    opened += refused(tmp_path / "x", contents, lambda c=contents: own(c)) is not None
  assert opened > 20


def test_changed_data_with_new_crcs(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(6)
  raw, stored = parse(original)
  header = json.loads(raw)
  # Every byte that may take any value: padding and bools may not.
  free = [
    row["offset"] + i
    for row in header["tensors"]
    if row["dtype"] != "bool"
    for i in range(row["bytes"])
  ]
  for _ in range(300):
    data = bytearray(stored)
    for at in rng.choice(free, rng.integers(1, 30)):
      data[at] = rng.integers(256)
    changed = copy.deepcopy(header)
    for row in changed["tensors"]:
      row["crc32"] = zlib.crc32(data[row["offset"] :][: row["bytes"]])
    contents = assemble(changed, bytes(data))
    assert refused(tmp_path / "x", contents, lambda c=contents: expected(c)) == 0


def test_sizes_of_the_preamble_with_new_crcs(original: bytes, tmp_path: Path):
  rng = np.random.default_rng(7)
  sizes = [0, 1, 32, 64, len(original), 2**31, 2**40, 2**63, 2**64 - 1]
  for _ in range(500):
    contents = bytearray(original)
    for at in rng.choice([8, 16], rng.integers(1, 3), False):
      size = int(rng.choice(sizes)) if rng.random() < 0.5 else 0
      size = size or (len(original) + int(rng.integers(-200, 200)))
      contents[at : at + 8] = struct.pack("<Q", size % 2**64)
    if contents == original:
      continue
    contents[28:32] = struct.pack("<I", zlib.crc32(contents[:28]))
    assert refused(tmp_path / "x", bytes(contents), dict) is None
