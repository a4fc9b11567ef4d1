"""The gate of SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
  """`silu(gate) * up`; silu in fp32 and rounded once, as torch does it."""
  wide = gate.astype(jnp.float32)
  return (wide * jax.nn.sigmoid(wide)).astype(gate.dtype) * up
