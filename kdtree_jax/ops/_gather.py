"""Elements of rows by index."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
  """x [B, M], index i32[B, K] -> [B, K]; indices are clamped to 0 .. M - 1.

  Negative ones count from the end.
  """
  return jnp.take_along_axis(x, index, axis=1, mode="clip")
