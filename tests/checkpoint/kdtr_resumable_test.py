"""A KDTR file written in several goes: the bytes of one go, or an error."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import KdtrError, kdtr_resumable, open_kdtr, quantize, write
from kdtree_jax.checkpoint.kdtr_resumable import Progress, Row, write_resumable

CONFIG = {"kind": "example"}
METADATA = {"note": "text"}
IDENTITY = {"source": "ab", "dtype": "bfloat16"}


def tensors() -> dict[str, Any]:
  rng = np.random.default_rng(3)
  return {
    "a": rng.standard_normal((5, 7)).astype(np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "q": quantize(rng.standard_normal((6, 64)).astype(np.float32)),
    "b": rng.standard_normal(100).astype(ml_dtypes.bfloat16),
    "zeros": np.zeros(50, np.int32),
    "p": quantize(rng.standard_normal((2, 32)).astype(np.float32)),
    "c": rng.standard_normal((3, 3, 3)),
  }


ROWS = [
  Row("a", "f32", (5, 7)),
  Row("empty", "f32", (0, 3)),
  Row("q", "int4", (6, 64)),
  Row("q_scale", "bf16", (6, 2)),
  Row("b", "bf16", (100,)),
  Row("zeros", "i32", (50,)),
  Row("p", "int4", (2, 32)),
  Row("p_scale", "bf16", (2, 1)),
  Row("c", "f64", (3, 3, 3)),
]
WRITES = len(tensors())  # A quantised tensor is one.


class Killed(Exception):
  """Stands for the end of the process."""


class Run:
  """Calls `write_resumable`, and keeps what it read and said."""

  def __init__(self, path: Path, kill_at: int | None = None, **changes: Any) -> None:
    self.read: list[str] = []
    self.progress: list[Progress] = []
    self._values = tensors()
    self._kill_at = kill_at
    arguments: dict[str, Any] = {
      "rows": ROWS,
      "read": self._read,
      "config": CONFIG,
      "metadata": METADATA,
      "identity": IDENTITY,
      "progress": self._report,
    }
    self.fingerprint = write_resumable(path, **(arguments | changes))

  def _read(self, name: str) -> Any:
    self.read.append(name)
    return self._values[name]

  def _report(self, progress: Progress) -> None:
    self.progress.append(progress)
    written = sum(p.stage == "write" and p.name is not None for p in self.progress)
    if progress.stage == "write" and written == self._kill_at:
      raise Killed


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> bytes:
  path = tmp_path_factory.mktemp("whole") / "x"
  Run(path)
  return path.read_bytes()


def part_of(path: Path) -> Path:
  return path.with_name(path.name + ".part")


def journal_of(path: Path) -> Path:
  return path.with_name(path.name + ".part.journal")


def interrupted(path: Path, kill_at: int) -> None:
  with pytest.raises(Killed):
    Run(path, kill_at)
  assert not path.exists()


def test_one_go_gives_the_tensors_and_the_fingerprint_of_write(tmp_path):
  run = Run(tmp_path / "x")
  fingerprint = write(tmp_path / "y", tensors(), CONFIG, METADATA)
  assert run.fingerprint == fingerprint
  assert run.read == list(tensors())
  assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]
  x = open_kdtr(tmp_path / "x", verify="open")
  y = open_kdtr(tmp_path / "y")
  assert (x.config, x.metadata, x.names) == (y.config, y.metadata, y.names)
  assert [x.info(n) for n in x.names] == [y.info(n) for n in y.names]
  data_bytes = x.info("c").offset + 256  # 27 doubles, padded
  assert (tmp_path / "x").read_bytes()[-data_bytes:] == (
    (tmp_path / "y").read_bytes()[-data_bytes:]
  )


def test_progress_counts_bytes_in_every_stage(tmp_path):
  run = Run(tmp_path / "x")
  total = sum(open_kdtr(tmp_path / "x").info(r.name).nbytes for r in ROWS)
  for stage in ("write", "check"):
    steps = [p for p in run.progress if p.stage == stage]
    assert steps[0].done == 0 and steps[-1].done == total
    assert {p.total for p in steps} == {total}
    assert [p.done for p in steps] == sorted(p.done for p in steps)
  assert not any(p.stage == "resume" for p in run.progress)


def test_checksums_of_few_digits_are_padded(tmp_path, expected):
  """The header's length is that of CRC32s of ten digits, whatever they are."""
  header_bytes = int.from_bytes(expected[16:24], "little")
  header = expected[32 : 32 + header_bytes]
  Run(tmp_path / "x")
  file = open_kdtr(tmp_path / "x")
  missing = sum(10 - len(str(file.info(name).crc32)) for name in file.names)
  assert missing >= 9  # the empty tensor's is 0
  assert header.endswith(b"}" + b" " * missing)


