"""A target and a drafter small enough to train inside of a test.

Parameters share shapes where they can, since each shape of random initial values
compiles a program of its own.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.training.config import TrainConfig
from kdtree_jax.training.optimizer import TrainState, make_optimizer
from kdtree_jax.training.target_stage import TargetStage

VOCAB, PERIOD = 64, 16

MODEL = ModelConfig(
  vocab_size=VOCAB,
  hidden_size=32,
  intermediate_size=32,
  moe_intermediate_size=32,
  num_hidden_layers=1,
  num_attention_heads=2,
  q_lora_rank=None,
  kv_lora_rank=24,
  qk_nope_head_dim=8,
  qk_rope_head_dim=8,
  v_head_dim=16,
  n_routed_experts=4,
  num_experts_per_tok=2,
  n_shared_experts=1,
  n_group=1,
  topk_group=1,
  norm_topk_prob=True,
  routed_scaling_factor=1.0,
  scoring_func="sigmoid",
  topk_method="noaux_tc",
  first_k_dense_replace=0,
  rms_norm_eps=1e-5,
  latent_norm_eps=1e-6,
  rope_theta=1e4,
  rope_scaling=None,
  rope_interleave=True,
  max_position_embeddings=64,
  tie_word_embeddings=True,
  bos_token_id=0,
  eos_token_id=(0,),
)
DRAFTER = DrafterConfig(
  vocab_size=VOCAB,
  hidden_size=32,
  intermediate_size=32,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=2,
  head_dim=16,
  rms_norm_eps=1e-5,
  rope_theta=1e4,
  rope_scaling=None,
  max_position_embeddings=64,
  block_size=4,
  mask_token_id=1,
  target_layer_ids=(0,),
  num_target_layers=1,
  target_hidden_size=32,
  layer_types=("full_attention",),
  sliding_window=None,
)
TRAIN = TrainConfig(
  steps=40,
  batch_size=4,
  sequence_length=16,
  learning_rate=1e-2,
  warmup_steps=2,
  log_every=2,
  eval_every=20,
  checkpoint_every=1000,
  bias_update_rate=0.01,
  quantize_from=0.0,
)
# Sequences of the target's own: 4 tokens of prompt, 12 in all. Where a test of the
# stage and one of the whole pipeline agree on these, they share compiled programs.
DRAFTER_TRAIN = dataclasses.replace(TRAIN, steps=150, anchors=8, loss_gamma=3.0)
PROMPT, LENGTH = 4, 12
SAMPLES, HELD_OUT = 80, 10


def corpus(tokens: int = 3000) -> np.ndarray:
  """u16: 16 distinct tokens over and over, so that the next one is certain."""
  cycle = np.random.default_rng(0).permutation(np.arange(2, VOCAB))[:PERIOD]
  return np.resize(cycle, tokens).astype(np.uint16)


@functools.cache
def target_stage() -> TargetStage:
  return TargetStage(MODEL, TRAIN, make_optimizer(TRAIN), jnp.dtype(jnp.float32))


# Compiled once for all tests, and under fake int4, the one that does more.
@functools.cache
def target_step():
  return target_stage().step_fn(quantized=True)


@functools.cache
def target_loss():
  """(parameters, biases, tokens i32 [4, 17]) -> (loss, loads)."""
  stage = target_stage()
  return jax.jit(lambda *arguments: stage.loss(*arguments, True))


def fresh(state: TrainState) -> TrainState:
  """A copy, because a step takes its argument's buffers."""
  return jax.tree.map(jnp.copy, state)
