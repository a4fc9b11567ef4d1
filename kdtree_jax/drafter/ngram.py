"""Prompt look-up: proposes what followed the last time the text ended like this.

It needs no training and no features, costs next to nothing, and does well where
a text repeats itself (edits, quotations, code): a baseline that a trained
drafter has to beat (apoorvumang/prompt-lookup-decoding; vLLM's "ngram" drafter).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.config import ConfigError

FIRST_WEIGHT = 0.75
SECOND_WEIGHT = 0.15


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGramState:
  """The text so far.

  Attributes:
    history: i32 [B, S], token at each position; -1 where none was observed.
  """

  history: jax.Array  # [B, S]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGram:
  """An n-gram look-up drafter; a `kdtree_jax.drafter.base.Drafter`.

  The text's last n tokens, the root included, are looked up in the text itself,
  n from `max_ngram` down to 1; of the occurrences of the longest one found the
  latest is taken, and as an alternative the best (by the same rule) of those that
  another token followed. What followed an occurrence is proposed. Where that runs
  into the end of the text it goes on from the occurrence, as if the text had
  become periodic.

  The logits are those of the mixture of the first proposal (0.75, or 0.9
  without an alternative), the second (0.15) and all tokens alike (0.1); uniform
  if nothing was found.

  Attributes:
    vocab_size: V, the target's.
    depth: L, tokens proposed per pass.
    max_ngram: longest suffix looked up, in tokens.
  """

  vocab_size: int = dataclasses.field(metadata={"static": True})
  depth: int = dataclasses.field(default=15, metadata={"static": True})
  max_ngram: int = dataclasses.field(default=4, metadata={"static": True})

  def __post_init__(self) -> None:
    for field in ("vocab_size", "depth", "max_ngram"):
      if getattr(self, field) < 1:
        raise ConfigError(
          f"{field} = {getattr(self, field)} is not allowed: it must be at least 1"
        )

  @property
  def max_depth(self) -> int:
    return self.depth

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return ()

  def init_state(self, slots: int, cache_len: int) -> NGramState:
    """No text in any of `slots` sequences of up to `cache_len` tokens."""
    return NGramState(history=jnp.full((slots, cache_len), -1, jnp.int32))

  def observe(
    self,
    target: Any,
    state: NGramState,
    tokens: jax.Array,
    features: jax.Array,
    start: jax.Array,
    count: jax.Array,
  ) -> NGramState:
    """Writes the committed tokens down; see `Drafter.observe`."""
    del target, features
    slots, size = state.history.shape
    rows = jnp.arange(tokens.shape[1])
    where = jnp.where(rows < count[:, None], start[:, None] + rows, size)
    slot = jnp.arange(slots)[:, None]
    return NGramState(history=state.history.at[slot, where].set(tokens, mode="drop"))

  def draft(
    self,
    target: Any,
    state: NGramState,
    root_tokens: jax.Array,
    lengths: jax.Array,
    sequence_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Logits f32 [B, depth, V] of the mixture; see `Drafter.draft`."""
    del target, sequence_ids
    slots, size = state.history.shape
    slot = jnp.arange(slots)[:, None]
    text = jnp.pad(state.history, ((0, 0), (0, 1)))  # room for a root at size
    text = text.at[slot, lengths[:, None]].set(root_tokens[:, None])
    ends = jnp.arange(size + 1)  # last position of an occurrence

    # match[b, e]: how many tokens up to e equal as many up to the root.
    match = jnp.zeros((slots, size + 1), jnp.int32)
    run = ends < lengths[:, None]
    for back in range(self.max_ngram):
      suffix = jnp.take_along_axis(text, jnp.maximum(lengths - back, 0)[:, None], 1)
      shifted = jnp.roll(text, back, axis=1)
      run &= (shifted == suffix) & (ends >= back)
      match += run

    score = jnp.where(match > 0, match * (size + 1) + ends, -1)
    first = jnp.argmax(score, axis=1)[:, None]
    has_first = score[slot, first] >= 0
    # An alternative that begins like the first proposal would add no branch.
    following = jnp.roll(text, -1, axis=1)
    score = jnp.where(following == following[slot, first], -1, score)
    second = jnp.argmax(score, axis=1)[:, None]
    has_second = score[slot, second] >= 0

    def followers(end: jax.Array) -> jax.Array:
      """i32 [B, L]: what followed position `end`, periodically."""
      period = jnp.maximum(lengths[:, None] - end, 1)
      at = end + 1 + jnp.arange(self.depth) % period
      return jnp.take_along_axis(text, at, axis=1, mode="clip")

    def one_hot(tokens: jax.Array) -> jax.Array:
      return (tokens[..., None] == jnp.arange(self.vocab_size)).astype(jnp.float32)

    second_weight = jnp.where(has_second, SECOND_WEIGHT, 0.0)
    first_weight = jnp.where(has_first, FIRST_WEIGHT + SECOND_WEIGHT, 0.0)
    first_weight = first_weight - second_weight
    rest = 1.0 - FIRST_WEIGHT - SECOND_WEIGHT
    rest = jnp.where(has_first, rest, 1.0) / self.vocab_size
    mixture = (
      first_weight[..., None] * one_hot(followers(first))
      + second_weight[..., None] * one_hot(followers(second))
      + rest[..., None]
    )
    return jnp.log(mixture)
