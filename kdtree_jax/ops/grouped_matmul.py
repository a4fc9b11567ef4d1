"""Matrix products of rows grouped by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation, int4_weight
from kdtree_jax.ops._checks import as_array, check_integers
from kdtree_jax.ops.int4_weight import Int4Weight

# As in custom_calls/expert_rows.h and matmul.h.
MAX_GROUPS = 8192
CHUNK_INTS = 5


def grouped_matmul(
  x: jax.Array,
  weights: jax.Array | Int4Weight,
  group_sizes: jax.Array,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """`x[i] @ weights[g(i)]`, rows sorted by group.

  In the CUDA form a row's bits depend on the row and its group's weights alone. In the
  XLA form of some platforms NaN in a group's weights reaches other groups' rows.

  Args:
    x: [M, K] rows sorted by group, f32 or bf16.
    weights: [G, K, N] one kernel per group, of the same dtype; or an `Int4Weight` of
      these sizes, not gated, whose weights are rounded once to the dtype of `x`.
    group_sizes: i32 [G] rows per group; one below 0 counts as 0. Rows beyond their sum,
      which must be an i32, become 0.
    implementation: "auto", "xla" or "cuda". "cuda" takes up to 8,192 groups; in bf16
      it reads weights whose K is a multiple of 16 and N of 8 as they are, and others
      after copying them.

  Returns:
    [M, N] in `x.dtype`, accumulated in fp32 and rounded once.

  Raises:
    ValueError: shapes or dtypes disagree, or more groups than "cuda" takes.
    NotImplementedError: "cuda" without the CUDA library.
  """
  x, group_sizes = as_array(x), as_array(group_sizes)
  if isinstance(weights, Int4Weight):
    int4_weight.check("weights", weights)
    if weights.gated:
      raise ValueError(
        "weights.gated = True is not allowed: gate and up are apart here"
      )
  else:
    weights = as_array(weights)
  if x.ndim != 2 or len(weights.shape) != 3 or x.shape[1] != weights.shape[1]:
    raise ValueError(
      f"x must be [M, K] and weights [G, K, N]; they are {x.shape} and {weights.shape}"
    )
  if not x.shape[1] or not weights.shape[2]:
    raise ValueError(f"weights are {list(weights.shape)}; neither K nor N may be 0")
  if group_sizes.shape != (weights.shape[0],):
    raise ValueError(
      f"group_sizes must be [{weights.shape[0]}], one per group; "
      f"its shape is {group_sizes.shape}"
    )
  check_integers(group_sizes=group_sizes)
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"x is {x.dtype}; it must be float32 or bfloat16")
  if not isinstance(weights, Int4Weight) and x.dtype != weights.dtype:
    raise ValueError(f"x is {x.dtype} but weights are {weights.dtype}")
  obstacle = None
  if weights.shape[0] > MAX_GROUPS:
    obstacle = (
      f"weights have {weights.shape[0]} groups; at most {MAX_GROUPS} are allowed"
    )
  implementation = _implementation.within_limits(
    "grouped_matmul", implementation, obstacle
  )
  return _implementation.dispatch(
    "grouped_matmul", implementation, _cuda, _xla, x, weights, group_sizes
  )


def max_chunks(rows: int, groups: int, kind: str, group_rows: int) -> int:
  """Length of the list of chunks: `MaxChunks` of custom_calls/expert_rows.h.

  Args:
    rows: of all groups.
    groups: how many.
    kind: of the product, "float32", "bfloat16" or "int4" (with bf16 rows).
    group_rows: that a group has at most, or about; `ChunkRows` of matmul.h.
  """
  sizes = {"float32": (64,), "bfloat16": (16, 32, 64), "int4": (8, 16)}[kind]
  if kind == "bfloat16":  # Most groups have at most four times the mean.
    group_rows = min(group_rows, 4 * -(-rows // max(groups, 1)))
  chunk = next((size for size in sizes if group_rows <= size), sizes[-1])
  return min(rows, groups) + rows // chunk


def _cuda(
  x: jax.Array, weights: jax.Array | Int4Weight, group_sizes: jax.Array
) -> jax.Array:
  """The custom call `custom_calls/grouped_matmul_ffi.cc`."""
  G, _, N = weights.shape
  kind, features = str(x.dtype), N
  if isinstance(weights, Int4Weight):
    operand = weights.tiles
    kind = "int4" if x.dtype == jnp.bfloat16 else kind
  elif x.dtype == jnp.bfloat16:
    # The copy engine wants whole multiples; zeros behind the end change no sum.
    K, pad_k, pad_n = x.shape[1], -x.shape[1] % 16, -N % 8
    x = jnp.pad(x, ((0, 0), (0, pad_k))) if K % 16 else x
    pads = ((0, 0), (0, pad_k), (0, pad_n))
    operand = jnp.pad(weights, pads) if pad_k or pad_n else weights
    features = N + pad_n
  else:
    operand = weights
  M = x.shape[0]
  call = jax.ffi.ffi_call(
    "kdtree_jax.grouped_matmul",
    (
      jax.ShapeDtypeStruct((M, features), x.dtype),
      jax.ShapeDtypeStruct((max_chunks(M, G, kind, M), CHUNK_INTS), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
    ),
    vmap_method="sequential",
  )
  out, *_ = call(x, operand, group_sizes.astype(jnp.int32))
  return out[:, :N]


def _xla(
  x: jax.Array, weights: jax.Array | Int4Weight, group_sizes: jax.Array
) -> jax.Array:
  """The form for all platforms, as a ragged product."""
  if isinstance(weights, Int4Weight):
    weights = int4_weight.dequantize(weights, x.dtype)
  group_sizes = jnp.maximum(group_sizes, 0)

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
