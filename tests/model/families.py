"""Tiny configurations with the settings of each published family."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import ModelConfig, YarnConfig
from kdtree_jax.model import Target, target_from_state_dict
from kdtree_jax.reference import random_weights

VOCAB = 61


def yarn(factor: float, mscale: float = 1.0, beta_fast: float = 32.0) -> YarnConfig:
  return YarnConfig(
    factor=factor,
    original_max_position_embeddings=4096,
    beta_fast=beta_fast,
    beta_slow=1.0,
    mscale=mscale,
    mscale_all_dim=mscale,
  )


# Kimi K2.6; what another family changes stands below.
KIMI = {
  "vocab_size": VOCAB,
  "hidden_size": 32,
  "intermediate_size": 48,
  "moe_intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "q_lora_rank": 24,
  "kv_lora_rank": 16,
  "qk_nope_head_dim": 12,
  "qk_rope_head_dim": 8,
  "v_head_dim": 10,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "n_shared_experts": 1,
  "n_group": 1,
  "topk_group": 1,
  "norm_topk_prob": True,
  "routed_scaling_factor": 2.827,
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
  "first_k_dense_replace": 1,
  "rms_norm_eps": 1e-5,
  "latent_norm_eps": 1e-6,
  "rope_theta": 50000.0,
  "rope_scaling": yarn(64.0),
  "rope_interleave": True,
  "max_position_embeddings": 512,
  "tie_word_embeddings": False,
}

FAMILIES = {
  "kimi": {},
  # Its experts are more than run on every row: rows are grouped by expert.
  "deepseek_v3": {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "n_routed_experts": 24,
    "num_experts_per_tok": 5,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": yarn(40.0),
  },
  "moonlight": {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
    "rope_scaling": None,
  },
  "v2_lite": {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": yarn(40.0, mscale=0.707),
  },
  # What no published model has, and a step in the rope table as in the first Kimi K2.
  "other": {
    "tie_word_embeddings": True,
    "rope_interleave": False,
    "rope_angle_dtype": "float32",
    "rope_scaling": yarn(32.0, beta_fast=1.0),
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
  },
}


def family_config(family: str, **changes) -> ModelConfig:
  return ModelConfig(**(KIMI | FAMILIES[family] | changes))


@functools.cache
def family_weights(family: str) -> dict[str, np.ndarray]:
  """Random weights under which logits reach about 3, the size of a trained model's
  differences between likely tokens."""
  weights = random_weights(family_config(family), 1)
  weights["model.norm.weight"] *= np.float32(0.25)
  return weights


@functools.cache
def family_target(family: str, dtype: str = "float32") -> Target:
  return target_from_state_dict(
    family_config(family), family_weights(family), dtype=jnp.dtype(dtype)
  )


def random_tokens(shape: int | tuple[int, ...], seed: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


@jax.jit
def sequence_logits(target: Target, tokens: jax.Array) -> jax.Array:
  """f32 [B, T, V], the form without a cache."""
  return target.head(target.sequence(tokens)[0])


@jax.jit
def step(
  target: Target,
  tokens: jax.Array,
  ancestors: jax.Array,
  depths: jax.Array,
  cache: jax.Array,
  lengths: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(logits [B, N, V], residual streams of layers 1 and 0, tree keys)."""
  hidden, features, keys = target.step(
    tokens, ancestors, depths, cache, lengths, feature_layers=(1, 0)
  )
  return target.head(hidden), features, keys
