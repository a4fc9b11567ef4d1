"""What the tests of the CUDA custom calls share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.ops import _library


def need_library() -> None:
  """Skips the test where no library of custom calls is built; one must be usable."""
  if _library.find() is None:
    pytest.skip(str(_library.why_not()))
  assert _library.why_not() is None


def cuda_text(f: Callable[..., Any], *args: Any, **jit: Any) -> str:
  """StableHLO of `f` lowered for CUDA; needs no GPU."""
  need_library()
  lowered = jax.jit(f, **jit).trace(*args).lower(lowering_platforms=("cuda",))
  return lowered.as_text()


def replayed(f: Callable[..., Any], calls: int = 4) -> Callable[..., Any]:
  """`f` in the middle of a region that XLA records as a CUDA graph.

  The first call runs uncaptured, the second is captured, later ones are replayed
  without the handler. The bits of all must be equal; the last result is returned.
  """

  @jax.jit
  def region(noise, *args):
    for _ in range(3):
      noise = jax.lax.optimization_barrier(jnp.sin(noise))
    out, noise = jax.lax.optimization_barrier((f(*args), noise))
    for _ in range(3):
      noise = jax.lax.optimization_barrier(jnp.cos(noise))
    return out, noise

  def run(*args):
    # On the device once, so that the graph finds the same addresses again.
    noise, args = jnp.arange(4096.0), jax.tree.map(jnp.asarray, args)
    first = jax.device_get(region(noise, *args)[0])
    for call in range(1, calls):
      again = jax.device_get(region(noise, *args)[0])
      assert_same_bits(first, again, f"call {call}")
    return first

  return run


def assert_same_bits(want: Any, have: Any, what: str = "") -> None:
  """Leaf by leaf: shape, dtype and bytes."""
  leaves = jax.tree.leaves(want), jax.tree.leaves(have)
  for i, (one, other) in enumerate(zip(*leaves, strict=True)):
    one, other = np.asarray(one), np.asarray(other)
    assert (one.shape, one.dtype) == (other.shape, other.dtype), f"{what} leaf {i}"
    if one.tobytes() != other.tobytes():
      where = np.argwhere(_raw(one) != _raw(other))
      at = tuple(int(k) for k in where[0])
      raise AssertionError(
        f"{what} leaf {i}: {len(where)} of {one.size} differ; first at {at}: "
        f"{one[at]} and {other[at]}"
      )


def _raw(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)
