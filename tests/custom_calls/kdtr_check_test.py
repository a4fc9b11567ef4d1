"""The C++ reader of KDTR files gives Python's verdict on good and damaged files."""

from __future__ import annotations

import copy
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kdtree_jax.checkpoint import kdtr
from kdtree_jax.checkpoint.kdtr import KdtrError
from tests.checkpoint import kdtr_errors_test as errors
from tests.checkpoint import kdtr_fuzz_test as fuzz
from tests.checkpoint.kdtr_bytes import assemble, parse
from tests.custom_calls import checker

DEMO = checker.ROOT / "kdtree_jax" / "demo"


@pytest.fixture(scope="module")
def program() -> Path:
  found = checker.host_checker()
  if found is None:
    pytest.skip("needs a C++ compiler")
  return found


original = fuzz.original


def python_error(path: Path) -> KdtrError | None:
  try:
    with kdtr.open_kdtr(path, verify="open"):
      return None
  except KdtrError as error:
    return error


def agree(program: Path, folder: Path, mutants: list[bytes]) -> tuple[int, int]:
  """Fails unless both readers say the same; returns (accepted, refused)."""
  names = [f"{i}.kdtr" for i in range(len(mutants))]
  for name, contents in zip(names, mutants, strict=True):
    (folder / name).write_bytes(contents)
  found = checker.verdicts(program, folder, names)
  accepted = 0
  for name in names:
    error = python_error(folder / name)
    told = found[name]
    assert (error is None) == (told is None), f"{name}: Python {error}, C++ {told}"
    accepted += error is None
    # Python quotes a name with repr, which differs from C++ beyond plain text, and
    # the two parsers end at different depths.
    if error and told and "nested" not in told and plain(error.field):
      assert told.startswith(f"{error.field}: "), f"Python: {error}; C++: {told}"
  return accepted, len(names) - accepted


def plain(field: str) -> bool:
  return field.isascii() and field.isprintable() and not set('"\\') & set(field)


def table(program: Path, path: Path) -> list[tuple[str, ...]]:
  done = checker.run(program, "--list", path.name, cwd=path.parent)
  assert done.returncode == 0, done.stderr
  first, columns, *rows, end = done.stdout.split("\n")
  assert first.startswith(f"{path.name}: {path.stat().st_size} bytes, {len(rows)} ten")
  assert columns.split("\t") == ["offset", "bytes", "crc32", "dtype", "shape", "name"]
  assert end == ""
  return [tuple(row.split("\t")) for row in rows]


def python_table(path: Path) -> list[tuple[str, ...]]:
  with kdtr.open_kdtr(path) as file:
    return [
      (
        str(t.offset),
        str(t.nbytes),
        f"{t.crc32:08x}",
        t.dtype,
        "[" + ",".join(map(str, t.shape)) + "]",
        t.name,
      )
      for t in map(file.info, file.names)
    ]


def test_the_tables_are_pythons(program: Path, original: bytes, tmp_path: Path):
  small = tmp_path / "small.kdtr"
  small.write_bytes(original)
  odd = tmp_path / "odd.kdtr"
  kdtr.write(odd, {" a  b": np.ones(()), "\u2028é'\"\\": np.ones((0, 2**40))}, {})
  for path in (small, odd, DEMO / "target.kdtr", DEMO / "drafter.kdtr"):
    assert table(program, path) == python_table(path)


@pytest.mark.parametrize("case", errors.BROKEN | errors.DAMAGED)
def test_each_rule_has_its_error(program: Path, tmp_path: Path, case: str):
  contents, field, _ = (errors.BROKEN | errors.DAMAGED)[case]
  if isinstance(contents, dict):
    contents = assemble(contents, errors.ZEROS)
  (tmp_path / "x.kdtr").write_bytes(contents)
  told = checker.verdicts(program, tmp_path, ["x.kdtr"])["x.kdtr"]
  assert told is not None
  assert told.startswith(f"{field}: ")