@pytest.mark.parametrize("kill_at", range(WRITES + 1))
def test_goes_on_after_any_tensor(tmp_path, expected, kill_at):
  path = tmp_path / "x"
  interrupted(path, kill_at)
  run = Run(path)
  assert path.read_bytes() == expected
  assert run.read == list(tensors())[kill_at:]  # and nothing is read twice
  assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


def test_goes_on_again_and_again(tmp_path, expected):
  path = tmp_path / "x"
  for _ in range(WRITES):
    with pytest.raises(Killed):
      Run(path, kill_at=1)
  Run(path)
  assert path.read_bytes() == expected


def test_goes_on_after_sigkill(tmp_path, expected):
  """The operating system takes the process away; nothing is flushed or closed."""
  path = tmp_path / "x"
  code = """
import os, signal, sys
from pathlib import Path
from tests.checkpoint import kdtr_resumable_test as t
class Run(t.Run):
  def _report(self, progress):
    if progress.stage == "write" and progress.name == sys.argv[2]:
      os.kill(os.getpid(), signal.SIGKILL)
Run(Path(sys.argv[1]))
"""
  for name in ("a", "b", "c"):
    process = subprocess.run(
      [sys.executable, "-c", code, str(path), name],
      cwd=Path(__file__).parents[2],
      check=False,
    )
    assert process.returncode == -signal.SIGKILL
    assert not path.exists()
  assert Run(path).read == []
  assert path.read_bytes() == expected


def test_goes_on_after_an_error_of_the_source(tmp_path, expected):
  path = tmp_path / "x"

  def read(name: str) -> Any:
    if name == "b":
      raise OSError(errno.EIO, "the network went away")
    return tensors()[name]

  with pytest.raises(OSError, match="network"):
    Run(path, read=read)
  assert not path.exists()
  assert Run(path).read == ["b", "zeros", "p", "c"]
  assert path.read_bytes() == expected


@pytest.mark.parametrize("keep", [0, 1, 1000, 1500, 2000])
def test_a_truncated_part_is_filled_again(tmp_path, expected, keep):
  path = tmp_path / "x"
  interrupted(path, WRITES)
  os.truncate(part_of(path), keep)
  run = Run(path)
  assert path.read_bytes() == expected
  assert any(p.damaged for p in run.progress)
  assert run.read  # what was cut off


def test_a_missing_part_is_written_again(tmp_path, expected):
  path = tmp_path / "x"
  interrupted(path, WRITES)
  part_of(path).unlink()
  Run(path)
  assert path.read_bytes() == expected


def test_a_flipped_bit_in_the_part_is_noticed_and_repaired(tmp_path, expected):
  path = tmp_path / "x"
  Run(path)
  file = open_kdtr(path)
  infos = [file.info(row.name) for row in ROWS]
  start = len(expected) - (infos[-1].offset + 256)
  path.unlink()
  for info in infos:
    if not info.nbytes:
      continue
    interrupted(path, WRITES)
    with open(part_of(path), "r+b") as part:
      part.seek(start + info.offset + info.nbytes - 1)
      (byte,) = part.read(1)
      part.seek(-1, os.SEEK_CUR)
      part.write(bytes([byte ^ 0x10]))
    run = Run(path)
    assert [p.name for p in run.progress if p.damaged] == [info.name]
    assert run.read == [info.name.removesuffix("_scale")]
    assert path.read_bytes() == expected
    path.unlink()


