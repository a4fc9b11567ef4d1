"""Attention of a draft block to the context and to itself.

A block of W rows sits at absolute positions `anchor .. anchor + W - 1`. Every
row sees the context keys at positions below the anchor and the whole block, on
both sides of itself; a sliding layer keeps those keys of either kind whose
distance |query - key| is below its window (arXiv 2602.06036, section 4; the
two-sided window is that of the Kimi checkpoints). A causal layer, which some
trainers have, hides the rows of the block after a row.

There are two forms. `dense_attention` handles many blocks per sequence in one
product, which training needs and a GPU likes. `cached_attention` serves one block
per sequence over a cache of fixed capacity; on a CPU it walks over the live part
of the cache in chunks, so that its cost follows the text and not the capacity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.drafter.layers import product

CHUNK = 128


def _near(queries: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
  """Which of C keys lie within the window of which of W queries, by position.

  Returns:
    bool [.., W, C], or [.., 1, 1] of True where there is no window.
  """
  if window is None:
    return jnp.ones((*queries.shape[:-1], 1, 1), bool)
  return jnp.abs(queries[..., :, None] - keys[..., None, :]) < window


def _own_block(rows: int, window: int | None, causal: bool) -> jax.Array:
  """Which rows of a block see which: bool [W, W], or something that broadcasts."""
  offsets = jnp.arange(rows)
  near = _near(offsets, offsets, window)
  return near & (offsets <= offsets[:, None]) if causal else near


def _grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
  """[.., H, P] -> [.., K, G, P]: query head h reads key head h // G."""
  return q.reshape(*q.shape[:-2], num_kv_heads, -1, q.shape[-1])


def dense_attention(
  q: jax.Array,
  block_keys: jax.Array,
  block_values: jax.Array,
  context_keys: jax.Array,
  context_values: jax.Array,
  anchors: jax.Array,
  *,
  window: int | None = None,
  causal: bool = False,
  first: jax.Array | None = None,
) -> jax.Array:
  """Attention of A blocks per sequence, each to its own context and itself.

  In the shapes H counts query heads, K key heads and P features of a head.

  Args:
    q: [B, A, W, H, P] queries after RoPE.
    block_keys: [B, A, W, K, P] keys of the blocks after RoPE.
    block_values: [B, A, W, K, P].
    context_keys: [B, T, K, P]; row t sits at absolute position `first + t`.
    context_values: [B, T, K, P]. Rows that no block sees may hold anything.
    anchors: i32 [B, A] absolute position of each block's first row.
    window: a sliding layer's window in tokens, None for full attention.
    causal: whether a row sees no later row of its block.
    first: i32 [B] absolute position of the first context row, None for 0.

  Returns:
    [B, A, W, H, P] in the dtype of q.
  """
  B, A, W, H, P = q.shape
  T, K = context_keys.shape[1:3]
  rows = anchors[..., None] + jnp.arange(W)  # [B, A, W]
  keys = jnp.broadcast_to(jnp.arange(T), (B, T))
  if first is not None:
    keys = keys + first[:, None]
  seen = (keys[:, None] < anchors[..., None])[:, :, None]  # [B, A, 1, T]
  seen = seen & _near(rows, keys[:, None], window)  # [B, A, 1 or W, T]
  # A value of weight zero must count as zero even where it is NaN.
  known = jnp.any(keys[:, None] < anchors[..., None], axis=1)  # [B, T]
  context_values = jnp.where(known[..., None, None], context_values, 0)

  q = _grouped(q, K)
  scale = P**-0.5
  far = product("bawkgp,btkp->bkgawt", q, context_keys) * scale
  own = product("bawkgp,bavkp->bkgawv", q, block_keys) * scale
  far = jnp.where(seen[:, None, None], far, -jnp.inf)
  own = jnp.where(_own_block(W, window, causal), own, -jnp.inf)

  # A row always sees itself, so the maximum is finite.
  top = jnp.maximum(
    jnp.max(far, -1, initial=-jnp.inf, keepdims=True), jnp.max(own, -1, keepdims=True)
  )
  top = jax.lax.stop_gradient(top)
  far, own = jnp.exp(far - top), jnp.exp(own - top)
  total = jnp.sum(far, -1) + jnp.sum(own, -1)  # [B, K, G, A, W]
  dtype = block_values.dtype
  out = product("bkgawt,btkp->bawkgp", far.astype(dtype), context_values)
  out = out + product("bkgawv,bavkp->bawkgp", own.astype(dtype), block_values)
  out = out / jnp.moveaxis(total, (3, 4), (1, 2))[..., None]
  return out.astype(dtype).reshape(B, A, W, H, P)


