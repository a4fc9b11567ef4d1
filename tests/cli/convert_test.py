"""kdtree-convert as a user runs it: both directions, interruptions, bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kdtree_jax
from kdtree_jax.checkpoint import open_kdtr
from kdtree_jax.checkpoint.hf.convert import convert_hf
from kdtree_jax.checkpoint.hf.export import export_hf

DEMO = Path(kdtree_jax.__file__).parent / "demo"


def run(*args: str, expect: int = 0) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "kdtree_jax.cli.convert", *args]
  done = subprocess.run(command, capture_output=True, text=True, timeout=600)
  assert done.returncode == expect, done.stderr
  assert "Traceback" not in done.stderr
  return done


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("demo") / "hf"
  export_hf(DEMO / "target.kdtr", folder)
  return folder


def test_there_and_back(directory, tmp_path):
  path = tmp_path / "x.kdtr"
  done = run(f"--source={directory}", f"--out={path}")
  fingerprint = open_kdtr(DEMO / "target.kdtr").fingerprint
  assert f"fingerprint {fingerprint}" in done.stdout
  assert "every CRC32 checked" in done.stdout
  back = tmp_path / "back"
  done = run(f"--source={path}", f"--out={back}", "--max_shard_gb=0.004")
  assert "model-00001-of-00003.safetensors" in done.stdout
  assert "tokenizer.json" in done.stdout


def test_killed_and_run_again(directory, tmp_path):
  """A process that ends at once, in the middle; then the command, with a flip."""
  path = tmp_path / "x.kdtr"
  code = """
import os, signal, sys
from kdtree_jax.checkpoint.hf.convert import convert_hf
def progress(report):
  if report.stage == "write" and report.done > report.total // 2:
    os.kill(os.getpid(), signal.SIGKILL)
convert_hf(sys.argv[1], sys.argv[2], progress=progress)
"""
  command = [sys.executable, "-c", code, str(directory), str(path)]
  assert subprocess.run(command).returncode == -signal.SIGKILL
  part = path.with_name("x.kdtr.part")
  assert part.exists() and not path.exists()
  done = run(f"--source={directory}", f"--out={path}", "--dtype=float32", expect=2)
  assert "dtype 'bfloat16', now 'float32'" in done.stderr
  assert "--restart" in done.stderr
  with open(part, "r+b") as file:
    file.seek(200_000)
    byte = file.read(1)
    file.seek(200_000)
    file.write(bytes([byte[0] ^ 1]))
  done = run(f"--source={directory}", f"--out={path}")
  assert "damaged in the part, written again: model.embed_tokens.weight" in done.stderr
  convert_hf(directory, tmp_path / "whole")
  assert path.read_bytes() == (tmp_path / "whole").read_bytes()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["whole", "x.kdtr"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_it(directory, tmp_path, name):
  """Of a directory nothing is left, of a file what the next run goes on from."""
  code = """
import os, signal, sys
from kdtree_jax.cli import convert
update = convert._Bar.update
def stop(bar, stage, done, total):
  update(bar, stage, done, total)
  if done > total // 2:
    os.kill(os.getpid(), getattr(signal, os.environ["STOP"]))
convert._Bar.update = stop
convert.run()
"""
  for source, out, says, left in (
    (DEMO / "target.kdtr", "d", "stopped", []),
    (
      directory,
      "x.kdtr",
      "stopped; the same command goes on from here",
      ["x.kdtr.part", "x.kdtr.part.journal"],
    ),
  ):
    flags = [f"--source={source}", f"--out={tmp_path / out}"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(
      command,
      capture_output=True,
      text=True,
      timeout=600,
      env=os.environ | {"STOP": name},
    )
    assert done.returncode == 130
    assert done.stderr.splitlines() == [says]
    assert sorted(p.name for p in tmp_path.iterdir()) == left


def test_a_part_with_much_damage_is_described_in_few_lines(directory, tmp_path):
  path = tmp_path / "x.kdtr"

  def kill(report) -> None:
    if report.stage == "check":
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    convert_hf(directory, path, progress=kill)
  os.truncate(f"{path}.part", 1000)
  done = run(f"--source={directory}", f"--out={path}")
  lines = done.stderr.splitlines()
  assert len(lines) == 6
  assert lines[-1] == f"damaged in the part, written again: {262 - 5} more"
  assert path.exists()


def test_the_bar_of_a_terminal(directory, tmp_path):
  pty = pytest.importorskip("pty")
  ours, theirs = pty.openpty()
  pytest.importorskip("termios").tcsetwinsize(theirs, (24, 100))
  command = [
    *(sys.executable, "-m", "kdtree_jax.cli.convert"),
    *(f"--source={directory}", f"--out={tmp_path / 'x'}"),
  ]
  done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, timeout=600)
  os.close(theirs)
  shown = os.read(ours, 1 << 20).decode()
  os.close(ours)
  assert done.returncode == 0
  assert "writing: 100%" in shown and "checking: 100%" in shown
  assert "10.4M/10.4M" in shown


def test_errors_are_one_line(directory, tmp_path):
  (tmp_path / "exists").write_text("")
  for args, message in (
    ([], "--source is needed"),
    (["--source=x"], "--out is needed"),
    (["--source=/nowhere", "--out=x"], "/nowhere: no such directory or file"),
    (["more", "--source=x", "--out=y"], "unexpected argument 'more'"),
    ([f"--source={directory}", f"--out={tmp_path / 'exists'}"], "--overwrite"),
    ([f"--source={tmp_path}", f"--out={tmp_path / 'x'}"], "config.json"),
    (
      [f"--source={DEMO / 'target.kdtr'}", f"--out={tmp_path / 'd'}", "--restart"],
      "--restart is for --source=DIRECTORY",
    ),
    (
      [f"--source={DEMO / 'target.kdtr'}", f"--out={tmp_path / 'd.kdtr'}"],
      "d.kdtr must not end in .kdtr",
    ),
    (
      [f"--source={DEMO / 'target.kdtr'}", f"--out={tmp_path / 'exists'}"],
      "exists and is a file",
    ),
    (
      [f"--source={DEMO / 'tokenizer.json'}", f"--out={tmp_path / 'd'}"],
      "not a KDTR file",
    ),
  ):
    done = run(*args, expect=2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr
  assert sorted(p.name for p in tmp_path.iterdir()) == ["exists"]
