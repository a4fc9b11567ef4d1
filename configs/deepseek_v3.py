"""DeepSeek-V3 and R1.

Values: deepseek-ai/DeepSeek-V3, inference/configs/config_671B.json, and
jax-ml/jax-llm-examples, deepseek_r1_jax/third_party/r1_config.json. The extra
multi-token-prediction layer (layer 61 of the files) is not part of the model.
"""

from __future__ import annotations

from kdtree_jax.config import DecodeConfig, ModelConfig, YarnConfig
from kdtree_jax.training.config import Experiment


def get_config() -> Experiment:
  """The configuration."""
  return Experiment(
    model=ModelConfig(
      vocab_size=129280,
      hidden_size=7168,
      intermediate_size=18432,
      moe_intermediate_size=2048,
      num_hidden_layers=61,
      num_attention_heads=128,
      q_lora_rank=1536,
      kv_lora_rank=512,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      v_head_dim=128,
      n_routed_experts=256,
      num_experts_per_tok=8,
      n_shared_experts=1,
      n_group=8,
      topk_group=4,
      norm_topk_prob=True,
      routed_scaling_factor=2.5,
      scoring_func="sigmoid",
      topk_method="noaux_tc",
      first_k_dense_replace=3,
      rms_norm_eps=1e-6,
      latent_norm_eps=1e-6,
      rope_theta=10000.0,
      rope_scaling=YarnConfig(
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
      ),
      rope_interleave=True,
      rope_angle_dtype="float32",
      max_position_embeddings=163840,
      tie_word_embeddings=False,
      bos_token_id=0,
      eos_token_id=(1,),
    ),
    decode=DecodeConfig(method="ddtree", budget=15),
  )