def chunked_attention(
  q: jax.Array,
  block_keys: jax.Array,
  block_values: jax.Array,
  cache_keys: jax.Array,
  cache_values: jax.Array,
  layer: int,
  lengths: jax.Array,
  *,
  window: int | None = None,
  causal: bool = False,
  chunk: int = CHUNK,
) -> jax.Array:
  """`cached_attention` as a loop over the chunks that hold live context.

  The softmax is taken online, beginning with the block's own keys; a chunk that
  a sequence does not see leaves that sequence's sums as they are. Arguments and
  result are those of `cached_attention`; `chunk` counts positions.
  """
  B, W, H, P = q.shape
  S, K = cache_keys.shape[2:4]
  chunk = min(chunk, S)
  dtype = block_values.dtype
  scale = P**-0.5
  rows = lengths[:, None] + jnp.arange(W)  # [B, W]
  # The query heads of one key head are rows of one product, M = G * W of them.
  q = jnp.moveaxis(_grouped(q, K), 1, 3).reshape(B, K, -1, P)

  def masked_scores(keys: jax.Array, seen: jax.Array) -> jax.Array:
    """[B, C, K, P] and bool [B or 1, W or 1, C] -> f32 [B, K, M, C]."""
    scores = product("bkmp,bckp->bkmc", q, keys) * scale
    scores = scores.reshape(B, K, -1, W, scores.shape[-1])
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    return scores.reshape(B, K, -1, scores.shape[-1])

  own = masked_scores(block_keys, _own_block(W, window, causal)[None])
  top = jnp.max(own, -1)
  own = jnp.exp(own - top[..., None])
  total = jnp.sum(own, -1)
  acc = product("bkmv,bvkp->bkmp", own.astype(dtype), block_values)

  def add_chunk(index, sums):
    top, total, acc = sums
    # The last chunk is moved back to end with the cache; what it repeats of the
    # chunk before is masked.
    begin = jnp.minimum(index * chunk, S - chunk)
    sizes = (1, B, chunk, K, P)
    keys, values = (
      jax.lax.dynamic_slice(cache, (layer, 0, begin, 0, 0), sizes)[0]
      for cache in (cache_keys, cache_values)
    )
    positions = begin + jnp.arange(chunk)
    live = (positions >= index * chunk) & (positions < lengths[:, None])  # [B, C]
    scores = masked_scores(keys, live[:, None] & _near(rows, positions[None], window))
    new_top = jnp.maximum(top, jnp.max(scores, -1))
    scores = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    # A value of weight zero must count as zero even where it is NaN.
    values = jnp.where(live[..., None, None], values, 0)
    part = product("bkmc,bckp->bkmp", scores.astype(dtype), values)
    return (
      new_top,
      total * decay + jnp.sum(scores, -1),
      acc * decay[..., None] + part,
    )

  begin = 0
  if window is not None:
    begin = jnp.maximum(jnp.min(lengths) - (window - 1), 0) // chunk
  end = (jnp.minimum(jnp.max(lengths), S) + chunk - 1) // chunk
  _, total, acc = jax.lax.fori_loop(begin, end, add_chunk, (top, total, acc))
  out = (acc / total[..., None]).astype(dtype).reshape(B, K, -1, W, P)
  return jnp.moveaxis(out, 3, 1).reshape(B, W, H, P)


def whole_cache_attention(
  q: jax.Array,
  block_keys: jax.Array,
  block_values: jax.Array,
  cache_keys: jax.Array,
  cache_values: jax.Array,
  layer: int,
  lengths: jax.Array,
  *,
  window: int | None = None,
  causal: bool = False,
) -> jax.Array:
  """`cached_attention` as one product over the cache, or over the window.

  No loop, because a loop bound that depends on data costs a GPU more than the
  masked part of the product does.
  """
  keys, values, first = cache_keys[layer], cache_values[layer], None
  S = keys.shape[1]
  if window is not None and window - 1 < S:
    size = max(window - 1, 1)
    first = jnp.clip(lengths - size, 0, S - size)

    def cut(cache: jax.Array) -> jax.Array:
      return jax.vmap(
        lambda rows, begin: jax.lax.dynamic_slice_in_dim(rows, begin, size)
      )(cache, first)

    keys, values = cut(keys), cut(values)
  out = dense_attention(
    q[:, None],
    block_keys[:, None],
    block_values[:, None],
    keys,
    values,
    lengths[:, None],
    window=window,
    causal=causal,
    first=first,
  )
  return out[:, 0]


def cached_attention(
  q: jax.Array,
  block_keys: jax.Array,
  block_values: jax.Array,
  cache_keys: jax.Array,
  cache_values: jax.Array,
  layer: int,
  lengths: jax.Array,
  *,
  window: int | None = None,
  causal: bool = False,
) -> jax.Array:
  """Attention of one block per sequence to the cached context and to itself.

  Args:
    q: [B, W, H, P] queries after RoPE, at positions `lengths .. lengths + W - 1`.
    block_keys: [B, W, K, P] keys of the block after RoPE.
    block_values: [B, W, K, P].
    cache_keys: [layers, B, S, K, P]; rows at and beyond `lengths` are ignored.
    cache_values: likewise.
    layer: which layer of the cache to read.
    lengths: i32 [B] positions of live context, at most S.
    window: a sliding layer's window in tokens, None for full attention.
    causal: whether a row sees no later row of its block.

  Returns:
    [B, W, H, P] in the dtype of the values.
  """
  return jax.lax.platform_dependent(
    q,
    block_keys,
    block_values,
    cache_keys,
    cache_values,
    lengths,
    cpu=lambda q, k, v, ck, cv, n: chunked_attention(
      q, k, v, ck, cv, layer, n, window=window, causal=causal
    ),
    default=lambda q, k, v, ck, cv, n: whole_cache_attention(
      q, k, v, ck, cv, layer, n, window=window, causal=causal
    ),
  )
