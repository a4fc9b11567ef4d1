"""The routed experts as a custom call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops._routed_experts_xla import Weight
from kdtree_jax.ops.grouped_matmul import CHUNK_INTS, MAX_GROUPS, max_chunks
from kdtree_jax.ops.int4_weight import Int4Weight


def obstacle(x: jax.Array, down: Weight) -> str | None:
  """What the custom call does not take of arguments that fit; None if it takes all."""
  E, F, D = down.shape
  if E > MAX_GROUPS:
    return f"down has {E} experts; at most {MAX_GROUPS} are allowed"
  if (
    x.dtype == jnp.bfloat16 and not isinstance(down, Int4Weight) and (D % 16 or F % 16)
  ):
    return f"down is [E, {F}, {D}]; in bfloat16 both sizes must be multiples of 16"
  return None


def routed_experts_cuda(
  x: jax.Array,
  experts: jax.Array,
  weights: jax.Array,
  gate_up: Weight,
  down: Weight,
  experts_axis: int,
) -> jax.Array:
  """As `kdtree_jax.ops.routed_experts`, of arguments without an `obstacle`."""
  T, D = x.shape
  pairs = T * experts.shape[1]
  E, F, _ = down.shape
  kind = str(x.dtype)
  operands = [gate_up, down]
  if isinstance(gate_up, Int4Weight) and isinstance(down, Int4Weight):
    operands = [gate_up.tiles, down.tiles]
    kind = "int4" if x.dtype == jnp.bfloat16 else kind
  call = jax.ffi.ffi_call(
    "kdtree_jax.routed_experts",
    (
      jax.ShapeDtypeStruct((T, D), x.dtype),
      jax.ShapeDtypeStruct((2, pairs), jnp.int32),  # order, tokens
      jax.ShapeDtypeStruct((max_chunks(pairs, E, kind, T), CHUNK_INTS), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),  # chunks in use
      jax.ShapeDtypeStruct((pairs, F), x.dtype),  # between the two products
      jax.ShapeDtypeStruct((pairs, D), x.dtype),  # outputs by slot
    ),
    vmap_method="sequential",
  )
  out, *_ = call(
    x, experts.astype(jnp.int32), weights, *operands, experts_axis=int(experts_axis)
  )
  return out
