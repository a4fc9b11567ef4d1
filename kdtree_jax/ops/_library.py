"""The shared library of CUDA custom calls: found, checked and registered once, lazily.

The library is plain ctypes: each handler is a C symbol that JAX takes as a
capsule. It is loaded when an op first asks for it, never at import, and loading
it needs no GPU, so that programs for CUDA can be lowered anywhere.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import pathlib

import jax

LIBRARY = "libkdtree_jax.so"

# XLA target -> symbol of the handler.
TARGETS = {
  "kdtree_jax.accept_tree": "KdtreeAcceptTree",
  "kdtree_jax.compact": "KdtreeCompact",
}


def find() -> pathlib.Path | None:
  """Path of the library, or None where it was not built."""
  # Not __file__: in an editable install the library lies in site-packages.
  folder = importlib.resources.files("kdtree_jax") / "_lib"
  path = folder / LIBRARY
  return pathlib.Path(str(path)) if path.is_file() else None


@functools.cache
def why_not() -> str | None:
  """Loads and registers the library; returns why it cannot be used, or None."""
  path = find()
  if path is None:
    return (
      "the library of CUDA custom calls was not built: no nvcc was found when "
      "kdtree_jax was installed"
    )
  try:
    library = ctypes.CDLL(str(path))
  except OSError as error:
    return f"{path} cannot be loaded: {error}"
  for target, symbol in TARGETS.items():
    try:
      handler = getattr(library, symbol)
    except AttributeError:
      return f"{path} lacks {symbol}: it was built from other sources"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="CUDA")
  return None
