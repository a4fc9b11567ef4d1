"""Mixture of experts: router, experts and their combination.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2, as Hugging Face's
modeling_deepseek.py computes it (class MoEGate, DeepseekV3MoE.moe_infer).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kdtree_jax.config import ModelConfig
from kdtree_jax.reference import layers
from kdtree_jax.reference.weights import Weights


def top_k(values: np.ndarray, k: int) -> np.ndarray:
  """Indices [..., k] of the largest values of the last axis, largest first.

  Ties go to the lowest index.
  """
  return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def keep_best_groups(choice: np.ndarray, n_group: int, topk_group: int) -> np.ndarray:
  """`choice [T, E]` with -inf outside the best groups of consecutive experts.

  A group's score is the sum of its two largest values.
  """
  groups = choice.reshape(len(choice), n_group, -1)
  best_two = -np.sort(-groups, axis=-1)[..., :2]
  kept = top_k(best_two.sum(axis=-1), topk_group)
  mask = np.zeros(groups.shape[:2], bool)
  np.put_along_axis(mask, kept, True, axis=-1)
  return np.where(mask[..., None], groups, -np.inf).reshape(choice.shape)


def route(
  config: ModelConfig, logits: np.ndarray, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Chooses experts and their weights.

  Args:
    config: the target's.
    logits: router logits [T, E], float32 or float64.
    bias: correction [E], which takes part in the selection and not in the
      weights; None for a router without.

  Returns:
    (expert ids i32[T, k], weights [T, k] in the dtype of `logits`), from the
    best expert down, ties to the lowest id.
  """
  softmax = config.scoring_func == "softmax"
  scores = layers.softmax(logits) if softmax else layers.sigmoid(logits)
  choice = scores
  if config.topk_method == "noaux_tc":
    if bias is not None:
      choice = choice + bias.astype(scores.dtype)
    if config.n_group > 1:
      choice = keep_best_groups(choice, config.n_group, config.topk_group)
  ids = top_k(choice, config.num_experts_per_tok)
  weights = np.take_along_axis(scores, ids, axis=-1)
  if config.norm_topk_prob:
    weights = weights / (weights.sum(axis=-1, keepdims=True) + scores.dtype.type(1e-20))
  weights = weights * scores.dtype.type(config.routed_scaling_factor)
  return ids.astype(np.int32), weights


def combine(outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Weighted sum over the chosen experts, in slot order, with one cast.

  Args:
    outputs: [T, k, D].
    weights: [T, k], at least float32; the sum is formed in its dtype.

  Returns:
    [T, D] in the dtype of `outputs`.
  """
  total = np.zeros((outputs.shape[0], outputs.shape[2]), weights.dtype)
  for slot in range(weights.shape[1]):
    total = total + weights[:, slot, None] * outputs[:, slot].astype(weights.dtype)
  return total.astype(outputs.dtype)


def moe(
  config: ModelConfig, weights: Weights, prefix: str, x: np.ndarray
) -> np.ndarray:
  """The MoE feed-forward of one layer.

  Args:
    config: the target's.
    weights: its parameters.
    prefix: of the layer's feed-forward, such as "model.layers.1.mlp".
    x: normed inputs [T, D].

  Returns:
    [T, D] in the dtype of `x`: routed experts plus the shared ones.
  """
  logits = layers.linear(layers.widen(x), weights[f"{prefix}.gate.weight"])
  bias = weights.get(f"{prefix}.gate.e_score_correction_bias")
  ids, gates = route(config, logits, bias)

  def run(expert: int, rows: np.ndarray) -> np.ndarray:
    return mlp(weights, f"{prefix}.experts.{expert}", rows)

  total = combine(expert_outputs(x, ids, run), gates)
  if config.n_shared_experts:
    total = total + mlp(weights, f"{prefix}.shared_experts", x)
  return total


def routed_experts(
  x: np.ndarray,
  experts: np.ndarray,
  weights: np.ndarray,
  gate_up: np.ndarray,
  down: np.ndarray,
) -> np.ndarray:
  """What the chosen experts make of each token, summed in slot order.

  Args:
    x: inputs [T, D].
    experts: ids [T, k]; a slot with an id outside of [0, E) adds 0.
    weights: [T, k], at least float32.
    gate_up: [E, D, 2F], gate in the first F columns.
    down: [E, F, D].

  Returns:
    [T, D] in the dtype of `x`.
  """
  F = down.shape[1]

  def run(expert: int, rows: np.ndarray) -> np.ndarray:
    if not 0 <= expert < len(down):
      return np.zeros_like(rows)
    gate, up = gate_up[expert, :, :F], gate_up[expert, :, F:]
    return layers.swiglu(rows, gate.T, up.T, down[expert].T)

  return combine(expert_outputs(x, experts, run), weights)


def expert_outputs(
  x: np.ndarray,
  experts: np.ndarray,
  run: Callable[[int, np.ndarray], np.ndarray],
) -> np.ndarray:
  """The outputs [T, k, D] of the chosen experts [T, k] for the rows of `x [T, D]`."""
  outputs = np.zeros((*experts.shape, x.shape[-1]), x.dtype)
  for expert in np.unique(experts):
    tokens, slots = np.nonzero(experts == expert)
    outputs[tokens, slots] = run(int(expert), x[tokens])
  return outputs


def mlp(weights: Weights, prefix: str, x: np.ndarray) -> np.ndarray:
  """The SwiGLU whose three weights have this prefix: [T, D] to [T, D]."""
  names = ("gate_proj", "up_proj", "down_proj")
  return layers.swiglu(x, *(weights[f"{prefix}.{name}.weight"] for name in names))


def grouped_matmul(
  rows: np.ndarray, weights: np.ndarray, group_sizes: np.ndarray
) -> np.ndarray:
  """Multiplies consecutive groups of rows by a matrix of their own.

  Args:
    rows: [M, K], sorted by group.
    weights: [E, K, N].
    group_sizes: i32[E], rows of each group; they sum to M or less.

  Returns:
    [M, N] in at least float32; zeros after the last group.

  Raises:
    ValueError: a group size is negative, or they sum to more than M.
  """
  rows = layers.widen(rows)
  group_sizes = np.asarray(group_sizes)
  if group_sizes.min(initial=0) < 0 or group_sizes.sum() > len(rows):
    raise ValueError(
      f"group_sizes = {group_sizes.tolist()} must be 0 or more and sum to at most "
      f"{len(rows)} rows"
    )
  result = np.zeros((len(rows), weights.shape[-1]), rows.dtype)
  start = 0
  for weight, size in zip(weights, group_sizes, strict=True):
    group = slice(start, start + size)
    result[group] = rows[group] @ weight.astype(rows.dtype, copy=False)
    start += size
  return result
