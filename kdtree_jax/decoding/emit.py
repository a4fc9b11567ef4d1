"""Appends what a round accepted to the texts: everything but models and caches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kdtree_jax.decoding.state import (
  DecodeState,
  Limits,
  append_tokens,
  end_full_or_failed,
)
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.ops import _implementation
from kdtree_jax.ops.best_token import NO_TOKEN

# Arrays of DecodeState that one call updates, in the order of the custom call.
_UPDATED = (
  "root",
  "finish",
  "generated",
  "rounds",
  "tokens",
  "logprobs",
  "accepted",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accepted:
  """What the target accepted of B trees with N slots.

  Attributes:
    token_ids: i32 [B, N] of the trees.
    choices: i32 [B, N] the target's token at each slot, or `NO_TOKEN`.
    path: i32 [B, A] accepted slots from the root, -1 padded.
    length: i32 [B] accepted slots, 1 .. A.
    bonus: i32 [B] the choice at the last of them.
    log_probs: f32 [B, A] of the choices on the path.
  """

  token_ids: jax.Array
  choices: jax.Array
  path: jax.Array
  length: jax.Array
  bonus: jax.Array
  log_probs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Commit:
  """What a round adds to each sequence.

  Attributes:
    length: i32 [B] slots of the path to commit to the caches; 0 where the slot was
      not running.
    kept: i32 [B] tokens appended to the text.
    path_tokens: i32 [B, A] the path's own tokens, from the root.
  """

  length: jax.Array
  kept: jax.Array
  path_tokens: jax.Array


def append(
  state: DecodeState, accepted: Accepted, limits: Limits, implementation: str
) -> tuple[DecodeState, Commit]:
  """Appends the choices along the path to the texts, and ends those that are done.

  Args:
    state: before the round. Its logits, and the keys of its cache, are left as they
      are; `cache.lengths` is brought up to date.
    accepted: by the target.
    limits: what ends a sequence.
    implementation: "auto", "xla" or "cuda" ("cuda" is one launch, in place).

  Returns:
    (state, what to commit).
  """
  # Without what no form touches: nothing large goes through the choice of the form.
  B = state.root.shape[0]
  lean = dataclasses.replace(
    state,
    cache=LatentCache(jnp.zeros((0,)), state.cache.lengths),
    drafter=(),
    logits=jnp.zeros((B, 0, 0)),
  )
  lean, commit = _implementation.dispatch(
    "emit", implementation, _cuda, _xla, lean, accepted, limits
  )
  cache = LatentCache(state.cache.data, lean.cache.lengths)
  new_state = dataclasses.replace(
    lean, cache=cache, drafter=state.drafter, logits=state.logits
  )
  return new_state, commit


def _cuda(
  state: DecodeState, accepted: Accepted, limits: Limits
) -> tuple[DecodeState, Commit]:
  """The custom call `custom_calls/emit.cu`."""
  updated = [getattr(state, name) for name in _UPDATED]
  results = [*updated, state.root, state.root, state.root, accepted.path]
  call = jax.ffi.ffi_call(
    "kdtree_jax.emit",
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    input_output_aliases={i: i for i in range(len(updated))},
    vmap_method="sequential",
  )
  *new, length, lengths, kept, path_tokens = call(
    *updated,
    accepted.token_ids,
    accepted.choices,
    accepted.path,
    accepted.length,
    accepted.bonus,
    accepted.log_probs,
    state.cache.lengths,
    limits.stop_tokens,
    limits.capacity,
  )
  new_state = dataclasses.replace(
    state,
    cache=LatentCache(state.cache.data, lengths),
    **dict(zip(_UPDATED, new, strict=True)),
  )
  return new_state, Commit(length, kept, path_tokens)


def _xla(
  state: DecodeState, accepted: Accepted, limits: Limits
) -> tuple[DecodeState, Commit]:
  running = state.running
  # Always true, but the compiler does not know: the write to the cache has to wait
  # for the logits. Else it may come before the last layer's reads (plain decoding
  # knows its path beforehand), and the compiler copies the whole cache.
  chosen = accepted.bonus >= NO_TOKEN
  length = jnp.where(running & chosen, accepted.length, 0)
  slots = jnp.maximum(accepted.path, 0)
  path_tokens = jnp.take_along_axis(accepted.token_ids, slots, axis=1, mode="clip")
  # The slot at index i of the path chose the token at index i of the new text: the
  # accepted drafts, and behind them the bonus.
  new_tokens = jnp.take_along_axis(accepted.choices, slots, axis=1, mode="clip")
  failed = accepted.bonus == NO_TOKEN
  count = length - (failed & running)
  state = dataclasses.replace(
    state, cache=LatentCache(state.cache.data, state.cache.lengths + length)
  )
  state, kept = append_tokens(
    state, new_tokens, accepted.log_probs, None, count, limits
  )
  state = _count_round(state, running, kept)
  state = end_full_or_failed(state, failed, limits)
  return state, Commit(length, kept, path_tokens)


def _count_round(
  state: DecodeState, running: jax.Array, kept: jax.Array
) -> DecodeState:
  """Notes how many tokens the round committed, where it committed any."""
  counted = running & (kept > 0)
  B, M = state.accepted.shape
  place = jnp.where(counted, state.rounds, M)
  accepted = state.accepted.at[jnp.arange(B), place].set(kept, mode="drop")
  return dataclasses.replace(
    state, accepted=accepted, rounds=state.rounds + counted.astype(jnp.int32)
  )


def keep_logits(
  state: DecodeState,
  logits: jax.Array,
  path: jax.Array,
  commit: Commit,
  generated: jax.Array,
) -> DecodeState:
  """Stores the logits of the appended tokens, where the state has room for them.

  Args:
    state: after `append`.
    logits: f32 [B, N, V] of all slots.
    path: i32 [B, A].
    commit: from `append`.
    generated: i32 [B] tokens before the round.
  """
  if not state.logits.shape[1]:
    return state
  M, i = state.logits.shape[1], jnp.arange(path.shape[1])
  slots = jnp.maximum(path, 0)[:, :, None]
  rows = jnp.take_along_axis(logits, slots, axis=1, mode="clip")
  # Beyond the end, all distinct: dropped.
  place = jnp.where(i < commit.kept[:, None], generated[:, None] + i, M + i)
  sequence = jnp.arange(path.shape[0])[:, None]
  kept = state.logits.at[sequence, place].set(rows, mode="drop", unique_indices=True)
  return dataclasses.replace(state, logits=kept)
