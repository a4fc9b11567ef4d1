"""Matrix products of rows grouped by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_integers


def grouped_matmul(
  x: jax.Array,
  weights: jax.Array,
  group_sizes: jax.Array,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """`x[i] @ weights[g(i)]`, rows sorted by group.

  Args:
    x: [M, K] rows sorted by group, f32 or bf16.
    weights: [G, K, N] one kernel per group, of the same dtype.
    group_sizes: i32 [G] rows per group; the sum must be M.
    implementation: "auto", "xla" or "cuda".

  Returns:
    [M, N] in `x.dtype`, accumulated in fp32 and rounded once.

  Raises:
    ValueError: shapes or dtypes disagree.
  """
  _implementation.resolve("grouped_matmul", implementation)
  x, weights, group_sizes = map(as_array, (x, weights, group_sizes))
  if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
    raise ValueError(
      f"x must be [M, K] and weights [G, K, N]; they are {x.shape} and {weights.shape}"
    )
  if group_sizes.shape != (weights.shape[0],):
    raise ValueError(
      f"group_sizes must be [{weights.shape[0]}], one per group; "
      f"its shape is {group_sizes.shape}"
    )
  check_integers(group_sizes=group_sizes)
  if x.dtype != weights.dtype:
    raise ValueError(f"x is {x.dtype} but weights are {weights.dtype}")

  def product(x, weights):
    return jax.lax.ragged_dot(
      x,
      weights,
      group_sizes,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )

  if x.dtype == jnp.float32:
    return product(x, weights)
  wide = jax.lax.platform_dependent(
    x,
    weights,
    cpu=lambda x, w: product(x.astype(jnp.float32), w.astype(jnp.float32)),
    default=product,
  )
  return wide.astype(x.dtype)
