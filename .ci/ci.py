#!/usr/bin/env python3
"""Everything that must hold before a change lands, from an empty environment.

Copies the tracked files into a temporary folder and runs there, in order: the demo
of the README, the installation of the README's test command, formatter, linter, type
checker, a check of the wheel's content, the checker of the CUDA kernels, and last the
README's tests. Both installations must have built the CUDA custom calls where the build
finds an nvcc. The README's commands are taken from README.md itself: each is the first
fenced block after a line `<!-- ci: demo -->` or `<!-- ci: test -->`. Steps of a block
are separated by ` && ` or by line ends.

Exit status: 0 where all steps passed, 1 otherwise.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from typing import NoReturn

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 15 * 60
# -P: the installed package is meant, not the folder.
CHECK_LIBRARY = ".venv/bin/python -P .ci/check_library.py"
LEFT_OUT = 3  # Its exit status where the build found no nvcc.
BUILD = pathlib.Path("build", "ci")
# One that can be had without CUDA's libraries, which are some gigabytes.
TORCH = "torch==2.13.0"
DEADLINE = time.monotonic() + LIMIT_S


def fail(message: str) -> NoReturn:
  """Ends the run with exit status 1."""
  print(f"ci: FAILED: {message}", flush=True)
  sys.exit(1)


def run(command: str, folder: pathlib.Path, also_fine: int = 0) -> int:
  """Runs one step, prints its time and peak memory, and stops at the first failure.

  Returns:
    The exit status: 0 or `also_fine`.
  """
  print(f"\nci: $ {command}", flush=True)
  start = time.monotonic()
  process = subprocess.Popen(
    ["bash", "-c", command],
    cwd=folder,
    stdin=subprocess.DEVNULL,
    # Kept, so that the checker is linked to kernels that are compiled already.
    env={**os.environ, "PIP_QUIET": "1", "SKBUILD_BUILD_DIR": str(folder / BUILD)},
    start_new_session=True,
  )
  signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
  signal.alarm(max(1, round(DEADLINE - start)))
  try:
    _, status, usage = os.wait4(process.pid, 0)
  except BaseException:  # Interrupted or terminated: leave nothing running.
    os.killpg(process.pid, signal.SIGKILL)
    raise
  signal.alarm(0)
  process.returncode = os.waitstatus_to_exitcode(status)
  if time.monotonic() >= DEADLINE:
    fail(f"more than {LIMIT_S} s in all; stopped in: {command}")
  if process.returncode not in (0, also_fine):
    fail(f"exit status {process.returncode}: {command}")
  if "pytest" not in command:  # pytest's closing line is the last of the run.
    seconds, mib = time.monotonic() - start, usage.ru_maxrss // 1024
    print(f"ci: {seconds:.0f} s, at most {mib} MiB", flush=True)
  return process.returncode


def readme_steps(folder: pathlib.Path, marker: str) -> list[str]:
  """Commands of the README's fenced block that follows the marker."""
  pattern = rf"^<!-- ci: {marker} -->\s*^```\w*\n(.*?)^```"
  blocks = re.findall(pattern, (folder / "README.md").read_text(), re.M | re.S)
  if len(blocks) != 1:
    fail(
      f"README.md has {len(blocks)} fenced blocks after <!-- ci: {marker} -->, not 1"
    )
  lines = blocks[0].replace("\\\n", " ").splitlines()
  steps = [step.strip() for line in lines for step in line.split(" && ")]
  return [step for step in steps if step and not step.startswith("#")]


def copy_tracked_files(folder: pathlib.Path) -> None:
  """Tracked files only, so that one that was never added is missed here."""
  listing = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True
  )
  for name in listing.stdout.decode().split("\0"):
    source, target = ROOT / name, folder / name
    if name and source.is_file():
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(source, target)


def check_wheel(folder: pathlib.Path, wheels: pathlib.Path) -> None:
  """A wheel without CUDA holds each file of the package, data too, and nothing else."""
  run(f"KDT_CUDA=OFF .venv/bin/pip wheel --no-deps --wheel-dir {wheels} .", folder)
  (wheel,) = wheels.glob("*.whl")
  packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
  wanted = {
    path.relative_to(folder).as_posix()
    for path in (folder / "kdtree_jax").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
  }
  if packed != wanted:
    fail(f"wheel lacks {sorted(wanted - packed)}, has too {sorted(packed - wanted)}")
  if not wheel.name.endswith("-py3-none-any.whl"):
    fail(f"{wheel.name} is not for every platform")
  print(f"ci: {wheel.name}: {len(packed)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def extra(folder: pathlib.Path, name: str) -> str:
  """The packages of an extra; `pip install .[name]` would build again."""
  project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
  return shlex.join(project["optional-dependencies"][name])


def main() -> None:
  """Runs all steps."""
  signal.signal(signal.SIGTERM, lambda *_: fail("terminated"))
  with tempfile.TemporaryDirectory(prefix="kdtree_jax_ci_") as temp:
    folder = pathlib.Path(temp, "checkout")
    copy_tracked_files(folder)
    *install, pytest = readme_steps(folder, "test")
    if "pytest" not in pytest or not install:
      fail("README.md's test block must install first and end with pytest")

    # The demo comes first: it has to work without the packages that the tests add.
    for step in readme_steps(folder, "demo"):
      run(step, folder)
    # The build itself says whether it found an nvcc; it looks in several places.
    built = run(CHECK_LIBRARY, folder, also_fine=LEFT_OUT) != LEFT_OUT
    if not built:
      print("ci: so nothing about the CUDA custom calls is checked", flush=True)

    for step in install:
      run(step, folder)
    if built:
      run(CHECK_LIBRARY, folder)
    run(f".venv/bin/pip install {extra(folder, 'dev')}", folder)
    run(".venv/bin/ruff format --check", folder)
    run(".venv/bin/ruff check", folder)
    run(".venv/bin/pyright", folder)
    check_wheel(folder, pathlib.Path(temp, "wheels"))
    if built:
      run(f"cmake --build {BUILD} --target kdtr_check", folder)
    run(f".venv/bin/pip install {TORCH} {extra(folder, 'parity')}", folder)
    run(pytest, folder)


if __name__ == "__main__":
  main()
