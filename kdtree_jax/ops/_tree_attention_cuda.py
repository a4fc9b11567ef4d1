"""Tree attention as the custom call of `custom_calls/tree_attention.h`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_NODES = 128
MAX_ANCESTORS = 129  # a root and 128 drafts
MAX_WIDTH = 576  # kv_lora_rank + qk_rope_head_dim of DeepSeek-V3 and Kimi
CHUNK_MULTIPLE = 16
MAX_CHUNK = 2**20
# Sequences and chunks are axes of the grid, positions are ints.
MAX_BATCH = 65535
MAX_CHUNKS = 65535
MAX_POSITIONS = 2**31 - 1


def default_chunk(positions: int) -> int:
  """Positions per chunk where the caller does not say.

  One row needs many chunks to fill a GPU, many rows pay for each chunk with a write
  of their partial results. Both must use the same, or their bits would differ, so
  it is a function of the longest context alone: a 64th of it, rounded down to a
  power of two, but 128 at least and 1,024 at most.

  Args:
    positions: the most that a cache may have, at least 1.
  """
  power = 1 << max(positions // 64, 1).bit_length() - 1
  return max(128, min(1024, power))


def obstacle(
  q: jax.Array, capacity: int, ancestors: jax.Array, chunk: int
) -> str | None:
  """What keeps the custom call from taking these arguments, or None.

  Args:
    q, ancestors: as in `tree_attention`, of agreeing shapes and dtypes.
    capacity: S, positions of the cache.
    chunk: positions per chunk, the caller's or the default.
  """
  B, N, H, W = q.shape
  A = ancestors.shape[-1]
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    return f"q, cache and tree_keys must be float32 or bfloat16; they are {q.dtype}"
  if not 1 <= N <= MAX_NODES:
    return f"q {q.shape} has {N} nodes; 1 .. {MAX_NODES} are allowed"
  if H < 1:
    return f"q {q.shape} has no head"
  if not 1 <= A <= MAX_ANCESTORS:
    return (
      f"ancestors {ancestors.shape} covers {A} depths; 1 .. {MAX_ANCESTORS} are allowed"
    )
  if W > MAX_WIDTH:
    return f"q {q.shape} is {W} wide; at most {MAX_WIDTH} is allowed"
  if B > MAX_BATCH:
    return f"q {q.shape} has {B} sequences; at most {MAX_BATCH} are allowed"
  if chunk % CHUNK_MULTIPLE:
    return f"chunk = {chunk} must be a multiple of {CHUNK_MULTIPLE}"
  if chunk > MAX_CHUNK:
    return f"chunk = {chunk} is too large; at most {MAX_CHUNK} is allowed"
  chunks = _chunks(capacity, A, chunk)
  if chunks > MAX_CHUNKS or chunks * chunk > MAX_POSITIONS:
    return (
      f"cache of {capacity} positions makes {chunks} chunks of {chunk}; at most "
      f"{MAX_CHUNKS} chunks and {MAX_POSITIONS} positions are allowed"
    )
  return None


def _chunks(capacity: int, depths: int, chunk: int) -> int:
  return -(-(capacity + depths) // chunk)


def attend(
  q: jax.Array,
  cache: jax.Array,
  tree_keys: jax.Array,
  ancestors: jax.Array,
  depths: jax.Array,
  lengths: jax.Array,
  *,
  scale: float,
  value_dim: int,
  layer: int,
  chunk: int,
  rows_per_block: int = 0,
) -> jax.Array:
  """As `tree_attention`, with the cache [layers, B, S, W] and all arguments checked.

  `rows_per_block`, 16, 32, 64 or 0 for the launcher's choice, is for tests: no bit
  of the result depends on it.
  """
  B, N, H, _ = q.shape
  chunks = _chunks(cache.shape[2], ancestors.shape[2], chunk)
  rows = N * H
  call = jax.ffi.ffi_call(
    "kdtree_jax.tree_attention",
    (
      jax.ShapeDtypeStruct((B, N, H, value_dim), q.dtype),
      # Workspace: each chunk's accumulators, maxima and sums.
      jax.ShapeDtypeStruct((B, rows, chunks, value_dim), jnp.float32),
      jax.ShapeDtypeStruct((B, rows, chunks), jnp.float32),
      jax.ShapeDtypeStruct((B, rows, chunks), jnp.float32),
    ),
    vmap_method="sequential",
  )
  ancestors, depths, lengths = (
    x.astype(jnp.int32) for x in (ancestors, depths, lengths)
  )
  out, *_ = call(
    q,
    cache,
    tree_keys,
    ancestors,
    depths,
    lengths,
    layer=int(layer),
    chunk=int(chunk),
    rows_per_block=int(rows_per_block),
    scale=float(scale),
  )
  return out
