"""Tree attention in plain JAX: `tree_attention` for all platforms.

Wherever a key lies, in the cache or in the tree, it takes the same lane of the same
chunk, and every chunk runs the same products of the same shape for every node. So
the bits of a node's output do not depend on whether its ancestors have been
committed yet, on its siblings, or on the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops.matmul import einsum

CHUNK = 128  # positions, unless the caller says otherwise


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
) -> jax.Array:
  """As `tree_attention`, with the cache [layers, B, S, W] and all arguments checked."""
  B, N, H, W = q.shape
  A = ancestors.shape[-1]
  last = lengths[:, None] + depths  # [B, N] a node's own position, its last key
  batch = jnp.arange(B)[:, None, None]

  def scores_and_values(state, keys, positions):
    """One chunk: keys [B, N, C, W] at positions [C]."""
    top, total, acc = state
    seen = (positions <= last[:, :, None])[:, :, None, :]  # [B, N, 1, C]
    s = einsum("bnhw,bncw->bnhc", q, keys) * scale
    s = jnp.where(seen, s, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(s, -1))
    # A chunk that holds no key of this node must leave its state as it is, and
    # -inf - (-inf) must not make a NaN of it.
    any_seen = seen[..., 0]
    safe_top = jnp.where(any_seen, new_top, 0.0)
    p = jnp.where(seen, jnp.exp(s - safe_top[..., None]), 0.0)
    decay = jnp.where(any_seen, jnp.exp(top - safe_top), 1.0)
    new_total = total * decay + jnp.sum(p, -1)
    # The CPU's product has no masked lanes: garbage keys times zero is not zero.
    values = jnp.where(seen[:, :, 0, :, None], keys[..., :value_dim], 0)
    part = einsum("bnhc,bncr->bnhr", p.astype(q.dtype), values)
    new_acc = acc * decay[..., None] + part
    return (
      jnp.where(any_seen, new_top, top),
      jnp.where(any_seen, new_total, total),
      jnp.where(any_seen[..., None], new_acc, acc),
    )

  def cached(c):
    start = c * chunk
    block = jax.lax.dynamic_slice(cache, (layer, 0, start, 0), (1, B, chunk, W))
    return block[0], start + jnp.arange(chunk)

  def prefix_chunk(c, state):
    block, positions = cached(c)
    keys = jnp.broadcast_to(block[:, None], (B, N, chunk, W))
    return scores_and_values(state, keys, positions)

  def tail_chunk(c, state):
    block, positions = cached(c)
    depth = positions[None] - lengths[:, None]  # [B, C]
    index = jnp.broadcast_to(jnp.clip(depth, 0, A - 1)[:, None], (B, N, chunk))
    slots = jnp.take_along_axis(ancestors, index, axis=2)
    own = tree_keys[batch, jnp.maximum(slots, 0)]  # [B, N, C, W]
    keys = jnp.where((depth < 0)[:, None, :, None], block[:, None], own)
    return scores_and_values(state, keys, positions)

  state = (
    jnp.full((B, N, H), -jnp.inf, jnp.float32),
    jnp.zeros((B, N, H), jnp.float32),
    jnp.zeros((B, N, H, value_dim), jnp.float32),
  )
  whole = jnp.min(lengths) // chunk  # chunks that hold committed keys only
  used = (jnp.max(last) + chunk) // chunk
  state = jax.lax.fori_loop(0, whole, prefix_chunk, state)
  _, total, acc = jax.lax.fori_loop(whole, used, tail_chunk, state)
  return (acc / total[..., None]).astype(q.dtype)
