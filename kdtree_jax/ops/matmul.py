"""Matrix products with fp32 accumulation and one rounding.

The CPU backend has no bf16 x bf16 -> fp32 product (and its bf16 product takes
another path for the last rows), so there the operands are upcast first. That is
exact, and keeps a row's bits independent of its neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def einsum(
  spec: str, x: jax.Array, w: jax.Array, out_dtype: jnp.dtype = jnp.float32
) -> jax.Array:
  """`jnp.einsum` of two operands in true fp32 (no TF32), accumulated in fp32.

  Args:
    spec: subscripts of a contraction of two operands.
    x: first operand, f32 or bf16.
    w: second operand, of the same dtype.
    out_dtype: dtype that the fp32 sums are rounded to, once.
  """

  def product(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = x.dtype == jnp.float32
    return jnp.einsum(
      spec,
      x,
      w,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32 if wide else out_dtype,
    )

  if x.dtype == w.dtype == jnp.float32:
    return product(x, w)
  return jax.lax.platform_dependent(
    x,
    w,
    cpu=lambda x, w: product(x.astype(jnp.float32), w.astype(jnp.float32)).astype(
      out_dtype
    ),
    default=product,
  )


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """`x @ w` as one two-dimensional product, rounded once to `x.dtype`.

  Args:
    x: [..., K] activations, f32 or bf16.
    w: [K, M] kernel of the same dtype.

  Returns:
    [..., M] in `x.dtype`.
  """
  rows = x.reshape(-1, x.shape[-1])
  out = einsum("nk,km->nm", rows, w, x.dtype)
  return out.reshape(*x.shape[:-1], w.shape[-1])
