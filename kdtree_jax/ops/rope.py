"""Rotary position embedding from tables of cosines and sines.

The tables come from numpy in float64, rounded once (`rope_table`), so angles are
the reference's at every position. The rotation rounds each product before the
sum, as numpy does; XLA's CPU and GPU compilers would otherwise contract both
into a fused multiply-add.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.reference.rope import rope_table

__all__ = ["rope", "rope_table"]


def rope(
  x: jax.Array,
  positions: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  *,
  interleave: bool,
  implementation: str = "auto",
) -> jax.Array:
  """Rotates feature pairs by the angle of their position.

  Args:
    x: [..., P] features, f32 or bf16.
    positions: i32, broadcastable to `x.shape[:-1]`; each below the tables'
      length.
    cos, sin: f32 [length, P / 2] from `rope_table`.
    interleave: True where (2i, 2i + 1) form a pair of the input, False where
      (i, i + P / 2) do.
    implementation: "auto", "xla" or "cuda".

  Returns:
    [..., P] in `x.dtype`, rounded once from fp32, always in half-split order:
    pair i lies at i and i + P / 2.

  Raises:
    ValueError: the tables do not fit the features.
  """
  _implementation.resolve("rope", implementation)
  half = x.shape[-1] // 2
  if x.shape[-1] % 2 or cos.shape != sin.shape or cos.shape[-1] != half:
    raise ValueError(
      f"x has {x.shape[-1]} features, so cos and sin must be [length, {half}]; "
      f"they are {cos.shape} and {sin.shape}"
    )
  wide = x.astype(jnp.float32)
  if interleave:
    first, second = wide[..., 0::2], wide[..., 1::2]
  else:
    first, second = wide[..., :half], wide[..., half:]
  c = jnp.take(jnp.asarray(cos), positions, axis=0, mode="clip")
  s = jnp.take(jnp.asarray(sin), positions, axis=0, mode="clip")
  rotated = (
    _rounded_product(first, c) - _rounded_product(second, s),
    _rounded_product(second, c) + _rounded_product(first, s),
  )
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _rounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
  """x * y in a form that no compiler contracts with a sum around it.

  A select stands between product and sum. Its condition is false for NaN only,
  where both branches are NaN, so the value is always that of the product. The
  obvious tools do not do it on every release: `optimization_barrier` is dropped
  before code generation by the CPU compiler of jaxlib 0.10, `reduce_precision`
  to fp32 and a bitcast to integers and back are simplified away.
  """
  return jnp.where(x == x, x * y, x)
