"""A random pair with Kimi's vocabulary, for timing what is not a forward pass."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.drafter import DFlash
from kdtree_jax.model.target import Target


def kimi_like(
  dtype: str, vocab_size: int = 163840, prompt_length: int = 256
) -> tuple[Target, DFlash, list[int]]:
  """A random pair with Kimi's vocabulary, heads and latents, but small forward passes.

  So that what is no forward pass has its full size: two layers of width 1,024, one
  of them with eight experts, and a drafter of one layer and a block of 16.

  Returns:
    (target, drafter, a prompt).
  """
  config = ModelConfig(
    vocab_size=vocab_size,
    hidden_size=1024,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=64,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
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
    rope_scaling=None,
    rope_interleave=True,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
  )
  draft = DrafterConfig(
    vocab_size=vocab_size,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=1,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    block_size=16,
    mask_token_id=vocab_size - 2,
    target_layer_ids=(0, 1),
    num_target_layers=2,
    target_hidden_size=1024,
    layer_types=("full_attention",),
    sliding_window=None,
  )
  target = Target(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, vocab_size, prompt_length).tolist()
  return target, DFlash(draft, dtype, nnx.Rngs(1)), prompt
