"""The compiled library: its architectures, and what each kernel takes on each.

No GPU is needed, so this is where code for sm_120 is checked. CUDA's cuobjdump and
nvdisasm read the binary; `pip install '.[test]'` brings them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator

import pytest

from kdtree_jax.ops import _library

SOURCES = pathlib.Path(__file__).parents[2] / "custom_calls"
ARCHITECTURES = ("sm_90a", "sm_120")
# Of a block of either architecture, static and dynamic, with the 1 KB that the system
# takes: 99 KB + 1 KB, all that an SM of sm_120 has.
MOST_SHARED_MEMORY = 100 * 1024
# Kernels for sm_90a alone, which are empty on others. A block there may have 227 KB.
HOPPER = {"TreeAttentionHopperKernel", "TreeAttentionHopperSplitKernel"}
MOST_SHARED_MEMORY_OF_HOPPER = 228 * 1024
# Bytes of stack of a thread. 40 are what CUDA's sin and cos of huge doubles need; a
# few registers' worth of spilled values is no matter.
MOST_STACK = 64
# Instructions of another family's matrix units: sm_90's and sm_100's.
FOREIGN = re.compile(r"\b(HGMMA|IGMMA|QGMMA|BGMMA|WARPGROUP|UTC\w*MMA\w*)\b")

FOLDERS = (
  os.environ.get("PATH", ""),
  os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin"),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One instance of a kernel for one architecture."""

  architecture: str
  name: str
  symbol: str
  registers: int
  stack: int
  shared: int
  local: int


