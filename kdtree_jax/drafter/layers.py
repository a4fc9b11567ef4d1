"""Parameter-holding layers of the DFlash drafter, and its RoPE.

Activations take the dtype of the parameters, so that casting a module's arrays
casts the computation. Kernels are stored [in, out].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kdtree_jax.ops.silu import silu_times

INIT_STDDEV = 0.02


def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """`jnp.einsum` of two operands of one dtype with an f32 result.

  The backend's default precision holds (TF32 on a GPU), because a drafter's last
  bits decide no token. The CPU backend has no bf16 x bf16 -> f32 product, so
  there bf16 operands are upcast, which is exact.
  """

  def einsum(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32:
    return einsum(x, y)
  return jax.lax.platform_dependent(
    x,
    y,
    cpu=lambda x, y: einsum(x.astype(jnp.float32), y.astype(jnp.float32)),
    default=einsum,
  )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """RoPE in half-split order: features (i, i + P/2) form a pair.

  Args:
    x: [..., heads, P].
    cos: f32 [..., P/2], the table's rows at the positions of x.
    sin: likewise.

  Returns:
    x rotated in f32, in its own dtype.
  """
  front, back = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  rotated = (front * cos - back * sin, back * cos + front * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Linear(nnx.Module):
  """`x @ kernel` without bias, rounded once to the kernel's dtype."""

  def __init__(self, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs):
    noise = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32)
    self.kernel = nnx.Param((INIT_STDDEV * noise).astype(dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.kernel[...]
    rows = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    out = product("nk,km->nm", rows, kernel).astype(kernel.dtype)
    return out.reshape(*x.shape[:-1], kernel.shape[-1])


class MLP(nnx.Module):
  """SwiGLU: `down(silu(gate(x)) * up(x))`."""

  def __init__(self, width: int, inner: int, *, dtype, rngs: nnx.Rngs):
    self.gate_proj = Linear(width, inner, dtype=dtype, rngs=rngs)
    self.up_proj = Linear(width, inner, dtype=dtype, rngs=rngs)
    self.down_proj = Linear(inner, width, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(silu_times(self.gate_proj(x), self.up_proj(x)))
