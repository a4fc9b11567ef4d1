"""The whole target: causal forward pass, and verification of a draft tree.

Source: Hugging Face's modeling_deepseek.py (DeepSeek-V3, Kimi K2). Everything
is computed in one dtype, float32 or float64; rope tables are float32 in both,
since their rounding is part of the model's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.config import ModelConfig
from kdtree_jax.reference import attention as mla
from kdtree_jax.reference import layers
from kdtree_jax.reference.moe import mlp, moe
from kdtree_jax.reference.rope import RopeTable, rope_rows
from kdtree_jax.reference.tree import Tree, ancestors
from kdtree_jax.reference.weights import Weights, check_weights, weight_shapes

# (layer, its projections) -> attention output [T, H, v]
Attend = Callable[[int, mla.Projections], np.ndarray]


class ForwardOutput(NamedTuple):
  """Result of `forward`."""

  logits: np.ndarray  # [T, V]
  cache: np.ndarray  # [layers, S, R + P], by absolute position
  features: np.ndarray  # [T, taps * D], residual streams after the tapped layers


class VerifyOutput(NamedTuple):
  """Result of `verify`. Rows of padding nodes mean nothing."""

  logits: np.ndarray  # [N, V]
  features: np.ndarray  # [N, taps * D]
  tree_keys: np.ndarray  # [layers, N, R + P]


def init_cache(
  config: ModelConfig, length: int, dtype: DTypeLike = np.float32
) -> np.ndarray:
  """An empty latent cache [layers, length, R + P]."""
  return np.zeros((config.num_hidden_layers, length, config.cache_width), dtype)


def forward(
  config: ModelConfig,
  weights: Weights,
  tokens: np.ndarray,
  *,
  cache: np.ndarray | None = None,
  positions: np.ndarray | None = None,
  taps: Sequence[int] = (),
  attention: Literal["absorbed", "naive"] = "absorbed",
  dtype: DTypeLike = np.float32,
) -> ForwardOutput:
  """Causal forward pass over consecutive tokens: a prefill, or a part of one.

  Args:
    config: the target's.
    weights: its parameters under Hugging Face's names.
    tokens: i32[T].
    cache: [layers, S, R + P] with the rows of all earlier positions; None for
      an empty one of T rows. Not modified.
    positions: i32[T], consecutive absolute positions; None for 0 to T-1.
    taps: layers l whose residual stream after layer l is returned.
    attention: the absorbed or the expanded form of the same sums.
    dtype: float32 or float64.

  Returns:
    Logits, the cache with the rows of these tokens, and features, in `dtype`.

  Raises:
    ValueError: an argument does not fit the config, or the cache is too short.
  """
  tokens = _check_tokens(config, tokens)
  positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
  if cache is None:
    cache = init_cache(config, len(tokens))
  _check_positions(positions, len(tokens), cache.shape[1])
  cache = cache.astype(dtype)

  def attend(layer: int, rows: mla.Projections) -> np.ndarray:
    cache[layer, positions] = rows.rows
    w_uk, w_uv = mla.up_projections(config, weights, _attention(layer), dtype)
    keys, scale = cache[layer], config.softmax_scale
    if attention == "naive":
      return mla.naive_attention(
        rows.q_nope, rows.q_pe, keys, w_uk, w_uv, positions, scale
      )
    q = mla.absorb_query(rows.q_nope, rows.q_pe, w_uk)
    latent = mla.causal_attention(q, keys, positions, scale, config.kv_lora_rank)
    return mla.expand_value(latent, w_uv)

  logits, features = _run(config, weights, tokens, positions, attend, taps, dtype)
  return ForwardOutput(logits, cache, features)


def verify(
  config: ModelConfig,
  weights: Weights,
  cache: np.ndarray,
  length: int,
  tree: Tree,
  *,
  taps: Sequence[int] = (),
  dtype: DTypeLike = np.float32,
) -> VerifyOutput:
  """Forward pass over all nodes of a draft tree at once.

  Every node is computed as if the path from the root to it had been decoded
  alone after the committed text: its position is `length + depth`.

  Args:
    config: the target's.
    weights: its parameters under Hugging Face's names.
    cache: [layers, S, R + P]; rows at `length` and after are ignored.
    length: number of committed positions.
    tree: draft tree of N nodes.
    taps: layers l whose residual stream after layer l is returned.
    dtype: float32 or float64.

  Returns:
    Logits, features and cache rows of the nodes, in `dtype`.
  """
  tokens = _check_tokens(config, tree.token_ids)
  cache = cache.astype(dtype, copy=False)
  paths = ancestors(tree, int(np.max(tree.depths)))
  keys = np.zeros((config.num_hidden_layers, len(tokens), config.cache_width), dtype)

  def attend(layer: int, rows: mla.Projections) -> np.ndarray:
    keys[layer] = rows.rows
    w_uk, w_uv = mla.up_projections(config, weights, _attention(layer), dtype)
    q = mla.absorb_query(rows.q_nope, rows.q_pe, w_uk)
    latent = mla.tree_attention(
      q,
      cache[layer],
      keys[layer],
      paths,
      tree.depths,
      length,
      config.softmax_scale,
      config.kv_lora_rank,
    )
    return mla.expand_value(latent, w_uv)

  positions = length + np.asarray(tree.depths)
  logits, features = _run(config, weights, tokens, positions, attend, taps, dtype)
  return VerifyOutput(logits, features, keys)


def _run(
  config: ModelConfig,
  weights: Weights,
  tokens: np.ndarray,
  positions: np.ndarray,
  attend: Attend,
  taps: Sequence[int],
  dtype: DTypeLike,
) -> tuple[np.ndarray, np.ndarray]:
  """The pre-norm residual stack around some attention: (logits, features)."""
  check_weights(weights, weight_shapes(config))
  rope = _rope(config, positions)
  hidden = weights["model.embed_tokens.weight"][tokens].astype(dtype)
  after = []
  for layer in range(config.num_hidden_layers):
    prefix = f"model.layers.{layer}"
    normed = _norm(config, weights, f"{prefix}.input_layernorm", hidden)
    rows = mla.project(config, weights, _attention(layer), normed, rope)
    heads = attend(layer, rows).reshape(len(tokens), -1)
    hidden = hidden + layers.linear(heads, weights[f"{prefix}.self_attn.o_proj.weight"])
    normed = _norm(config, weights, f"{prefix}.post_attention_layernorm", hidden)
    if config.is_moe_layer(layer):
      hidden = hidden + moe(config, weights, f"{prefix}.mlp", normed)
    else:
      hidden = hidden + mlp(weights, f"{prefix}.mlp", normed)
    after.append(hidden)
  logits = layers.linear(_norm(config, weights, "model.norm", hidden), head(weights))
  features = [np.zeros((len(tokens), 0), dtype)] + [after[tap] for tap in taps]
  return logits, np.concatenate(features, axis=-1)


def head(weights: Weights) -> np.ndarray:
  """The output matrix [V, D]: `lm_head`, or the embedding where it is tied."""
  return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def _attention(layer: int) -> str:
  return f"model.layers.{layer}.self_attn"


def _norm(
  config: ModelConfig, weights: Weights, name: str, x: np.ndarray
) -> np.ndarray:
  return layers.rms_norm(x, weights[f"{name}.weight"], config.rms_norm_eps)


def _rope(config: ModelConfig, positions: np.ndarray) -> RopeTable:
  return rope_rows(
    positions,
    config.qk_rope_head_dim,
    config.rope_theta,
    config.rope_scaling,
    config.rope_angle_dtype,
    config.rope_amplitude,
  )


def _check_tokens(config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
  tokens = np.asarray(tokens)
  if tokens.ndim != 1 or tokens.size == 0:
    raise ValueError(f"tokens has shape {tokens.shape}; it must be one sequence, [T]")
  if not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
    raise ValueError(
      f"tokens run from {tokens.min()} to {tokens.max()}; "
      f"allowed are 0 to {config.vocab_size - 1}"
    )
  return tokens


def _check_positions(positions: np.ndarray, count: int, capacity: int) -> None:
  if positions.shape != (count,) or np.any(np.diff(positions) != 1):
    raise ValueError(f"positions must be {count} consecutive integers: {positions}")
  if positions[0] < 0 or positions[-1] >= capacity:
    raise ValueError(
      f"positions run from {positions[0]} to {positions[-1]}; "
      f"the cache holds 0 to {capacity - 1}"
    )
