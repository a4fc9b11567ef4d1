"""Multi-head latent attention: expanded heads, absorbed, and over a draft tree.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; deepseek-ai/DeepSeek-V3
inference/model.py, class MLA, whose "naive" and "absorb" forms these are.

A cache row is `[c after kv_a_layernorm (R) | k_pe after rope (P)]`. In the
absorbed form it is the key of every head, and its first R columns the value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.config import ModelConfig
from kdtree_jax.reference import layers
from kdtree_jax.reference.rope import RopeTable, rotate
from kdtree_jax.reference.weights import Weights


class Projections(NamedTuple):
  """What one layer's attention needs of its input rows."""

  q_nope: np.ndarray  # [T, H, nope]
  q_pe: np.ndarray  # [T, H, P], after rope
  rows: np.ndarray  # [T, R + P], the cache rows of these tokens


def project(
  config: ModelConfig, weights: Weights, prefix: str, x: np.ndarray, rope: RopeTable
) -> Projections:
  """Queries and cache rows of normed inputs.

  Args:
    config: the target's.
    weights: its parameters.
    prefix: of the layer's attention, such as "model.layers.0.self_attn".
    x: inputs [T, D].
    rope: (cos, sin) f32[T, P/2] at the positions of the rows of `x`.
  """
  if config.q_lora_rank is None:
    q = layers.linear(x, weights[f"{prefix}.q_proj.weight"])
  else:
    low = layers.linear(x, weights[f"{prefix}.q_a_proj.weight"])
    norm = weights[f"{prefix}.q_a_layernorm.weight"]
    low = layers.rms_norm(low, norm, config.latent_norm_eps)
    q = layers.linear(low, weights[f"{prefix}.q_b_proj.weight"])
  q = q.reshape(len(x), config.num_attention_heads, config.qk_head_dim)
  q_nope, q_pe = np.split(q, [config.qk_nope_head_dim], axis=-1)

  kv = layers.linear(x, weights[f"{prefix}.kv_a_proj_with_mqa.weight"])
  latent, k_pe = np.split(kv, [config.kv_lora_rank], axis=-1)
  norm = weights[f"{prefix}.kv_a_layernorm.weight"]
  latent = layers.rms_norm(latent, norm, config.latent_norm_eps)
  k_pe = rotate(k_pe, *rope, config.rope_interleave)
  return Projections(
    q_nope=q_nope,
    q_pe=rotate(q_pe, *rope, config.rope_interleave),
    rows=np.concatenate([latent, k_pe], axis=-1),
  )


def up_projections(
  config: ModelConfig, weights: Weights, prefix: str, dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
  """`kv_b_proj` as (W_UK [H, nope, R], W_UV [H, v, R])."""
  shape = (config.num_attention_heads, -1, config.kv_lora_rank)
  both = weights[f"{prefix}.kv_b_proj.weight"].astype(dtype, copy=False).reshape(shape)
  return both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]


def naive_attention(
  q_nope: np.ndarray,
  q_pe: np.ndarray,
  cache: np.ndarray,
  w_uk: np.ndarray,
  w_uv: np.ndarray,
  positions: np.ndarray,
  scale: float,
) -> np.ndarray:
  """Causal attention with every head's keys and values expanded.

  Args:
    q_nope: [T, H, nope].
    q_pe: [T, H, P].
    cache: rows [S, R + P] by absolute position.
    w_uk: [H, nope, R].
    w_uv: [H, v, R].
    positions: i32[T]; query t sees the rows 0 to positions[t].
    scale: of the logits.

  Returns:
    [T, H, v].
  """
  latent, k_pe = np.split(cache, [w_uk.shape[-1]], axis=-1)
  keys = np.einsum("sr,hnr->shn", latent, w_uk)
  values = np.einsum("sr,hvr->shv", latent, w_uv)
  logits = np.einsum("thn,shn->ths", q_nope, keys)
  logits = (logits + np.einsum("thp,sp->ths", q_pe, k_pe)) * logits.dtype.type(scale)
  visible = np.arange(len(cache)) <= np.asarray(positions)[:, None]
  weights = layers.softmax(np.where(visible[:, None], logits, -np.inf))
  return np.einsum("ths,shv->thv", weights, values)