def test_damage(program: Path, original: bytes, tmp_path: Path):
  rng = np.random.default_rng(11)
  mutants = [original]
  bits = [*range(256), *rng.choice(np.arange(256, 8 * len(original)), 1200, False)]
  for bit in bits:
    contents = bytearray(original)
    contents[bit // 8] ^= 1 << (bit % 8)
    mutants.append(bytes(contents))
  for length in [*range(100), *rng.integers(100, len(original), 200)]:
    mutants.append(original[:length])
  mutants += [original + b"\0", original + bytes(64), original * 2, b"\0" + original]
  assert agree(program, tmp_path, mutants) == (1, len(mutants) - 1)


def test_sizes_of_the_preamble_with_new_crcs(
  program: Path, original: bytes, tmp_path: Path
):
  rng = np.random.default_rng(12)
  sizes = [0, 1, 32, 64, len(original), 2**31, 2**40, 2**63, 2**64 - 33, 2**64 - 1]
  mutants = []
  for _ in range(400):
    contents = bytearray(original)
    for at in rng.choice([8, 16], rng.integers(1, 3), False):
      size = int(rng.choice(sizes)) if rng.random() < 0.5 else 0
      size = size or (len(original) + int(rng.integers(-200, 200)))
      contents[at : at + 8] = struct.pack("<Q", size % 2**64)
    contents[28:32] = struct.pack("<I", zlib.crc32(contents[:28]))
    mutants.append(bytes(contents))
  agree(program, tmp_path, mutants)


def test_edited_headers_with_new_crcs(program: Path, original: bytes, tmp_path: Path):
  rng = np.random.default_rng(13)
  raw, stored = parse(original)
  header = json.loads(raw)
  mutants = []
  for _ in range(2000):
    changed = copy.deepcopy(header)
    for _ in range(rng.integers(1, 4)):
      fuzz._edit(changed, rng)
    mutants.append(assemble(changed, stored))
  accepted, refused = agree(program, tmp_path, mutants)
  assert accepted > 50
  assert refused > 1000


def changed_texts(text: bytes, rng: np.random.Generator) -> Iterator[bytes]:
  for _ in range(2500):
    raw = bytearray(text)
    for _ in range(rng.integers(1, 3)):
      at = int(rng.integers(len(raw)))
      choice = rng.random()
      if choice < 0.3:
        raw[at] ^= 1 << rng.integers(8)
      elif choice < 0.7:
        raw[at] = int(rng.choice(list(b'0123456789-.eE[]{},:"\\u \n\x7f')))
      elif choice < 0.85:
        del raw[at : at + int(rng.integers(1, 20))]
      else:
        raw[at:at] = raw[: int(rng.integers(1, 40))]
    yield bytes(raw)


def test_changed_header_text_with_new_crcs(
  program: Path, original: bytes, tmp_path: Path
):
  text, stored = parse(original)
  texts = changed_texts(text, np.random.default_rng(14))
  accepted, refused = agree(program, tmp_path, [assemble(t, stored) for t in texts])
  assert accepted > 20
  assert refused > 1000


# Everything that JSON readers are known to disagree on, as the value of a member.
VALUES = """
0 -0 1 -1 01 -01 +1 1. .5 1.5 -1.5e3 1e 1e+ 1E+05 1e400 -1e400 1e-400 0e0 00 - -- 1a
0x10 9223372036854775807 9223372036854775808 -9223372036854775808 -9223372036854775809
NaN -NaN Infinity -Infinity +Infinity nan inf true false null True nulll tru [] [,] [1,]
[1,,2] [1] {} {,} {"a":1,} {"a"} {"a":} {a:1} {"a":1,"a":1} {"a":1,"\\u0061":2} 'x' "x
"\\u0041" "\\u00" "\\u00zz" "\\ud83d\\ude00" "\\ud83d" "\\ude00" "\\ude00\\ud83d"
"\\ud83d\\u0041" "\\ud83d\\ud83d\\ude00" "\\ud83dx" "\\a" "\\" "\\/\\b\\f\\n\\r\\t\\\\"
"\\u0000" "\\uD83D\\uDE00" {"\\ud800":1} "\x7f" "\u2028" //x /**/1 1/**/ [[[[1]]]] ""
1_0
""".split()


def test_values_that_readers_disagree_on(program: Path, tmp_path: Path):
  texts = [v.encode() for v in VALUES]
  texts += [b'"\x01"', b'"\t"', b"\xa01", b"\x0c1", b"\r\n\t 1 ", b'"\x00"', b"\x00"]
  texts += [b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xed\x9f\xbf"', b'"\xf4\x90\x80\x80"']
  texts += [b'"\xf4\x8f\xbf\xbf"', b'"\xe0\x80\x80"', b'"\xf0\x80\x80\x80"', b'"\xff"']
  texts += [b'"\xc3"', b'"\xe2\x82"', b'"\xf0\x9f\x98"', b'"\xef\xbb\xbf"']
  texts += [b"[" * n + b"]" * n for n in (1, 62, 63, 64, 65, 150, 250, 5000)]
  texts += [b'{"a":' * n + b"1" + b"}" * n for n in (62, 63, 64, 65, 150, 250)]
  texts += [b"9" * n for n in (19, 400, 4300, 4301)]
  mutants = [
    assemble(b'{"config":{"a":' + text + b'},"metadata":{},"tensors":[]}')
    for text in texts
  ]
  accepted, refused = agree(program, tmp_path, mutants)
  assert accepted > 20
  assert refused > 40


def test_what_is_no_file(program: Path, tmp_path: Path):
  (tmp_path / "folder").mkdir()
  found = checker.verdicts(program, tmp_path, ["folder", "missing"])
  assert found["folder"] == "file: is not a regular file"
  assert found["missing"] == "file: No such file or directory"


def test_help_and_wrong_flags(program: Path, tmp_path: Path):
  done = checker.run(program, "--help", cwd=tmp_path)
  assert done.returncode == 0
  assert "usage: kdtr_check" in done.stdout
  for arguments, reason in (
    ([], "FILE is missing"),
    (["--lost", "x"], "--lost: unknown flag"),
    (["--case=-1", "x"], "--case=-1: must be the number of a case"),
    (["--repeats=often", "x"], "must be a number of times"),
    (["--guard_bytes=1e3", "x"], "must be a number of bytes"),
  ):
    done = checker.run(program, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert reason in done.stderr
