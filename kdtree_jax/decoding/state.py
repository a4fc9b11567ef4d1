"""The state of the decoding loop: one frozen dataclass that one program carries."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kdtree_jax.model.cache import LatentCache
from kdtree_jax.tree import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """B slots, each holding one sequence.

  Attributes:
    cache: committed tokens. `cache.lengths` counts them; the root, the last
      token of the text, has no row yet.
    drafter: the drafter's own state.
    root: i32 [B] last token of each text, at absolute position `lengths`.
    sequence_ids: i32 [B] for the sampling noise and for scripted drafters.
    finish: i32 [B], RUNNING while the slot decodes, else why it ended.
    generated: i32 [B] tokens generated, the first one included.
    tokens: i32 [B, M] generated tokens, garbage from `generated` on.
    logprobs: f32 [B, M] fp32 log-softmax of the raw logits at each token.
    logits: f32 [B, M, V] raw logits each token was chosen from, or [B, 0, V].
    rounds: i32 [B] rounds taken.
    accepted: i32 [B, M] tokens committed by each round.
  """

  RUNNING: ClassVar[int] = 0
  STOP: ClassVar[int] = 1
  LENGTH: ClassVar[int] = 2
  CACHE: ClassVar[int] = 3
  ERROR: ClassVar[int] = 4
  IDLE: ClassVar[int] = 5
  REASONS: ClassVar[dict[int, str]] = {
    1: "stop",
    2: "length",
    3: "cache",
    4: "error",
  }

  cache: LatentCache
  drafter: Any
  root: jax.Array  # i32 [B]
  sequence_ids: jax.Array  # i32 [B]
  finish: jax.Array  # i32 [B]
  generated: jax.Array  # i32 [B]
  tokens: jax.Array  # i32 [B, M]
  logprobs: jax.Array  # f32 [B, M]
  logits: jax.Array  # f32 [B, M or 0, V]
  rounds: jax.Array  # i32 [B]
  accepted: jax.Array  # i32 [B, M]

  @property
  def running(self) -> jax.Array:
    return self.finish == self.RUNNING

  @classmethod
  def empty(
    cls,
    cache: LatentCache,
    drafter_state: Any,
    max_new_tokens: int,
    vocab_size: int,
    keep_logits: bool,
  ) -> DecodeState:
    """All slots idle."""
    B, M = cache.lengths.shape[0], max_new_tokens

    def zeros(*shape: int) -> jax.Array:
      # A buffer of its own for each field: the state is donated.
      return jnp.zeros(shape, jnp.int32)

    return cls(
      cache=cache,
      drafter=drafter_state,
      root=zeros(B),
      sequence_ids=zeros(B),
      finish=jnp.full((B,), cls.IDLE, jnp.int32),
      generated=zeros(B),
      tokens=zeros(B, M),
      logprobs=jnp.zeros((B, M), jnp.float32),
      logits=jnp.zeros((B, M if keep_logits else 0, vocab_size), jnp.float32),
      rounds=zeros(B),
      accepted=zeros(B, M),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
  """What ends a sequence.

  Attributes:
    stop_tokens: i32 [K], padded with -1.
    capacity: i32 [], positions a sequence may fill.
    budget: i32 [], tree nodes without the root, at most the program's rows - 1.
  """

  stop_tokens: jax.Array
  capacity: jax.Array
  budget: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundTrace:
  """What happened in one round, kept on request.

  Attributes:
    tree: the draft tree.
    draft_logits: f32 [B, L, V] the drafter's table.
    path: i32 [B, A] accepted slots, -1 padded.
    length: i32 [B] accepted slots (0 where the slot was not running).
    start: i32 [B] absolute position of the root.
  """

  tree: Tree
  draft_logits: jax.Array
  path: jax.Array
  length: jax.Array
  start: jax.Array


def append_tokens(
  state: DecodeState,
  new_tokens: jax.Array,
  log_probs: jax.Array,
  new_logits: jax.Array | None,
  count: jax.Array,
  limits: Limits,
) -> tuple[DecodeState, jax.Array]:
  """Appends tokens to the running slots and finds out which of them ended.

  The text is cut after the first stop token and at M tokens, exactly where
  decoding one token at a time would have ended.

  Args:
    state: before the append; `cache.lengths` already counts the tokens whose
      keys were committed.
    new_tokens: i32 [B, A] in order.
    log_probs: f32 [B, A] of the tokens.
    new_logits: f32 [B, A, V] raw logits that each was chosen from; None leaves the
      state's as they are.
    count: i32 [B] how many of them were chosen, 0 .. A.
    limits: what ends a sequence.

  Returns:
    (state, i32 [B] tokens that were appended after the cut).
  """
  B, A = new_tokens.shape
  M = state.tokens.shape[1]
  i = jnp.arange(A, dtype=jnp.int32)
  stops = jnp.any(new_tokens[:, :, None] == limits.stop_tokens, axis=-1)
  stops &= i < count[:, None]
  first_stop = jnp.min(jnp.where(stops, i, A), axis=1)
  room = M - state.generated
  kept = jnp.minimum(jnp.minimum(count, first_stop + 1), room)
  kept = jnp.where(state.running, kept, 0)

  place = state.generated[:, None] + i
  place = jnp.where(i < kept[:, None], place, M + i)  # beyond the end: dropped
  row = jnp.arange(B)[:, None]

  def write(buffer: jax.Array, values: jax.Array) -> jax.Array:
    return buffer.at[row, place].set(values, mode="drop", unique_indices=True)

  logits = state.logits
  if new_logits is not None and logits.shape[1]:
    logits = write(logits, new_logits)
  generated = state.generated + kept
  finish = jnp.select(
    [~state.running, first_stop < kept, generated >= M],
    [state.finish, state.STOP, state.LENGTH],
    state.RUNNING,
  )
  last = jnp.take_along_axis(
    new_tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1, mode="clip"
  )[:, 0]
  new_state = dataclasses.replace(
    state,
    root=jnp.where(kept > 0, last, state.root),
    finish=finish,
    generated=generated,
    tokens=write(state.tokens, new_tokens),
    logprobs=write(state.logprobs, log_probs),
    logits=logits,
  )
  return new_state, kept


def end_full_or_failed(
  state: DecodeState, failed: jax.Array, limits: Limits
) -> DecodeState:
  """Ends running slots whose logits were bad, or whose cache has no free row."""
  full = state.cache.lengths >= limits.capacity
  finish = jnp.select(
    [~state.running, failed, full],
    [state.finish, state.ERROR, state.CACHE],
    state.RUNNING,
  )
  return dataclasses.replace(state, finish=finish)
