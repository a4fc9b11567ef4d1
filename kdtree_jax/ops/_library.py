"""The shared library of CUDA custom calls: found, checked and registered once, lazily.

The library is plain ctypes: each handler is a C symbol that JAX takes as a
capsule. It is loaded when an op first asks for it, never at import, and loading
it needs no GPU, so that programs for CUDA can be lowered anywhere.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import struct
from typing import Any

import jax

import kdtree_jax

LIBRARY = "libkdtree_jax.so"
REINSTALL = (
  "reinstall kdtree_jax from its source folder: "
  "pip install --force-reinstall --no-deps ."
)

# What handlers are called with: their arguments, results and attributes. Raise it with
# each change of these in `custom_calls/*_ffi.cc`; CMake reads it from this line. A
# library of another number is refused, instead of being called with what it does not
# expect.
INTERFACE = 4

# XLA target -> symbol of the handler.
TARGETS = {
  "kdtree_jax.accept_tree": "KdtreeAcceptTree",
  "kdtree_jax.add_rms_norm": "KdtreeAddRmsNorm",
  "kdtree_jax.ancestors": "KdtreeTreeAncestors",
  "kdtree_jax.build_tree": "KdtreeBuildTree",
  "kdtree_jax.compact": "KdtreeCompact",
  "kdtree_jax.best_token": "KdtreeBestToken",
  "kdtree_jax.token_log_probs": "KdtreeTokenLogProbs",
  "kdtree_jax.emit": "KdtreeEmit",
  "kdtree_jax.grouped_matmul": "KdtreeGroupedMatmul",
  "kdtree_jax.head_matmul": "KdtreeHeadMatmul",
  "kdtree_jax.log_softmax_topk": "KdtreeLogSoftmaxTopK",
  "kdtree_jax.matmul": "KdtreeMatmul",
  "kdtree_jax.matmul_chain": "KdtreeMatmulChain",
  "kdtree_jax.tree_attention": "KdtreeTreeAttention",
  "kdtree_jax.tree_from_table": "KdtreeTreeFromTable",
  "kdtree_jax.rms_norm": "KdtreeRmsNorm",
  "kdtree_jax.route": "KdtreeRoute",
  "kdtree_jax.routed_experts": "KdtreeRoutedExperts",
  "kdtree_jax.rope": "KdtreeRope",
  "kdtree_jax.rope_keys": "KdtreeRopeKeys",
  "kdtree_jax.rope_queries": "KdtreeRopeQueries",
}


class UnusableError(Exception):
  """Why the library cannot be used."""


@dataclasses.dataclass(frozen=True)
class BuildInfo:
  """What the library was built from and for: `custom_calls/build_info.cc`.

  Attributes:
    version: of kdtree_jax.
    interface: `INTERFACE` of its sources.
    cuda: version of nvcc.
    architectures: of the compiled code, "sm_90a" and the like.
    ptx: of the intermediate code, "compute_90" and the like; usually none.
    jaxlib: version of the jaxlib whose headers were used.
    ffi_api: major and minor version of XLA's FFI in these headers.
    dynamic_shared_memory: most bytes that a kernel is launched with, by its name.
  """

  version: str
  interface: int
  cuda: str
  architectures: tuple[str, ...]
  ptx: tuple[str, ...]
  jaxlib: str
  ffi_api: tuple[int, int]
  dynamic_shared_memory: dict[str, int]

  def runs_on(self, capability: str) -> bool:
    """Whether there is code for a GPU of a compute capability such as "9.0"."""
    gpu = int(capability.replace(".", ""))
    for name in (*self.architectures, *self.ptx):
      kind, rest = name.split("_")
      suffix = rest.lstrip("0123456789")
      built = int(rest.removesuffix(suffix))
      same_major = gpu // 10 == built // 10
      if suffix == "a":  # For one chip alone.
        fits = gpu == built
      elif kind == "sm" or suffix == "f":  # For later chips of the same major version.
        fits = same_major and gpu >= built
      else:
        fits = gpu >= built
      if fits:
        return True
    return False


def find() -> pathlib.Path | None:
  """Path of the library, or None where it was not built.

  Of several, the one built last: an editable installation has one in site-packages,
  and `cmake --install` may have put another into the source tree.
  """
  paths = [path for path in _candidates(LIBRARY) if path.is_file()]
  return max(paths, key=lambda path: path.stat().st_mtime, default=None)


@functools.cache
def build_info() -> BuildInfo:
  """What the library tells about itself.

  Raises:
    UnusableError: there is none, or it belongs to other sources.
  """
  return _read_build_info(_open())


@functools.cache
def why_not() -> str | None:
  """Loads and registers the library; returns why it cannot be used, or None."""
  try:
    library = _open()
    _check(_read_build_info(library))
    handlers = {target: _symbol(library, name) for target, name in TARGETS.items()}
  except UnusableError as error:
    return str(error)
  for target, handler in handlers.items():
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="CUDA")
  return None


@functools.cache
def why_not_on(device: Any) -> str | None:
  """Why the library, usable otherwise, has no code for a GPU; None where it has."""
  capability = getattr(device, "compute_capability", "")
  info = build_info()
  # Another maker's GPU says nothing of the kind, and gets the XLA form anyway.
  if not re.fullmatch(r"\d+\.\d", str(capability)) or info.runs_on(capability):
    return None
  number = capability.replace(".", "")
  return (
    f"the library of CUDA custom calls has no code for {device.device_kind} (compute "
    f"capability {capability}, sm_{number}); it was built for "
    f"{', '.join((*info.architectures, *info.ptx))}. Build it for this GPU too: "
    f"pip install --force-reinstall --no-deps . -C cmake.define."
    f"CMAKE_CUDA_ARCHITECTURES='90a-real;120-real;{number}-real'"
  )


def _candidates(name: str) -> list[pathlib.Path]:
  # Not beside __file__ alone: in an editable installation the package has a second
  # folder, in site-packages, with what was built.
  return [pathlib.Path(folder, "_lib", name) for folder in kdtree_jax.__path__]


def _open() -> ctypes.CDLL:
  path = find()
  if path is None:
    notes = [note for note in _candidates("not_built.txt") if note.is_file()]
    why = (
      notes[0].read_text().strip()
      if notes
      else "this installation was made with KDT_CUDA=OFF, or has lost it, or Python "
      "was started in the source folder, whose kdtree_jax hides an installed one. "
      "Start it elsewhere, or install with -e; or without "
      f"KDT_CUDA=OFF, {REINSTALL}"
    )
    raise UnusableError(f"the library of CUDA custom calls was not built: {why}")
  if _is_cut_short(path):
    raise UnusableError(
      f"{path} is cut short: its {path.stat().st_size} bytes are not all; {REINSTALL}"
    )
  try:
    return ctypes.CDLL(str(path))
  except OSError as error:
    reason = str(error).removeprefix(f"{path}: ")
    raise UnusableError(f"{path} cannot be loaded: {reason}; {REINSTALL}") from error


def _is_cut_short(path: pathlib.Path) -> bool:
  """Whether a shared object lacks its end, which would end the process when loaded."""
  with path.open("rb") as file:
    head = file.read(64)
  if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
    return False  # Something else: the loader says what.
  # ELF-64: the table of sections lies behind all else.
  (table,) = struct.unpack_from("<Q", head, 0x28)
  size, count = struct.unpack_from("<HH", head, 0x3A)
  return path.stat().st_size < table + size * count


def _symbol(library: ctypes.CDLL, name: str) -> Any:
  try:
    return getattr(library, name)
  except AttributeError as error:
    raise UnusableError(
      f"{library._name} lacks {name}: it was built from other sources; {REINSTALL}"
    ) from error


def _read_build_info(library: ctypes.CDLL) -> BuildInfo:
  """What a library says of itself, where it belongs to these sources.

  Raises:
    UnusableError: it belongs to others, or says nothing that can be read.
  """
  function = _symbol(library, "kdtree_jax_build_info")
  function.restype = ctypes.c_char_p
  text = function()
  try:
    fields = json.loads(text)
    version, interface = fields["version"], fields.get("interface")
  except (TypeError, ValueError, KeyError, AttributeError) as error:
    raise _of_other_sources(library, f"its build information is {text!r}") from error
  # Before anything else is read: other versions have other fields.
  if version != kdtree_jax.__version__:
    raise UnusableError(
      f"the library of CUDA custom calls belongs to kdtree_jax {version}, but "
      f"this is {kdtree_jax.__version__}; {REINSTALL}"
    )
  if interface != INTERFACE:
    raise _of_other_sources(library, f"its interface is {interface}, not {INTERFACE}")
  try:
    for name in ("architectures", "ptx", "ffi_api"):
      fields[name] = tuple(fields[name])
    return BuildInfo(**fields)
  except (TypeError, KeyError) as error:
    raise _of_other_sources(library, f"its build information has {error}") from error


def _of_other_sources(library: ctypes.CDLL, why: str) -> UnusableError:
  return UnusableError(
    f"{library._name} was built from other sources ({why}); {REINSTALL}"
  )


def _check(info: BuildInfo) -> None:
  """Raises UnusableError where a library does not fit this jaxlib."""
  known, jaxlib = ffi_api(), importlib.metadata.version("jaxlib")
  # XLA takes an older API of the same major version, but not a newer one.
  if known is not None and (info.ffi_api[0] != known[0] or info.ffi_api > known):
    raise UnusableError(
      "the library of CUDA custom calls was built with the headers of jaxlib "
      f"{info.jaxlib} (FFI API {_dotted(info.ffi_api)}), but "
      f"jaxlib {jaxlib} here has FFI API {_dotted(known)}; {REINSTALL}"
    )


def ffi_api() -> tuple[int, int] | None:
  """Major and minor version of the FFI of the jaxlib in use; None if it is unknown."""
  header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
  try:
    text = header.read_text()
  except OSError:
    return None
  found = re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", text, re.M)
  numbers = {name: int(number) for name, number in found}
  if numbers.keys() != {"MAJOR", "MINOR"}:
    return None
  return numbers["MAJOR"], numbers["MINOR"]


def _dotted(version: tuple[int, int]) -> str:
  return ".".join(map(str, version))
