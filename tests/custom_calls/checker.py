"""Builds and runs the checker `kdtr_check` for the tests."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "custom_calls" / "check"

# What needs no CUDA: --list and --help.
_HOST = ("kdtr_check.cc", "list.cc", "kdtr.cc", "json.cc")
# What runs cases, without the ops.
_RUNNER = ("run_cases.cc", "golden_case.cc", "buffers.cc", "compare.cc")

_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def temporary_folder(prefix: str) -> Path:
  """A new folder that is gone when Python ends."""
  folder = Path(tempfile.mkdtemp(prefix=prefix))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return folder


def _runs(program: Path) -> bool:
  try:
    done = subprocess.run([program, "--help"], capture_output=True, check=False)
  except OSError:
    return False
  return done.returncode == 0


def _compile(sources: Sequence[str | Path], *arguments: str) -> Path | None:
  """A program under address and undefined-behaviour sanitizers, where there are any.

  None where there is no compiler.
  """
  compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
  if compiler is None:
    return None
  program = temporary_folder("kdtr_check") / "kdtr_check"
  command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
  command += [*map(str, sources), "-o", str(program), *arguments]
  done = None
  for extra in (_SANITIZE, ()):
    done = subprocess.run(
      [*command, *extra], cwd=SOURCES, capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and _runs(program):
      return program
  raise AssertionError(f"the checker does not compile:\n{done and done.stderr}")


@functools.cache
def host_checker() -> Path | None:
  """The checker without CUDA; None where there is no compiler."""
  return _compile(_HOST, "-DKDTR_CHECK_HOST_ONLY")


@functools.cache
def fake_checker() -> Path | None:
  """The checker over `fake_gpu.cc`; None without a compiler or CUDA's headers."""
  if (include := cuda_headers()) is None:
    return None
  here = Path(__file__).parent
  sources = [*_HOST, *_RUNNER, "accept_tree_case.cc", here / "fake_gpu.cc"]
  return _compile(sources, "-I..", "-I.", "-isystem", str(include))


def cuda_headers() -> Path | None:
  """The folder of cuda_runtime_api.h; None where there is none."""
  nvcc = shutil.which("nvcc")
  homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
  pip = os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu13")
  for home in [*homes, "/usr/local/cuda", pip]:
    if home and (Path(home) / "include" / "cuda_runtime_api.h").exists():
      return Path(home) / "include"
  return None


@functools.cache
def full_checker() -> Path | None:
  """The checker with kernels: $KDTR_CHECK, or the newest one under build/.

  One that is older than its sources does not count.
  """
  if named := os.environ.get("KDTR_CHECK"):
    return Path(named).absolute()

  def age(path: Path) -> float:
    return path.stat().st_mtime

  built = max((ROOT / "build").glob("*/check/kdtr_check"), key=age, default=None)
  if built is None or age(built) < max(map(age, SOURCES.glob("*.[ch]*"))):
    return None
  return built


def run(
  program: Path, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
  """Runs the checker; a sanitizer's report fails the caller."""
  done = subprocess.run(
    [program, *arguments],
    cwd=cwd,
    env={**os.environ, **environment},
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
