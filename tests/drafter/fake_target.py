"""A target reduced to what a drafter uses, and drafters with lively weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import DrafterConfig, YarnConfig
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.reference.weights import random_drafter_weights

VOCAB, WIDTH, MASK = 37, 24, 36

KIMI_YARN = YarnConfig(
  factor=64.0,
  original_max_position_embeddings=32,
  beta_fast=32.0,
  beta_slow=1.0,
  mscale=1.0,
  mscale_all_dim=1.0,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeTarget:
  """An embedding and a head, without a model between them."""

  table: jax.Array  # [V, D]
  kernel: jax.Array  # [D, V]

  def embed(self, tokens: jax.Array) -> jax.Array:
    return self.table[tokens]

  def head(self, hidden: jax.Array) -> jax.Array:
    return jnp.einsum("...d,dv->...v", hidden.astype(jnp.float32), self.kernel)

  def state_dict(self) -> dict[str, np.ndarray]:
    return {
      "model.embed_tokens.weight": np.asarray(self.table),
      "lm_head.weight": np.asarray(self.kernel).T,
    }


def make_target(seed: int = 0) -> FakeTarget:
  rng = np.random.default_rng(seed)
  table = rng.normal(size=(VOCAB, WIDTH))
  kernel = rng.normal(size=(WIDTH, VOCAB)) * WIDTH**-0.5
  return FakeTarget(jnp.asarray(table, jnp.float32), jnp.asarray(kernel, jnp.float32))


def make_config(**overrides: Any) -> DrafterConfig:
  values = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "block_size": 6,
    "mask_token_id": MASK,
    "target_layer_ids": (1, 3),
    "num_target_layers": 6,
    "target_hidden_size": WIDTH,
    "layer_types": ("full_attention", "full_attention"),
    "sliding_window": None,
  }
  return DrafterConfig(**(values | overrides))


def make_drafter(config: DrafterConfig, seed: int = 1, dtype=jnp.float32) -> DFlash:
  return DFlash.from_state_dict(config, random_drafter_weights(config, seed), dtype)


def make_text(
  config: DrafterConfig, batch: int, length: int, seed: int = 2
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i32 [B, T] and features f32 [B, T, taps * D]."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, VOCAB - 1, size=(batch, length)).astype(np.int32)
  width = len(config.target_layer_ids) * config.target_hidden_size
  return tokens, rng.normal(size=(batch, length, width)).astype(np.float32)
