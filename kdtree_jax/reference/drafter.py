"""The DFlash drafter: one pass proposes a distribution for each next depth.

Source: arXiv 2602.06036; z-lab/dflash, dflash/model.py. This is the naive form:
in every layer the keys of context and block are computed anew and concatenated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.config import DrafterConfig
from kdtree_jax.reference import layers
from kdtree_jax.reference.model import head
from kdtree_jax.reference.moe import mlp
from kdtree_jax.reference.rope import RopeTable, rope_rows, rotate
from kdtree_jax.reference.weights import Weights, check_weights, drafter_weight_shapes


def draft(
  config: DrafterConfig,
  weights: Weights,
  target_weights: Weights,
  context_features: np.ndarray,
  root_token: int,
  length: int,
  dtype: DTypeLike = np.float32,
) -> np.ndarray:
  """Logits of the tokens that may follow the root.

  Args:
    config: the drafter's.
    weights: its parameters under their published names.
    target_weights: the target's; its embedding and head are used.
    context_features: [length, taps * D], residual streams of the committed
      tokens after the tapped layers.
    root_token: last chosen token, not yet in the context.
    length: number of committed tokens, the absolute position of the root.
    dtype: float32 or float64.

  Returns:
    [L, V] in `dtype`; row d - 1 is for position `length + d`.

  Raises:
    ValueError: an argument does not fit the config.
  """
  check_weights(weights, drafter_weight_shapes(config))
  embedding = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
  check_weights(target_weights, embedding)
  _check_inputs(config, context_features, root_token, length)
  context = layers.linear(context_features.astype(dtype), weights["fc.weight"])
  context = _norm(config, weights, "hidden_norm", context)

  masks = np.full(config.max_depth, config.mask_token_id)
  block = np.concatenate([[root_token], masks])
  hidden = target_weights["model.embed_tokens.weight"][block].astype(dtype)
  positions = np.arange(length + config.block_size)
  rope = rope_rows(
    positions,
    config.head_dim,
    config.rope_theta,
    config.rope_scaling,
    config.rope_angle_dtype,
    config.rope_amplitude,
  )
  for layer in range(config.num_hidden_layers):
    prefix = f"layers.{layer}"
    normed = _norm(config, weights, f"{prefix}.input_layernorm", hidden)
    visible = visible_keys(config, layer, positions)
    hidden = hidden + _attention(
      config, weights, f"{prefix}.self_attn", normed, context, rope, visible
    )
    normed = _norm(config, weights, f"{prefix}.post_attention_layernorm", hidden)
    hidden = hidden + mlp(weights, f"{prefix}.mlp", normed)
  # Row 0 is the anchor: it is given, and predicts nothing.
  final = _norm(config, weights, "norm", hidden[1:])
  return layers.linear(final, head(target_weights))


def visible_keys(
  config: DrafterConfig, layer: int, positions: np.ndarray
) -> np.ndarray:
  """bool[block, keys]: which positions the block's rows see.

  A sliding layer sees keys nearer than the window on both sides, the block
  included (as the reference for Kimi-K2.6-DFlash in mirage-project/mirage). A
  causal one sees no later position (z-lab/dflash, `is_causal`).
  """
  queries = positions[-config.block_size :]
  ahead = positions - queries[:, None]
  visible = np.ones(ahead.shape, bool)
  if config.layer_types[layer] == "sliding_attention":
    visible &= np.abs(ahead) < config.sliding_window
  if config.is_causal_layer(layer):
    visible &= ahead <= 0
  return visible


def _attention(
  config: DrafterConfig,
  weights: Weights,
  prefix: str,
  block: np.ndarray,
  context: np.ndarray,
  rope: RopeTable,
  visible: np.ndarray,
) -> np.ndarray:
  """Grouped-query attention of the block over context and block: [block, D]."""
  # The context enters as it is: it never passes through input_layernorm.
  rows = np.concatenate([context, block])

  def heads(name: str, x: np.ndarray, count: int) -> np.ndarray:
    y = layers.linear(x, weights[f"{prefix}.{name}_proj.weight"])
    return y.reshape(len(x), count, config.head_dim)

  def place(name: str, x: np.ndarray) -> np.ndarray:
    """Norm per head, then rotation to the last len(x) positions."""
    x = _norm(config, weights, f"{prefix}.{name}_norm", x)
    return rotate(x, rope.cos[-len(x) :], rope.sin[-len(x) :], interleave=False)

  kv_heads = config.num_key_value_heads
  q = place("q", heads("q", block, config.num_attention_heads))
  k = place("k", heads("k", rows, kv_heads))
  v = heads("v", rows, kv_heads)
  q = q.reshape(len(block), kv_heads, -1, config.head_dim)
  logits = np.einsum("tgqd,sgd->tgqs", q, k) * q.dtype.type(config.head_dim**-0.5)
  logits = np.where(visible[:, None, None], logits, -np.inf)
  mixed = np.einsum("tgqs,sgd->tgqd", layers.softmax(logits), v)
  output = weights[f"{prefix}.o_proj.weight"]
  return layers.linear(mixed.reshape(len(block), -1), output)


def _norm(
  config: DrafterConfig, weights: Weights, name: str, x: np.ndarray
) -> np.ndarray:
  return layers.rms_norm(x, weights[f"{name}.weight"], config.rms_norm_eps)


def _check_inputs(
  config: DrafterConfig, context_features: np.ndarray, root_token: int, length: int
) -> None:
  width = len(config.target_layer_ids) * config.target_hidden_size
  if context_features.shape != (length, width):
    raise ValueError(
      f"context_features has shape {context_features.shape}; "
      f"{length} committed tokens and the taps need {(length, width)}"
    )
  if not 0 <= root_token < config.vocab_size:
    raise ValueError(
      f"root_token = {root_token} must be from 0 to {config.vocab_size - 1}"
    )
