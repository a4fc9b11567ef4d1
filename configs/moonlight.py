"""Moonlight-16B-A3B-Instruct: plain query projection, no YaRN.

Values: THUDM/slime, scripts/models/moonlight.sh, and the published config.json.
"""

from __future__ import annotations

from kdtree_jax.config import DecodeConfig, ModelConfig
from kdtree_jax.training.config import Experiment


def get_config() -> Experiment:
  """The configuration."""
  return Experiment(
    model=ModelConfig(
      vocab_size=163840,
      hidden_size=2048,
      intermediate_size=11264,
      moe_intermediate_size=1408,
      num_hidden_layers=27,
      num_attention_heads=16,
      q_lora_rank=None,
      kv_lora_rank=512,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      v_head_dim=128,
      n_routed_experts=64,
      num_experts_per_tok=6,
      n_shared_experts=2,
      n_group=1,
      topk_group=1,
      norm_topk_prob=True,
      routed_scaling_factor=2.446,
      scoring_func="sigmoid",
      topk_method="noaux_tc",
      first_k_dense_replace=1,
      rms_norm_eps=1e-5,
      latent_norm_eps=1e-6,
      rope_theta=50000.0,
      rope_scaling=None,
      rope_interleave=True,
      rope_angle_dtype="float32",
      max_position_embeddings=8192,
      tie_word_embeddings=False,
      bos_token_id=163584,
      eos_token_id=(163586,),
    ),
    decode=DecodeConfig(method="ddtree", budget=15),
  )