def test_a_journal_cut_anywhere_is_used_up_to_there(tmp_path, expected):
  path, saved = tmp_path / "x", tmp_path / "saved"
  saved.mkdir()
  interrupted(path, WRITES)
  shutil.move(part_of(path), saved / "part")
  journal = journal_of(path).read_bytes()
  title = journal.index(b"\n") + 1
  for cut in range(0, len(journal), 4):
    shutil.copy(saved / "part", part_of(path))
    journal_of(path).write_bytes(journal[:cut] + b"\0" * (cut % 3))
    if cut < title:  # Nothing says any more what the part is.
      with pytest.raises(KdtrError, match="has no journal"):
        Run(path)
      assert part_of(path).read_bytes() == (saved / "part").read_bytes()
    Run(path, restart=cut < title)
    assert path.read_bytes() == expected
    path.unlink()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"identity": IDENTITY | {"source": "cd"}}, "source 'ab', now 'cd'"),
    ({"identity": IDENTITY | {"dtype": "float32"}}, "dtype 'bfloat16', now 'float32'"),
    ({"config": {"kind": "other"}}, "other config, metadata or tensors"),
    ({"metadata": {}}, "other config, metadata or tensors"),
    ({"rows": ROWS[::-1]}, "other config, metadata or tensors"),
  ],
)
def test_a_part_of_something_else_is_refused(tmp_path, expected, changes, message):
  path = tmp_path / "x"
  interrupted(path, 3)
  before = part_of(path).read_bytes(), journal_of(path).read_bytes()
  with pytest.raises(KdtrError, match=message) as error:
    Run(path, **changes)
  assert str(part_of(path)) in str(error.value)
  assert (part_of(path).read_bytes(), journal_of(path).read_bytes()) == before
  if "rows" not in changes:
    Run(path, restart=True, **changes)
    assert (path.read_bytes() == expected) == ("identity" in changes)


def test_somebody_elses_part_is_not_deleted(tmp_path, expected):
  path = tmp_path / "x"
  part_of(path).write_bytes(b"a download")
  with pytest.raises(KdtrError, match="x.part: .*has no journal.*--restart"):
    Run(path)
  assert [p.name for p in tmp_path.iterdir()] == ["x.part"]
  assert part_of(path).read_bytes() == b"a download"
  Run(path, restart=True)
  assert path.read_bytes() == expected


def test_restart_reads_everything_again(tmp_path, expected):
  path = tmp_path / "x"
  interrupted(path, 5)
  run = Run(path, restart=True)
  assert run.read == list(tensors())
  assert path.read_bytes() == expected


def test_two_writers_of_one_file(tmp_path):
  pytest.importorskip("fcntl")
  path = tmp_path / "x"

  def read(name: str) -> Any:
    with pytest.raises(BlockingIOError, match="another process is writing"):
      Run(path)
    return tensors()[name]

  Run(path, read=read)
  assert path.exists()


def test_a_writer_that_waited_for_the_lock_looks_again(tmp_path, monkeypatch):
  """Between its opening the journal and locking it, another process finishes."""
  pytest.importorskip("fcntl")
  path, lock = tmp_path / "x", kdtr_resumable._lock

  def finish(file: Any, journal: Path) -> None:
    monkeypatch.setattr(kdtr_resumable, "_lock", lock)
    journal.unlink()
    path.write_bytes(b"whole")
    lock(file, journal)

  def read(name: str) -> Any:  # A third process finds the journal locked.
    with pytest.raises(BlockingIOError, match="another process is writing"):
      Run(path)
    return tensors()[name]

  monkeypatch.setattr(kdtr_resumable, "_lock", finish)
  with pytest.raises(FileExistsError, match="x exists; overwrite=True"):
    Run(path, overwrite=False)
  assert path.read_bytes() == b"whole"
  assert [p.name for p in tmp_path.iterdir()] == ["x"]
  monkeypatch.setattr(kdtr_resumable, "_lock", finish)
  Run(path, read=read)
  assert path.read_bytes() != b"whole"


