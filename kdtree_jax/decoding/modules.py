"""Models across the edge of a compiled program: arrays outside, structure static."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

Arrays = Any
OnCompile = Callable[[str, float], None]

# XLA's GPU compiler times two code generators for each fusion with a reduction, in each
# program that it compiles, and takes the faster. They sum in different orders, and the
# outcome is not kept: two programs may round a norm differently (openxla/xla#37902).
# Matrix products are timed once a process.
SAME_SUMS_OPTIONS: Mapping[str, str | bool] = types.MappingProxyType(
  {"xla_gpu_experimental_enable_fusion_autotuner": False}
)

# Executables by what they were specialised for. Tracing a large model again for
# every call would cost more than a short decode.
_EXECUTABLES: dict[Any, Callable[..., Any]] = {}


def split(module: Any) -> tuple[Any, Arrays]:
  """A model or drafter as (hashable structure, arrays); None is (None, ()).

  Args:
    module: an `nnx.Module`, a pytree of arrays, or None.
  """
  if module is None:
    return None, ()
  if isinstance(module, nnx.Module):
    return nnx.split(module)
  leaves, structure = jax.tree.flatten(module)
  return structure, leaves


def merge(static: Any, arrays: Arrays) -> Any:
  """The inverse of `split`, also inside a traced function."""
  if static is None:
    return None
  if isinstance(static, jax.tree_util.PyTreeDef):
    return jax.tree.unflatten(static, arrays)
  return nnx.merge(static, arrays)


def unshared(state: Any, others: Any) -> Any:
  """The same state in arrays of its own, so that it can be donated.

  Args:
    state: a pytree of arrays. One array may occur in it several times.
    others: a pytree of arrays that must outlive the donation.
  """
  seen = {id(x) for x in jax.tree.leaves(others)}

  def own(x: Any) -> Any:
    if id(x) in seen:
      return jax.numpy.copy(x)
    seen.add(id(x))
    return x

  return jax.tree.map(own, state)


def compiled(
  name: str,
  function: Callable[..., Any],
  static: tuple[Any, ...],
  args: tuple[Any, ...],
  donate: int,
  on_compile: OnCompile | None,
  options: Mapping[str, str | bool] | None = None,
) -> Callable[..., Any]:
  """The executable of `function(*static, *args)`, compiled at most once.

  Args:
    name: for messages.
    function: pure; takes the static arguments first.
    static: hashable values.
    args: arrays that show shapes, dtypes and structure.
    donate: index in `args` of the argument whose buffers are given up.
    on_compile: told the name and the seconds that compilation took.
    options: of the compiler, besides those that every program for a GPU gets.

  Returns:
    A function of `args` alone.
  """
  leaves, structure = jax.tree.flatten(args)
  shapes = tuple((x.shape, jax.numpy.dtype(x.dtype)) for x in leaves)
  # Where no array is bound to a device, the program runs on JAX's default one.
  devices = frozenset(
    device for x in leaves if getattr(x, "committed", False) for device in x.devices()
  )
  platforms = {d.platform for d in devices} or {jax.default_backend()}
  chosen = {**(SAME_SUMS_OPTIONS if "gpu" in platforms else {}), **(options or {})}
  key = (function, static, structure, shapes, devices, tuple(chosen.items()))
  if key not in _EXECUTABLES:
    start = time.perf_counter()
    jitted = jax.jit(
      function,
      static_argnums=tuple(range(len(static))),
      donate_argnums=len(static) + donate,
    )
    lowered = jitted.lower(*static, *args)
    _EXECUTABLES[key] = lowered.compile(compiler_options=chosen or None)
    if on_compile is not None:
      on_compile(name, time.perf_counter() - start)
  return _EXECUTABLES[key]
