"""Names and shapes of a target's parameters, and random ones for tests.

The names are those of Hugging Face's DeepSeek-V3 and Kimi K2 checkpoints, flat,
with linear weights as `[out, in]`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kdtree_jax.config import DrafterConfig, ModelConfig

Weights = Mapping[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: ModelConfig) -> Shapes:
  """Every parameter of a target.

  Returns:
    Name to shape, in the order of the forward pass.
  """
  hidden, vocab = config.hidden_size, config.vocab_size
  shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
  for layer in range(config.num_hidden_layers):
    prefix = f"model.layers.{layer}"
    shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
    shapes |= _attention_shapes(config, f"{prefix}.self_attn")
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    if config.is_moe_layer(layer):
      shapes |= _moe_shapes(config, f"{prefix}.mlp")
    else:
      shapes |= _swiglu_shapes(f"{prefix}.mlp", hidden, config.intermediate_size)
  shapes["model.norm.weight"] = (hidden,)
  if not config.tie_word_embeddings:
    shapes["lm_head.weight"] = (vocab, hidden)
  return shapes


def is_routed_expert(name: str) -> bool:
  """Whether a target's parameter is of an expert that the router chooses."""
  return ".mlp.experts." in name


def _attention_shapes(config: ModelConfig, prefix: str) -> Shapes:
  hidden, heads, rank = (
    config.hidden_size,
    config.num_attention_heads,
    config.kv_lora_rank,
  )
  shapes: Shapes = {}
  if config.q_lora_rank is None:
    shapes["q_proj.weight"] = (heads * config.qk_head_dim, hidden)
  else:
    shapes["q_a_proj.weight"] = (config.q_lora_rank, hidden)
    shapes["q_a_layernorm.weight"] = (config.q_lora_rank,)
    shapes["q_b_proj.weight"] = (heads * config.qk_head_dim, config.q_lora_rank)
  shapes["kv_a_proj_with_mqa.weight"] = (config.cache_width, hidden)
  shapes["kv_a_layernorm.weight"] = (rank,)
  shapes["kv_b_proj.weight"] = (
    heads * (config.qk_nope_head_dim + config.v_head_dim),
    rank,
  )
  shapes["o_proj.weight"] = (hidden, heads * config.v_head_dim)
  return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _moe_shapes(config: ModelConfig, prefix: str) -> Shapes:
  hidden, width = config.hidden_size, config.moe_intermediate_size
  shapes: Shapes = {f"{prefix}.gate.weight": (config.n_routed_experts, hidden)}
  if config.topk_method == "noaux_tc":
    shapes[f"{prefix}.gate.e_score_correction_bias"] = (config.n_routed_experts,)
  for expert in range(config.n_routed_experts):
    shapes |= _swiglu_shapes(f"{prefix}.experts.{expert}", hidden, width)
  if config.n_shared_experts:
    shared = config.n_shared_experts * width
    shapes |= _swiglu_shapes(f"{prefix}.shared_experts", hidden, shared)
  return shapes


def _swiglu_shapes(prefix: str, hidden: int, width: int) -> Shapes:
  return {
    f"{prefix}.gate_proj.weight": (width, hidden),
    f"{prefix}.up_proj.weight": (width, hidden),
    f"{prefix}.down_proj.weight": (hidden, width),
  }


def drafter_weight_shapes(config: DrafterConfig) -> Shapes:
  """Every parameter of a DFlash drafter (z-lab/dflash, dflash/model.py)."""
  hidden, dim = config.hidden_size, config.head_dim
  taps = len(config.target_layer_ids)
  shapes: Shapes = {
    "fc.weight": (hidden, taps * config.target_hidden_size),
    "hidden_norm.weight": (hidden,),
  }
  for layer in range(config.num_hidden_layers):
    prefix = f"layers.{layer}"
    shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
    attention = f"{prefix}.self_attn"
    shapes[f"{attention}.q_proj.weight"] = (config.num_attention_heads * dim, hidden)
    shapes[f"{attention}.k_proj.weight"] = (config.num_key_value_heads * dim, hidden)
    shapes[f"{attention}.v_proj.weight"] = (config.num_key_value_heads * dim, hidden)
    shapes[f"{attention}.q_norm.weight"] = (dim,)
    shapes[f"{attention}.k_norm.weight"] = (dim,)
    shapes[f"{attention}.o_proj.weight"] = (hidden, config.num_attention_heads * dim)
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes |= _swiglu_shapes(f"{prefix}.mlp", hidden, config.intermediate_size)
  shapes["norm.weight"] = (hidden,)
  return shapes


def check_weights(weights: Weights, shapes: Shapes) -> None:
  """Raises a ValueError naming the first missing or misshapen parameter.

  Further names in `weights` (a vision tower, an MTP layer) are allowed.
  """
  for name, shape in shapes.items():
    if name not in weights:
      raise ValueError(f"weights: {name!r} of shape {shape} is missing")
    if weights[name].shape != shape:
      raise ValueError(
        f"weights: {name!r} has shape {weights[name].shape}; the config needs {shape}"
      )


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
  """Random float32 parameters under which a small target is not boring.

  Linear weights keep the variance of their input, so that logits spread by
  about 2.5, attention is neither flat nor one-hot, and tokens choose different
  experts; correction biases are large enough to change the selection.
  """
  return _random(weight_shapes(config), config.tie_word_embeddings, seed)


def random_drafter_weights(config: DrafterConfig, seed: int) -> dict[str, np.ndarray]:
  """Random float32 parameters of a drafter, scaled as in `random_weights`."""
  return _random(drafter_weight_shapes(config), False, seed)


def _random(shapes: Shapes, tied: bool, seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  weights = {}
  for name, shape in shapes.items():
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
      weights[name] = 1 + np.float32(0.2) * noise
    elif name.endswith("e_score_correction_bias"):
      weights[name] = np.float32(0.2) * noise
    else:
      weights[name] = np.float32(_deviation(name, shape, tied)) * noise
  return weights


def _deviation(name: str, shape: tuple[int, ...], tied: bool) -> float:
  head = "model.embed_tokens.weight" if tied else "lm_head.weight"
  if name == head:
    gain = 2.5
  elif name == "model.embed_tokens.weight":
    return 1.0
  else:
    lively = ("q_proj.weight", "q_b_proj.weight", "mlp.gate.weight")
    gain = 1.5 if name.endswith(lively) else 1.0
  return gain * shape[-1] ** -0.5