def test_the_journal_is_locked_until_it_is_gone(tmp_path, monkeypatch):
  fcntl = pytest.importorskip("fcntl")
  unlink, locked = Path.unlink, []

  def watch(path: Path, missing_ok: bool = False) -> None:
    if path == journal_of(tmp_path / "x"):
      with open(path, "rb") as file:
        try:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
          locked.append(False)
        except BlockingIOError:
          locked.append(True)
    unlink(path, missing_ok)

  monkeypatch.setattr(Path, "unlink", watch)
  Run(tmp_path / "x")
  assert locked == [True]


def test_damage_after_writing_is_found_by_the_check(tmp_path, expected):
  path = tmp_path / "x"

  def flip(progress: Progress) -> None:
    if progress.stage == "check" and progress.name == "q":
      with open(part_of(path), "r+b") as part:
        part.seek(len(expected) - 200)  # inside of "c"
        part.write(b"\xff\xff")

  with pytest.raises(KdtrError, match="tensor 'c'.crc32"):
    Run(path, progress=flip)
  assert not path.exists()
  assert Run(path).read == ["c"]
  assert path.read_bytes() == expected


@pytest.mark.parametrize("call", range(1, 16))
def test_disk_errors_leave_nothing_under_the_name(
  tmp_path, expected, monkeypatch, call
):
  """The disk is full at the n-th flush or synchronisation of the part."""
  path = tmp_path / "x"
  calls = 0
  real_open = open

  def flaky_open(name, mode="r", *rest):
    file = real_open(name, mode, *rest)
    if not str(name).endswith(".part") or "+" not in mode:
      return file

    class Flaky:
      def __getattr__(self, attribute):
        return getattr(file, attribute)

      def __enter__(self):
        return self

      def __exit__(self, *exc):
        file.close()

      def write(self, data):
        nonlocal calls
        calls += 1
        if calls == call:
          file.write(memoryview(data)[: len(data) // 2])
          raise OSError(errno.ENOSPC, "No space left on device")
        return file.write(data)

    return Flaky()

  monkeypatch.setattr(kdtr_resumable, "open", flaky_open, raising=False)
  try:
    Run(path)
    failed = False
  except OSError as error:
    assert error.errno == errno.ENOSPC
    failed = True
  assert failed == (call <= len(ROWS) + 2)  # and preamble and header
  assert path.exists() != failed
  monkeypatch.undo()
  Run(path)
  assert path.read_bytes() == expected


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failed_synchronisation_leaves_nothing_under_the_name(
  tmp_path, expected, monkeypatch, call
):
  """Of the journal's title, of its name, of the part."""
  path, calls = tmp_path / "x", []

  def fail(descriptor: int) -> None:
    calls.append(os.fstat(descriptor).st_size)
    if len(calls) == call:
      raise OSError(errno.EIO, "Input/output error")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
      Run(path)
  assert call < 3 or calls[-1] == len(expected)
  assert not path.exists()
  Run(path)
  assert path.read_bytes() == expected


def test_too_little_space_is_said_before_anything_is_read(tmp_path, monkeypatch):
  usage = shutil._ntuple_diskusage(10**6, 10**6 - 100, 100)  # type: ignore[attr-defined]
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  with pytest.raises(OSError, match="bytes are needed, 100 are free") as error:
    Run(tmp_path / "x", read=None)
  assert error.value.errno == errno.ENOSPC
  assert not (tmp_path / "x").exists() and not part_of(tmp_path / "x").exists()


def test_a_value_that_is_not_the_row(tmp_path):
  path = tmp_path / "x"
  with pytest.raises(KdtrError, match=r"tensor 'a'.*f64 \[5, 7\]"):
    Run(path, read=lambda name: np.zeros((5, 7)))
  assert not path.exists()


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path, expected):
  path = tmp_path / "x"
  path.write_bytes(b"old")
  with pytest.raises(Killed):
    Run(path, kill_at=4)
  assert path.read_bytes() == b"old"
  Run(path)
  assert path.read_bytes() == expected
