"""Absorbed MLA attention of draft-tree nodes over the latent cache.

A node attends to the committed tokens and to its own ancestors in the tree, and
to nothing else. Keys are addressed by absolute position and reduced in position
order, in fixed chunks of positions. Wherever a key lies, in the cache or in the
tree, it takes the same lane of the same chunk, and every chunk runs the same
products of the same shape for every node. So the bits of a node's output do not
depend on whether its ancestors have been committed yet, on its siblings, or on
the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops.matmul import einsum

CHUNK = 128


def tree_attention(
  q: jax.Array,
  cache: jax.Array,
  tree_keys: jax.Array,
  ancestors: jax.Array,
  depths: jax.Array,
  lengths: jax.Array,
  *,
  scale: float,
  value_dim: int,
  layer: int | None = None,
  chunk: int = CHUNK,
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention over keys in absolute position order.

  Node n sits at absolute position `lengths + depths[n]`. Its key at position p
  is `cache[p]` for p < lengths, and the tree key of its ancestor-or-self at
  depth `p - lengths` from there on. Values are the first `value_dim` columns of
  the keys (DeepSeek-V3 `inference/model.py`, the "absorb" form).

  Args:
    q: [B, N, H, W] queries, f32 or bf16; W = kv_lora_rank + qk_rope_head_dim.
    cache: [B, S, W] committed keys, or [layers, B, S, W] where `layer` is given;
      rows at and beyond `lengths` are ignored.
      S must be a multiple of `chunk`.
    tree_keys: [B, N, W] keys of the tree's nodes.
    ancestors: i32 [B, N, A] slot of the ancestor-or-self at each depth, -1
      beyond the node's own depth.
    depths: i32 [B, N] depth of each node, 0 for the root, at most A - 1.
    lengths: i32 [B] committed tokens, at most S.
    scale: factor on the logits.
    value_dim: width of the output, kv_lora_rank.
    layer: which layer of the cache to read. A layer cut out by the caller would be
      copied as a whole before the loop over its chunks.
    chunk: positions per chunk, the same in every program whose bits are
      compared.
    implementation: "auto", "xla" or "cuda".

  Returns:
    [B, N, H, value_dim] in `q.dtype`.

  Raises:
    ValueError: shapes disagree, or S is not a multiple of `chunk`.
  """
  one = cache
  if layer is not None:
    one = jax.ShapeDtypeStruct(cache.shape[1:], cache.dtype)
  _check_shapes(q, one, tree_keys, ancestors, depths, lengths, value_dim, chunk)
  _implementation.resolve("tree_attention", implementation)
  q, cache, tree_keys = map(jnp.asarray, (q, cache, tree_keys))
  if layer is None:
    cache, layer = cache[None], 0
  ancestors, depths, lengths = map(jnp.asarray, (ancestors, depths, lengths))
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


def _check_shapes(
  q, cache, tree_keys, ancestors, depths, lengths, value_dim, chunk
) -> None:
  if q.ndim != 4:
    raise ValueError(f"q must be [B, N, H, W]; its shape is {q.shape}")
  B, N, _, W = q.shape
  expected = {
    "cache": (cache, (B, None, W)),
    "tree_keys": (tree_keys, (B, N, W)),
    "ancestors": (ancestors, (B, N, None)),
    "depths": (depths, (B, N)),
    "lengths": (lengths, (B,)),
  }
  for name, (value, shape) in expected.items():
    if value.ndim != len(shape) or any(
      want is not None and have != want
      for have, want in zip(value.shape, shape, strict=True)
    ):
      wanted = ", ".join("?" if s is None else str(s) for s in shape)
      raise ValueError(
        f"{name} must have shape [{wanted}] to fit q {q.shape}; it has {value.shape}"
      )
  if not (q.dtype == cache.dtype == tree_keys.dtype):
    raise ValueError(
      "q, cache and tree_keys must have one dtype; they have "
      f"{q.dtype}, {cache.dtype} and {tree_keys.dtype}"
    )
  if not 0 < value_dim <= W:
    raise ValueError(f"value_dim = {value_dim} must lie in 1 .. {W}")
  if cache.shape[1] % chunk:
    raise ValueError(
      f"cache holds {cache.shape[1]} positions, which is not a multiple of "
      f"chunk = {chunk}"
    )