def absorb_query(q_nope: np.ndarray, q_pe: np.ndarray, w_uk: np.ndarray) -> np.ndarray:
  """Queries in the space of the cache rows: [T, H, R + P]."""
  return np.concatenate([np.einsum("thn,hnr->thr", q_nope, w_uk), q_pe], axis=-1)


def expand_value(latent: np.ndarray, w_uv: np.ndarray) -> np.ndarray:
  """Attended latents [T, H, R] to the heads' outputs [T, H, v]."""
  return np.einsum("thr,hvr->thv", latent, w_uv)


def attend(q: np.ndarray, keys: np.ndarray, scale: float, value_dim: int) -> np.ndarray:
  """One query of every head over the keys that it sees.

  Args:
    q: [H, W].
    keys: [S, W], in position order.
    scale: of the logits.
    value_dim: the values are the first `value_dim` columns of the keys.

  Returns:
    [H, value_dim] in at least float32; zeros where there is no key.
  """
  q, keys = layers.widen(q), layers.widen(keys)
  if len(keys) == 0:
    return np.zeros((len(q), value_dim), q.dtype)
  weights = layers.softmax((q @ keys.T) * q.dtype.type(scale))
  return weights @ keys[:, :value_dim]


def causal_attention(
  q: np.ndarray, cache: np.ndarray, positions: np.ndarray, scale: float, value_dim: int
) -> np.ndarray:
  """Absorbed causal attention: query t sees the rows 0 to positions[t].

  Args:
    q: [T, H, R + P], from `absorb_query`.
    cache: rows [S, R + P] by absolute position.
    positions: i32[T].
    scale: of the logits.
    value_dim: R.

  Returns:
    [T, H, R].
  """
  seen = [cache[: position + 1] for position in positions]
  rows = [attend(*pair, scale, value_dim) for pair in zip(q, seen, strict=True)]
  return np.stack(rows)


def tree_attention(
  q: np.ndarray,
  cache: np.ndarray,
  tree_keys: np.ndarray,
  ancestors: np.ndarray,
  depths: np.ndarray,
  length: int,
  scale: float,
  value_dim: int,
) -> np.ndarray:
  """Absorbed attention of a draft tree's nodes.

  A node sees the committed rows, then its ancestors from the root down, itself
  last: its keys are those of its path in position order, as if the path had
  been decoded alone. Other nodes are not read.

  Args:
    q: [N, H, R + P].
    cache: committed rows [S, R + P]; those at `length` and after are ignored.
    tree_keys: rows of the nodes [N, R + P].
    ancestors: i32[N, A], the slot of the ancestor-or-self at each depth, -1
      beyond the node's own.
    depths: i32[N], the root's is 0.
    length: number of committed positions.
    scale: of the logits.
    value_dim: R.

  Returns:
    [N, H, R] in at least float32.

  Raises:
    ValueError: `length` exceeds the cache, or a depth exceeds `ancestors`.
  """
  if not 0 <= length <= len(cache):
    raise ValueError(f"length = {length} must be between 0 and {len(cache)}")
  if np.max(depths, initial=0) >= ancestors.shape[1]:
    raise ValueError(
      f"depths reach {np.max(depths)}, ancestors covers {ancestors.shape[1]} depths"
    )
  rows = []
  for node, depth in enumerate(depths):
    path = ancestors[node, : depth + 1]
    keys = np.concatenate([cache[:length], tree_keys[path[path >= 0]]])
    rows.append(attend(q[node], keys, scale, value_dim))
  return np.stack(rows)
