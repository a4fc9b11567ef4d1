"""Tree attention as the custom call of `custom_calls/tree_attention.h`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _library

MAX_NODES = 128
MAX_ANCESTORS = 129  # a root and 128 drafts
MAX_WIDTH = 576  # kv_lora_rank + qk_rope_head_dim of DeepSeek-V3 and Kimi
CHUNK_MULTIPLE = 16
MAX_CHUNK = 2**20
# Sequences and chunks are axes of the grid, positions are ints.
MAX_BATCH = 65535
MAX_CHUNKS = 65535
MAX_POSITIONS = 2**31 - 1


# Which kernel runs, as the custom call takes it; see `custom_calls/tree_attention.h`.
# All widths of a model must use one. "auto" takes the one for Hopper on a GPU that it
# is for, where its blocks of 64 heads are full.
KERNELS = ("auto", "portable", "hopper")
# The shape that the kernel for Hopper is compiled for.
HOPPER_WIDTH = 576
HOPPER_VALUE_DIM = 512
HOPPER_HEADS = 64
# Workspace in which its blocks, where four or eight share a chunk, send each other
# weights: 256 blocks, a message of 64 x 64 bfloat16 and 64 float32 each.
_MESSAGES_BYTES = 256 * (64 * 64 * 2 + 64 * 4)


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


def default_chunk_on_hopper(positions: int) -> int:
  """The same for the kernel for Hopper, whose blocks share a chunk where rows are few.

  An 8th of the positions, rounded down to a power of two, but 512 at least and 2,048 at
  most; and 64 more, so that a tree beyond a context of a power of two, up to 32,768,
  begins no further chunk. Larger ones save many rows a part of the merge, but leave one
  row too few blocks, most of all where the context is far shorter than the longest.

  Args:
    positions: the most that a cache may have, at least 1.
  """
  power = 1 << max(positions // 8, 1).bit_length() - 1
  return max(512, min(2048, power)) + 64


def kernel_obstacle(dtype: Any, width: int, value_dim: int, scale: float) -> str | None:
  """What keeps the kernel for Hopper from these arguments, or None."""
  if dtype != jnp.bfloat16:
    return f"it takes bfloat16; q, cache and tree_keys are {dtype}"
  if (width, value_dim) != (HOPPER_WIDTH, HOPPER_VALUE_DIM):
    return (
      f"it takes W = {HOPPER_WIDTH} and value_dim = {HOPPER_VALUE_DIM}; they are "
      f"{width} and {value_dim}"
    )
  if not 0 < scale <= 1e30:
    return f"it takes scales above 0, up to 1e30; scale = {scale}"
  return None


def kernel_on(
  device: Any,
  *,
  dtype: Any = jnp.bfloat16,
  heads: int = HOPPER_HEADS,
  width: int = HOPPER_WIDTH,
  value_dim: int = HOPPER_VALUE_DIM,
  scale: float = 1.0,
) -> str:
  """Which kernel "auto" runs on a GPU for these arguments: "portable" or "hopper".

  The two are exact each, but their bits differ.

  Args:
    device: a GPU that the library has code for.
    dtype, heads, width, value_dim, scale: of the call; those of Kimi where not given.
  """
  if heads % HOPPER_HEADS:
    return "portable"
  if kernel_obstacle(dtype, width, value_dim, scale) or not runs_hopper(device):
    return "portable"
  return "hopper"


def runs_hopper(device: Any) -> bool:
  """Whether a GPU can run the kernel for Hopper: its kind, and the library's code."""
  capability = str(getattr(device, "compute_capability", ""))
  has_code = "sm_90a" in _library.build_info().architectures
  return capability.startswith("9.") and has_code


def describe_kernel(device: Any) -> str:
  """What "auto" runs on a GPU, in words."""
  if kernel_on(device) == "portable":
    return "portable"
  return (
    f"hopper for bfloat16, W = {HOPPER_WIDTH}, value_dim = {HOPPER_VALUE_DIM}, heads "
    f"in multiples of {HOPPER_HEADS}; portable for the rest"
  )


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
  chunk_on_hopper: int,
  kernel: str = "auto",
  rows_per_block: int = 0,
  blocks_per_item: int = 0,
) -> jax.Array:
  """As `tree_attention`, with the cache [layers, B, S, W] and all arguments checked.

  `chunk_on_hopper` is the chunk of the kernel for Hopper, at least `chunk`.
  `rows_per_block` (portable kernel) 16, 32, 64, and `blocks_per_item` (Hopper) 1, 2,
  4, 8, or 0 for the launcher's choice, are for tests: no bit of the result depends on
  them.
  """
  B, N, H, W = q.shape
  hopper = kernel != "portable" and not kernel_obstacle(q.dtype, W, value_dim, scale)
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
      jax.ShapeDtypeStruct((_MESSAGES_BYTES if hopper else 16,), jnp.uint8),
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
    chunk_on_hopper=int(chunk_on_hopper),
    kernel=KERNELS.index(kernel),
    rows_per_block=int(rows_per_block),
    blocks_per_item=int(blocks_per_item),
    scale=float(scale),
  )
  return out
