"""Builds and runs the checker `kdtr_check` for the tests."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "custom_calls" / "check"

# What needs no CUDA: --list and --help.
HOST_SOURCES = ("kdtr_check.cc", "list.cc", "kdtr.cc", "json.cc")

_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def _runs(program: Path) -> bool:
  try:
    done = subprocess.run([program, "--help"], capture_output=True, check=False)
  except OSError:
    return False
  return done.returncode == 0


@functools.cache
def host_checker() -> Path | None:
  """The checker without CUDA, under address and undefined-behaviour sanitizers.

  Without them where the compiler has none; None where there is no compiler.
  """
  compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
  if compiler is None:
    return None
  program = Path(tempfile.mkdtemp(prefix="kdtr_check")) / "kdtr_check"
  command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
  command += ["-DKDTR_CHECK_HOST_ONLY", *HOST_SOURCES, "-o", str(program)]
  for extra in (_SANITIZE, ()):
    done = subprocess.run(
      [*command, *extra], cwd=SOURCES, capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and _runs(program):
      return program
  raise AssertionError(f"the checker does not compile:\n{done.stderr}")


@functools.cache
def full_checker() -> Path | None:
  """The checker with kernels: $KDTR_CHECK, or the newest one under build/."""
  if named := os.environ.get("KDTR_CHECK"):
    return Path(named).absolute()
  built = (ROOT / "build").glob("*/check/kdtr_check")
  return max(built, key=lambda p: p.stat().st_mtime, default=None)


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
  """Runs the checker; a sanitizer's report fails the caller."""
  done = subprocess.run(
    [program, *arguments],
    cwd=cwd,
    capture_output=True,
    check=False,
    encoding="utf-8",
    errors="surrogateescape",
  )
  assert done.returncode in (0, 1, 2), done.stderr
  assert "Sanitizer" not in done.stderr, done.stderr
  assert "runtime error" not in done.stderr, done.stderr
  return done


def verdicts(
  program: Path, folder: Path, names: Sequence[str]
) -> dict[str, str | None]:
  """What `--list --quiet` says of each file: None where it is right, else the error."""
  found: dict[str, str | None] = {}
  for begin in range(0, len(names), 1000):
    batch = names[begin : begin + 1000]
    done = run(program, "--list", "--quiet", *batch, cwd=folder)
    for line in done.stdout.split("\n")[:-1]:
      found[line.split(": ")[0]] = None
    errors = done.stderr.split("\n")[:-1]
    for line in errors:
      name, _, error = line.partition(": ")
      assert name not in found, line
      found[name] = error
    assert done.returncode == (1 if errors else 0)
  assert sorted(found) == sorted(names)
  return found
