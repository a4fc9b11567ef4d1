"""The demo pair: a small MLA + MoE target and its DFlash drafter.

The target takes the same code path as Kimi K2.x (low-rank queries, latent
cache, sigmoid router with correction bias, a shared expert, a leading dense
layer) at 9.7 M parameters.
"""

from __future__ import annotations

from kdtree_jax.config import DecodeConfig, DrafterConfig, ModelConfig
from kdtree_jax.training.config import Experiment, GenerateConfig, TrainConfig

END_OF_TEXT, MASK = 0, 1  # ids in kdtree_jax/demo/tokenizer.json


def get_config() -> Experiment:
  return Experiment(
    model=ModelConfig(
      vocab_size=4096,
      hidden_size=256,
      intermediate_size=768,
      moe_intermediate_size=256,
      num_hidden_layers=5,
      num_attention_heads=8,
      q_lora_rank=128,
      kv_lora_rank=64,
      qk_nope_head_dim=32,
      qk_rope_head_dim=16,
      v_head_dim=32,
      n_routed_experts=8,
      num_experts_per_tok=4,
      n_shared_experts=1,
      n_group=1,
      topk_group=1,
      norm_topk_prob=True,
      routed_scaling_factor=2.0,
      scoring_func="sigmoid",
      topk_method="noaux_tc",
      first_k_dense_replace=1,
      rms_norm_eps=1e-5,
      latent_norm_eps=1e-6,
      rope_theta=10000.0,
      rope_scaling=None,
      rope_interleave=True,
      max_position_embeddings=2048,
      tie_word_embeddings=True,
      bos_token_id=END_OF_TEXT,
      eos_token_id=(END_OF_TEXT,),
    ),
    drafter=DrafterConfig(
      vocab_size=4096,
      hidden_size=256,
      intermediate_size=640,
      num_hidden_layers=3,
      num_attention_heads=8,
      num_key_value_heads=4,
      head_dim=32,
      rms_norm_eps=1e-5,
      rope_theta=10000.0,
      rope_scaling=None,
      max_position_embeddings=2048,
      block_size=16,
      mask_token_id=MASK,
      target_layer_ids=(1, 3, 4),
      num_target_layers=5,
      target_hidden_size=256,
      layer_types=("full_attention",) * 3,
      sliding_window=None,
    ),
    decode=DecodeConfig(method="ddtree", budget=15, max_new_tokens=128),
    target_train=TrainConfig(
      steps=5200,
      batch_size=64,
      sequence_length=1024,
      learning_rate=2e-3,
      eval_every=1300,
      checkpoint_every=100_000,
    ),
    generate=GenerateConfig(
      sequences=49_152,
      prompt_length=64,
      sequence_length=576,
      temperatures=(0.0, 0.7, 1.0),
      batch_size=4096,
    ),
    drafter_train=TrainConfig(
      steps=8000,
      batch_size=64,
      sequence_length=576,
      learning_rate=2e-3,
      weight_decay=0.01,
      eval_every=1000,
      checkpoint_every=100_000,
    ),
  )
