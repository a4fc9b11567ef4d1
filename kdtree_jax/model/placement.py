"""Where a module's parameters lie."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

Sharding = jax.sharding.Sharding
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding] | None

_ALIGNMENT = 64  # Bytes.


def empty(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
  """As `np.empty`, at an address that JAX takes over on a CPU without a copy."""
  dtype = np.dtype(dtype)
  nbytes = math.prod(shape) * dtype.itemsize
  memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + nbytes].view(dtype).reshape(shape)


def put(name: str, value: np.ndarray | jax.Array, sharding: Placement) -> jax.Array:
  """A parameter on its devices.

  Args:
    name: of the parameter, for `sharding`.
    value: in its dtype.
    sharding: one for all, a function of name and shape, or None for JAX's default
      device.

  Raises:
    ValueError: the sharding does not fit the shape; the message names the parameter.
  """
  chosen = sharding
  if not isinstance(sharding, Sharding) and sharding is not None:
    if not callable(sharding):
      raise ValueError(
        f"sharding = {sharding!r} is not allowed: a jax.sharding.Sharding, a function "
        "of name and shape, or None"
      )
    chosen = sharding(name, value.shape)
    if not isinstance(chosen, Sharding):
      raise ValueError(f"sharding({name!r}, ...) is {chosen!r}, not a Sharding")
  try:
    return jax.device_put(value, chosen)
  except ValueError as error:
    raise ValueError(f"sharding of {name!r} {list(value.shape)}: {error}") from error


def variables(module: nnx.Module) -> dict[str, nnx.Variable]:
  """A module's variables by name: "layers.3.mlp.experts.down" and the like."""
  return {
    ".".join(map(str, path)): node
    for path, node in nnx.iter_graph(module)
    if isinstance(node, nnx.Variable)
  }
