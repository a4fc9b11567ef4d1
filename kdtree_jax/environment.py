"""Where the package runs: versions, devices, active implementations, cache folder.

`print_environment` belongs into every bug report and beside every figure. Nothing
here is called at import.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import pathlib
import platform
from collections.abc import Iterator

import kdtree_jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")


def compilation_cache_dir() -> pathlib.Path:
  """Folder of the user's cache for compiled programs. It may not exist yet.

  It is a place to hand to `jax_compilation_cache_dir`; the library itself never
  sets that, commands and tests do.

  Returns:
    `$XDG_CACHE_HOME/kdtree_jax/xla`, or `~/.cache/kdtree_jax/xla`.
  """
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "kdtree_jax" / "xla"


def print_environment() -> None:
  """Prints versions, devices, XLA's flags, and which form of each op is active and why.

  It starts JAX's backend where that has not happened yet.
  """
  for name, value in [*_versions(), *_devices(), *_variables(), *_operations()]:
    print(f"{name:<26} {value}")


def _versions() -> Iterator[tuple[str, str]]:
  yield "kdtree_jax", kdtree_jax.__version__
  yield "python", f"{platform.python_version()} on {platform.platform()}"
  for package in _PACKAGES:
    yield package, importlib.metadata.version(package)


def _devices() -> Iterator[tuple[str, str]]:
  import jax  # Here and below, so that the cache folder can be asked for without JAX.

  for device in jax.devices():
    yield f"device {device.id}", f"{device.platform}: {device.device_kind}"


def _variables() -> Iterator[tuple[str, str]]:
  for variable in _VARIABLES:
    yield variable, os.environ.get(variable, "(not set)")


def _operations() -> Iterator[tuple[str, str]]:
  """Each op with the form that "auto" takes, then what keeps ops from CUDA."""
  from kdtree_jax import ops
  from kdtree_jax.ops import _implementation

  obstacles: dict[str, list[str]] = {}
  for op in ops.__all__:
    if "implementation" not in inspect.signature(getattr(ops, op)).parameters:
      continue
    yield f"op {op}", _implementation.resolve(op, "auto")
    try:
      _implementation.resolve(op, "cuda")
    except NotImplementedError as error:
      obstacles.setdefault(str(error).replace(f" of {op}", ""), []).append(op)
  for reason, names in obstacles.items():
    yield "not on cuda", f"{', '.join(names)}: {reason}"
