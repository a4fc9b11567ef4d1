"""The small layers: RMSNorm, linear, SwiGLU. Parameters only, no state.

`implementation` is that of the ops. Training and scoring take XLA's, the default here;
decoding passes its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kdtree_jax.ops.matmul import matmul
from kdtree_jax.ops.matmul_chain import Step, matmul_chain
from kdtree_jax.ops.norm import rms_norm


class RMSNorm(nnx.Module):
  """See `rms_norm`."""

  def __init__(self, size: int, eps: float, dtype: jnp.dtype):
    self.weight = nnx.Param(jnp.ones((size,), dtype))
    self.eps = eps

  def __call__(self, x: jax.Array, implementation: str = "xla") -> jax.Array:
    return rms_norm(x, self.weight[...], self.eps, implementation)

  def step(self) -> Step:
    """Of a `matmul_chain`."""
    return ("rms_norm", self.weight[...], self.eps)

  def step_after_sum(self, h: jax.Array) -> Step:
    """Of a `matmul_chain`: the residual sum, and its norm."""
    return ("add_rms_norm", h, self.weight[...], self.eps)


class Linear(nnx.Module):
  """`x @ kernel` without bias; kernel [in, out]."""

  def __init__(self, size_in: int, size_out: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.kernel = nnx.Param(normal(rngs, (size_in, size_out), size_in, dtype))

  def __call__(self, x: jax.Array, implementation: str = "xla") -> jax.Array:
    return matmul(x, self.kernel[...], implementation)

  def step(self) -> Step:
    """Of a `matmul_chain`."""
    return ("matmul", self.kernel[...])


class SwiGLU(nnx.Module):
  """`down(silu(gate(x)) * up(x))`, gate and up in one kernel [D, 2F]."""

  def __init__(self, hidden: int, inner: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.gate_up = Linear(hidden, 2 * inner, dtype, rngs)
    self.down = Linear(inner, hidden, dtype, rngs)

  def __call__(self, x: jax.Array, implementation: str = "xla") -> jax.Array:
    steps = (("gated_matmul", self.gate_up.kernel[...]), self.down.step())
    return matmul_chain(x, steps, implementation)[-1]


def normal(
  rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype
) -> jax.Array:
  """Initial values of variance 1 / fan_in."""
  return (jax.random.normal(rngs.params(), shape) * fan_in**-0.5).astype(dtype)
