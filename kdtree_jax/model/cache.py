"""The latent cache: all that a target keeps per committed token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kdtree_jax.config import ModelConfig
from kdtree_jax.ops.tree_attention import CHUNK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
  """Committed tokens of B sequences, S positions each.

  Attributes:
    data: [layers, B, S, R + P] in the model's dtype. Row p is the normed latent
      of the token at absolute position p (R values) and its roped key
      (P values, half-split order). Rows at and beyond the length are garbage.
    lengths: i32 [B] committed tokens.
  """

  data: jax.Array  # [layers, B, S, R + P]
  lengths: jax.Array  # i32 [B]

  @property
  def capacity(self) -> int:
    return self.data.shape[2]

  @classmethod
  def empty(
    cls, config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype
  ) -> LatentCache:
    """A cache of no tokens; `capacity` is rounded up to whole chunks.

    Args:
      config: of the target.
      slots: B, sequences.
      capacity: positions per sequence at least.
      dtype: the target's.
    """
    positions = round_up(capacity, CHUNK)
    shape = (config.num_hidden_layers, slots, positions, config.cache_width)
    return cls(jnp.zeros(shape, dtype), jnp.zeros((slots,), jnp.int32))


def round_up(value: int, multiple: int) -> int:
  """The smallest multiple that is at least `value`."""
  return -(-value // multiple) * multiple
