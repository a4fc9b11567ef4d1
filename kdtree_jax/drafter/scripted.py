"""A drafter of known quality: it reads the continuation from a script.

Decoding must give the same text whatever the drafter; this one makes the point at
any chosen accuracy, from always wrong to always right, without a trained model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.config import ConfigError

FIRST_WEIGHT = 0.7
SECOND_WEIGHT = 0.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted:
  """Proposes a scripted text, with mistakes; a `Drafter` without state.

  For every (sequence id, absolute position) a hash decides, the same in every
  round, batch and run:

  - with probability `accuracy` a hit: the true token ranks first;
  - otherwise a miss: a wrong token ranks first. In half of the misses the true
    token ranks second, for a tree to find; in the other half, and in all of them
    where `accuracy` is 0, its logit is -inf, so that no tree can hold it.

  The logits are those of a distribution that gives 0.7 to the first token, 0.2
  to the second (a wrong one unless said otherwise) and 0.1 to all tokens alike,
  renormalised where the true token is ruled out.

  Attributes:
    continuations: i32 [num_sequences, T_total], the whole texts, prompts
      included, by sequence id and absolute position. Beyond its end every
      proposal is a miss.
    accuracy: probability of a hit, 0 to 1.
    vocab_size: V, the target's, 3 or more (true, wrong, and another wrong one).
    depth: L, tokens proposed per pass.
  """

  continuations: jax.Array  # [num_sequences, T_total]
  accuracy: float = dataclasses.field(metadata={"static": True})
  vocab_size: int = dataclasses.field(metadata={"static": True})
  depth: int = dataclasses.field(default=15, metadata={"static": True})

  def __post_init__(self) -> None:
    if not 0 <= self.accuracy <= 1:
      raise ConfigError(
        f"accuracy = {self.accuracy} is not allowed: it is a probability, 0 to 1"
      )
    if self.vocab_size < 3:
      raise ConfigError(
        f"vocab_size = {self.vocab_size} is not allowed: it must be at least 3"
      )
    if self.depth < 1:
      raise ConfigError(f"depth = {self.depth} is not allowed: it must be at least 1")

  @property
  def max_depth(self) -> int:
    return self.depth

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return ()

  def init_state(self, slots: int, cache_len: int) -> tuple[()]:
    """Nothing needs to be remembered."""
    del slots, cache_len
    return ()

  def observe(
    self,
    target: Any,
    state: tuple[()],
    tokens: jax.Array,
    features: jax.Array,
    start: jax.Array,
    count: jax.Array,
  ) -> tuple[()]:
    """Nothing needs to be remembered."""
    del target, tokens, features, start, count
    return state

  def draft(
    self,
    target: Any,
    state: tuple[()],
    root_tokens: jax.Array,
    lengths: jax.Array,
    sequence_ids: jax.Array,
  ) -> jax.Array:
    """Logits f32 [B, depth, V]; see the class and `Drafter.draft`.

    The root's token is not looked at: the script goes by position.
    """
    del target, state, root_tokens
    V = self.vocab_size
    count, total = self.continuations.shape
    positions = lengths[:, None] + 1 + jnp.arange(self.depth)  # [B, L]
    row = jnp.clip(sequence_ids, 0, count - 1)[:, None]
    scripted = positions < total
    true = self.continuations[row, jnp.minimum(positions, total - 1)]

    bits = _hash(sequence_ids[:, None], positions)
    # 24 bits, exact in f32: below 1 for every hash, so that accuracy 1 never misses.
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24
    hit = (uniform < self.accuracy) & scripted
    bits = _mix(bits ^ jnp.uint32(0x9E3779B9))
    findable = ((bits & 1) == 0) & (self.accuracy > 0) & scripted
    # Two distinct distances in 1 .. V - 1 from the true token.
    near = (bits >> 1) % jnp.uint32(V - 1)
    far = (near + 1 + (_mix(bits) >> 1) % jnp.uint32(V - 2)) % jnp.uint32(V - 1)
    wrong, other = (
      (true + 1 + distance.astype(jnp.int32)) % V for distance in (near, far)
    )

    first = jnp.where(hit, true, wrong)
    second = jnp.where(hit | ~findable, other, true)
    tokens = jnp.arange(V)
    weights = (
      FIRST_WEIGHT * (tokens == first[..., None])
      + SECOND_WEIGHT * (tokens == second[..., None])
      + (1.0 - FIRST_WEIGHT - SECOND_WEIGHT) / V
    )
    hidden = (~hit & ~findable)[..., None] & (tokens == true[..., None])
    return jnp.where(hidden, -jnp.inf, jnp.log(weights))


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of uint32 whose every output bit depends on every input bit.

  The 32-bit finaliser of MurmurHash3.
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _hash(sequence_ids: jax.Array, positions: jax.Array) -> jax.Array:
  """uint32 of (sequence id, position), broadcast against each other."""
  seed = _mix(sequence_ids.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
  return _mix(seed ^ _mix(positions.astype(jnp.uint32)))
