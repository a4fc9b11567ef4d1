"""Small configurations for the tests of the numpy reference."""

from __future__ import annotations

import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig, YarnConfig

KIMI_YARN = YarnConfig(
  factor=64.0,
  original_max_position_embeddings=4096,
  beta_fast=32.0,
  beta_slow=1.0,
  mscale=1.0,
  mscale_all_dim=1.0,
)


def target_config(**changes) -> ModelConfig:
  """A target of three layers with groups, bias, YaRN and a shared expert."""
  fields = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "latent_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": KIMI_YARN,
    "rope_interleave": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
  }
  return ModelConfig(**(fields | changes))


def drafter_config(**changes) -> DrafterConfig:
  """A drafter for `target_config`: two layers, one of them sliding, two taps."""
  fields = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "block_size": 5,
    "mask_token_id": 60,
    "target_layer_ids": (0, 1),
    "num_target_layers": 3,
    "target_hidden_size": 32,
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 4,
  }
  return DrafterConfig(**(fields | changes))


def random_tokens(count: int, seed: int, vocab_size: int = 61) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int32)
