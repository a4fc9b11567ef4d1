"""The steps of decoding as separate functions, for experiments and checks.

They are what the loop is made of: `prefill`, then per round `draft`,
`build_tree`, `verify`, `accept_tree` and `commit`. All are pure and jittable.
Shape letters: B sequences, T tokens, N tree slots, L drafter depth, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from kdtree_jax.decoding.prefill import PrefillState, prefill_chunk
from kdtree_jax.decoding.rounds import verify_step
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target
from kdtree_jax.ops.compaction import compact
from kdtree_jax.tree import Tree

PREFILL_CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
  """What a drafter knows of B texts.

  Attributes:
    state: the drafter's own.
    lengths: i32 [B] committed tokens.
  """

  state: Any
  lengths: jax.Array


def forward(model: Target, tokens: jax.Array) -> jax.Array:
  """Logits of whole sequences, causal, without a cache.

  Args:
    model: the target.
    tokens: i32 [B, T], T at most `max_position_embeddings`.

  Returns:
    f32 [B, T, V]; row t is about the token at t + 1.

  Raises:
    ValueError: tokens has another rank, or is too long.
  """
  tokens = _tokens(model, tokens)
  hidden, _, _ = model.sequence(tokens)
  return model.head(hidden)


def prefill(
  target: Target,
  tokens: jax.Array,
  cache_len: int,
  *,
  lengths: jax.Array | None = None,
  feature_layers: Sequence[int] = (),
  implementation: str = "auto",
) -> tuple[LatentCache, jax.Array, jax.Array]:
  """Reads prompts into a fresh cache.

  Args:
    target: the model.
    tokens: i32 [B, T], prompts padded at the end.
    cache_len: positions of the cache; rounded up to whole chunks.
    lengths: i32 [B] tokens of each prompt, 1 .. T; None means all are T long.
    feature_layers: layers after which the residual stream is tapped (a
      drafter's `feature_layers`).
    implementation: of the ops.

  Returns:
    (cache, f32 [B, V] logits after each prompt's last token, features
    [B, T, taps * D], garbage beyond a prompt's length).

  Raises:
    ValueError: tokens do not fit the cache.
  """
  tokens = _tokens(target, tokens)
  B, T = tokens.shape
  if cache_len < T:
    raise ValueError(f"cache_len = {cache_len} is shorter than the {T} prompt tokens")
  lengths = jnp.full((B,), T) if lengths is None else jnp.asarray(lengths)
  lengths = lengths.astype(jnp.int32)
  _check_values("lengths", lengths, (B,), 1, T)
  cache = LatentCache.empty(target.config, B, cache_len, target.dtype)
  state = PrefillState(cache, (), jnp.zeros((B, target.config.vocab_size), jnp.float32))
  features = []
  for start in range(0, T, PREFILL_CHUNK):
    chunk = tokens[:, start : start + PREFILL_CHUNK]
    chunk = jnp.pad(chunk, ((0, 0), (0, PREFILL_CHUNK - chunk.shape[1])))
    count = jnp.clip(lengths - start, 0, PREFILL_CHUNK)
    state, part = prefill_chunk(
      target, None, state, chunk, count, tuple(feature_layers), implementation
    )
    features.append(part)
  return state.cache, state.logits, jnp.concatenate(features, axis=1)[:, :T]


def verify(
  target: Target,
  cache: LatentCache,
  tree: Tree,
  *,
  feature_layers: Sequence[int] = (),
  implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The target's forward pass over draft trees.

  Args:
    target: the model.
    cache: committed tokens; the roots sit at `cache.lengths`.
    tree: N slots each.
    feature_layers: layers to tap; the drafter's `feature_layers`, where the
      features are to go to `observe`.
    implementation: of the ops.

  Returns:
    (logits f32 [B, N, V]: row n is about the token after node n; features
    [B, N, taps * D]; tree keys [layers, B, N, R + P]).
  """
  return verify_step(target, cache, tree, tuple(feature_layers), implementation)


def commit(
  cache: LatentCache,
  tree_keys: jax.Array,
  path: jax.Array,
  length: jax.Array,
  *,
  implementation: str = "auto",
) -> LatentCache:
  """Appends the accepted path's keys to the cache.

  Args:
    cache: before.
    tree_keys: [layers, B, N, R + P] from `verify`.
    path: i32 [B, A] accepted slots from the root, -1 padded, from `accept_tree`.
    length: i32 [B] accepted slots.
    implementation: of the op.
  """
  data = compact(
    cache.data, tree_keys, path, length, cache.lengths, implementation=implementation
  )
  return LatentCache(data, cache.lengths + length)


def draft_context(drafter: Any, slots: int, cache_len: int) -> DraftContext:
  """The context of `slots` empty texts that may grow to `cache_len` tokens."""
  return DraftContext(
    drafter.init_state(slots, cache_len), jnp.zeros((slots,), jnp.int32)
  )


def observe(
  drafter: Any,
  target: Target,
  context: DraftContext,
  tokens: jax.Array,
  features: jax.Array,
  count: jax.Array,
) -> DraftContext:
  """Tells the drafter about committed tokens.

  Args:
    drafter: follows `kdtree_jax.drafter.Drafter`.
    target: its target.
    context: before.
    tokens: i32 [B, T], the next committed tokens, garbage from `count` on.
    features: [B, T, taps * D] of those tokens, from `prefill` or `verify`.
    count: i32 [B].
  """
  state = drafter.observe(
    target, context.state, tokens, features, context.lengths, count
  )
  return DraftContext(state, context.lengths + count)


def draft(
  drafter: Any,
  target: Target,
  context: DraftContext,
  root_tokens: jax.Array,
  sequence_ids: jax.Array | None = None,
) -> jax.Array:
  """The drafter's logits for the tokens after the roots.

  Args:
    drafter: follows `kdtree_jax.drafter.Drafter`.
    target: its target, whose embedding and head it may use.
    context: of all tokens before the roots.
    root_tokens: i32 [B] last token of each text.
    sequence_ids: i32 [B]; only scripted drafters need them.

  Returns:
    f32 [B, L, V]; row d is about the token d + 1 after the root.
  """
  if sequence_ids is None:
    sequence_ids = jnp.arange(root_tokens.shape[0], dtype=jnp.int32)
  return drafter.draft(
    target, context.state, root_tokens, context.lengths, sequence_ids
  )


def _tokens(target: Target, tokens: jax.Array) -> jax.Array:
  tokens = jnp.asarray(tokens)
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(f"tokens must be integers; they are {tokens.dtype}")
  tokens = tokens.astype(jnp.int32)
  if tokens.ndim != 2 or 0 in tokens.shape:
    raise ValueError(
      f"tokens must be [B, T] and not empty; its shape is {tokens.shape}"
    )
  limit = target.config.max_position_embeddings
  if tokens.shape[1] > limit:
    raise ValueError(
      f"tokens is {tokens.shape[1]} long; the target's max_position_embeddings is "
      f"{limit}"
    )
  _check_values("tokens", tokens, tokens.shape, 0, target.config.vocab_size - 1)
  return tokens


def _check_values(
  name: str, values: jax.Array, shape: tuple[int, ...], low: int, high: int
) -> None:
  """Shape always, values where they are known (not under `jax.jit`)."""
  if values.shape != shape:
    raise ValueError(f"{name} must have shape {shape}; it has {values.shape}")
  if isinstance(values, jax.core.Tracer):
    return
  known = np.asarray(values)  # numpy, since under `jax.jit` jnp would trace it
  if ((known < low) | (known > high)).any():
    raise ValueError(f"{name} must lie between {low} and {high}; they are {known}")
