"""Prompts into the cache, in chunks of one static width, ragged in one batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.decoding.rounds import verify_step
from kdtree_jax.decoding.sampling import NO_TOKEN, Sampler
from kdtree_jax.decoding.state import (
  DecodeState,
  Limits,
  append_tokens,
  end_full_or_failed,
)
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target
from kdtree_jax.ops.compaction import compact
from kdtree_jax.ops.token_log_probs import token_log_probs
from kdtree_jax.tree import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillState:
  """While prompts are read.

  Attributes:
    cache: as in `DecodeState`.
    drafter: the drafter's state.
    logits: f32 [B, V] after each sequence's last prompt token so far.
  """

  cache: LatentCache
  drafter: Any
  logits: jax.Array


def prefill_chunk(
  target: Target,
  drafter: Any,
  state: PrefillState,
  tokens: jax.Array,
  count: jax.Array,
  feature_layers: tuple[int, ...],
  implementation: str,
) -> tuple[PrefillState, jax.Array]:
  """Appends up to C prompt tokens to each sequence.

  A chunk is a chain in the tree step, so a prompt's rows are computed exactly as
  decoding would compute them at this width, and a sequence's rows do not depend
  on its neighbours.

  Args:
    target: the model.
    drafter: told about the tokens, or None.
    state: before.
    tokens: i32 [B, C], garbage from `count` on.
    count: i32 [B], 0 .. C; 0 leaves a sequence as it is.
    feature_layers: taps; the drafter's where there is one.
    implementation: of the ops.

  Returns:
    (state, features [B, C, taps * D]).
  """
  B, C = tokens.shape
  lengths = state.cache.lengths
  slots = jnp.arange(C, dtype=jnp.int32)
  live = slots < count[:, None]
  tree = Tree(
    token_ids=jnp.where(live, tokens, 0),
    parents=jnp.where(live, slots - 1, -1),
    depths=jnp.where(live, slots, 0),
    log_probs=jnp.where(live, 0.0, -jnp.inf),
    size=count,
  )
  logits, features, keys = verify_step(
    target, state.cache, tree, feature_layers, implementation
  )
  path = jnp.broadcast_to(slots, (B, C))
  last = jnp.maximum(count - 1, 0)[:, None, None]
  last_logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
  # Always true: the write waits for the last layer's reads, see decoding/emit.py.
  chosen = jnp.argmax(last_logits, axis=-1) >= 0
  written = jnp.where(chosen, count, 0)
  data = compact(
    state.cache.data, keys, path, written, lengths, implementation=implementation
  )
  drafter_state = state.drafter
  if drafter is not None:
    drafter_state = drafter.observe(
      target, drafter_state, tree.token_ids, features, lengths, count
    )
  new_state = PrefillState(
    cache=LatentCache(data, lengths + count),
    drafter=drafter_state,
    logits=jnp.where((count > 0)[:, None], last_logits, state.logits),
  )
  return new_state, features


def first_tokens(
  state: DecodeState,
  logits: jax.Array,
  admitted: jax.Array,
  sequence_ids: jax.Array,
  sampler: Sampler,
  limits: Limits,
) -> DecodeState:
  """Starts the admitted slots with the token that follows their prompts.

  Args:
    state: with the prompts already in the cache.
    logits: f32 [B, V] after the prompts' last tokens.
    admitted: bool [B]; the other slots stay as they are.
    sequence_ids: i32 [B].
    sampler, limits: as in decoding.
  """

  def choose_where(new: jax.Array | int, old: jax.Array) -> jax.Array:
    return jnp.where(admitted, new, old)

  zero = jnp.zeros_like(state.generated)
  started = dataclasses.replace(
    state,
    sequence_ids=choose_where(sequence_ids, state.sequence_ids),
    finish=choose_where(DecodeState.RUNNING, state.finish),
    generated=choose_where(zero, state.generated),
    rounds=choose_where(zero, state.rounds),
  )
  choices = sampler.choose(
    logits[:, None], started.sequence_ids, state.cache.lengths, zero[:, None], 0, "xla"
  )
  failed = choices[:, 0] == NO_TOKEN
  count = (admitted & ~failed).astype(jnp.int32)
  running_before = state.running
  # Slots that were running already get no token here.
  masked = dataclasses.replace(
    started, finish=jnp.where(admitted, started.finish, DecodeState.IDLE)
  )
  log_probs = token_log_probs(
    logits[:, None], choices, zero[:, None], implementation="xla"
  )
  new_state, _ = append_tokens(
    masked, choices, log_probs, logits[:, None], count, limits
  )
  new_state = end_full_or_failed(new_state, failed & admitted, limits)
  return dataclasses.replace(
    new_state,
    finish=jnp.where(
      admitted,
      new_state.finish,
      jnp.where(running_before, DecodeState.RUNNING, state.finish),
    ),
  )