def dump(*flags: str) -> str:
  """What cuobjdump prints about the library."""
  try:
    _library.build_info()
  except _library.UnusableError as error:
    pytest.skip(str(error))
  path = os.pathsep.join(FOLDERS)
  for tool in ("cuobjdump", "nvdisasm"):
    if shutil.which(tool, path=path) is None:
      pytest.skip(f"needs CUDA's {tool}: pip install nvidia-cuda-{tool}")
  done = subprocess.run(
    [shutil.which("cuobjdump", path=path) or "", *flags, str(_library.find())],
    env={**os.environ, "PATH": path},
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout


@functools.cache
def kernels() -> list[Kernel]:
  found = []
  architecture = symbol = ""
  for line in dump("-res-usage").splitlines():
    if match := re.match(r"arch = (\w+)", line):
      architecture = match[1]
    elif match := re.match(r" Function (\w+):", line):
      symbol = match[1]
    elif match := re.match(r"\s+REG:", line):
      usage = {k: int(v) for k, v in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}
      (name,) = re.findall(r"\d([A-Z][A-Za-z]*Kernel)", symbol)
      found.append(
        Kernel(
          architecture,
          name,
          re.sub(r"_GLOBAL__N__\w+?_cu_[0-9a-f]{8}", "", symbol),
          registers=usage["REG"],
          stack=usage["STACK"],
          shared=usage["SHARED"],
          local=usage["LOCAL"],
        )
      )
  assert found
  return found


def test_code_is_there_for_both_architectures_and_nothing_else() -> None:
  info = _library.build_info()
  code = dump("-lelf")
  inside = collections.Counter(re.findall(r"\.(sm_\w+)\.cubin", code))
  assert set(inside) == set(info.architectures)
  assert info.ptx or not re.search(r"\.ptx\b", dump("-lptx"))
  if info.architectures != ARCHITECTURES:
    pytest.skip(f"built for {info.architectures}, not as by default")
  assert not info.ptx
  # Each source file, once for either.
  assert inside["sm_90a"] == inside["sm_120"] == len(list(SOURCES.glob("*.cu")))


def test_every_kernel_is_there_for_every_architecture() -> None:
  by_architecture = collections.defaultdict(list)
  for kernel in kernels():
    by_architecture[kernel.architecture].append(kernel.symbol)
  first, *others = (sorted(symbols) for symbols in by_architecture.values())
  assert all(symbols == first for symbols in others)


def test_no_kernel_takes_more_than_there_is() -> None:
  dynamic = _library.build_info().dynamic_shared_memory
  for kernel in kernels():
    assert kernel.registers <= 255, kernel
    assert kernel.local == 0, kernel
    shared = kernel.shared + dynamic.get(kernel.name, 0)
    if kernel.name in HOPPER:
      assert kernel.stack == 0, kernel
      assert shared <= MOST_SHARED_MEMORY_OF_HOPPER, kernel
      # This is how the launcher tells whether the code is there.
      assert (kernel.registers > 64) == (kernel.architecture == "sm_90a"), kernel
    else:
      assert kernel.stack <= MOST_STACK, kernel
      assert shared <= MOST_SHARED_MEMORY, kernel


def test_code_for_sm_120_has_no_instruction_of_another_family() -> None:
  if "sm_120" not in _library.build_info().architectures:
    pytest.skip("the library has no code for sm_120")
  text = dump("-sass", "-arch", "sm_120")
  assert text.count("\t\tFunction : ") == sum(
    kernel.architecture == "sm_120" for kernel in kernels()
  )
  assert not FOREIGN.search(text)


def test_no_arrival_passes_loads_under_way() -> None:
  """At a barrier, of a cluster too, after which others may overwrite what was loaded.

  An arrival does not wait for loads from shared memory before it; see `WaitForLoads` in
  custom_calls/mma.cuh. compute-sanitizer does not find where it should.
  """
  for architecture in _library.build_info().architectures:
    arrivals = list(loads_at_arrivals(dump("-sass", "-arch", architecture)))
    passed = [(symbol, loads) for symbol, loads in arrivals if loads]
    assert not passed, passed[:3]
    # The reader understands the code: there are kernels that arrive.
    assert len(arrivals) > 50


def loads_at_arrivals(text: str) -> Iterator[tuple[str, list[str]]]:
  """Each arrival's kernel, and the loads of shared memory that may be under way then.

  An instruction takes 16 bytes. From bit 105 on they say what it waits for and what it
  tells, as for all architectures since Volta: 4 bits to stall, 1 to yield, the counter
  of its results and that of its operands with 3 bits each (7: none), and a bit for each
  of the 6 counters that it waits for. Instructions are read in their order: a load
  that a jump backwards takes along is not seen.
  """
  symbol = instruction = ""
  loads: dict[int, str] = {}  # by counter
  for line in text.splitlines():
    if match := re.match(r"\s+Function : (\w+)", line):
      symbol = match[1]
      loads.clear()
    elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+([^;]*?)\s*;", line):
      instruction = match[1]
    elif (match := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)) and instruction:
      control = int(match[1], 16) >> 41
      for counter in [c for c in loads if control >> 11 >> c & 1]:
        del loads[counter]
      # Of a block's own shared memory, and of another's.
      if re.search(r"\b(LDS|LDSM|LD)\b", instruction) and (control >> 5 & 7) < 7:
        loads[control >> 5 & 7] = instruction
      if re.search(r"SYNCS\.ARRIVE|CGABAR_ARV", instruction):
        yield symbol, list(loads.values())
      if re.match(r"(BRA|EXIT|RET)\b", instruction):
        loads.clear()  # What follows is reached from elsewhere.
      instruction = ""


def test_dynamic_shared_memory_is_declared() -> None:
  """For each kernel that has some, and only for kernels that exist."""
  declared = _library.build_info().dynamic_shared_memory
  assert set(declared) <= {kernel.name for kernel in kernels()}
  for source in SOURCES.glob("*.cu"):
    text = source.read_text()
    names = re.findall(r"KDT_(?:DYNAMIC|HOPPER)_SHARED_MEMORY\((\w+),", text)
    assert len(names) == text.count("extern __shared__"), source.name
    assert set(names) <= set(declared), source.name
