"""Target parameters under Hugging Face's names, and back.

A state dict maps `model.layers.0.self_attn.o_proj.weight` and the like to numpy
arrays, linear weights as [out, in]. The module's own layout differs (kernels
[in, out], gate and up joined, heads split, experts stacked). This file is the
only place that knows both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.moe import MoE
from kdtree_jax.model.target import Block, Target
from kdtree_jax.reference.weights import weight_shapes

StateDict = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Entry:
  """Variables of the module and the tensors that make them up."""

  variables: tuple[nnx.Variable, ...]
  names: tuple[str, ...]
  pack: Callable[..., tuple[np.ndarray, ...]]  # tensors in order -> variables
  unpack: Callable[..., tuple[np.ndarray, ...]]  # and back


def _as_is(variable: nnx.Variable, name: str) -> _Entry:
  return _Entry((variable,), (name,), lambda w: (w,), lambda v: (v,))


def _kernel(variable: nnx.Variable, name: str) -> _Entry:
  return _Entry((variable,), (name,), lambda w: (w.T,), lambda v: (v.T,))


def _gate_up(variable: nnx.Variable, prefix: str) -> _Entry:
  return _Entry(
    (variable,),
    (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
    lambda gate, up: (np.concatenate([gate.T, up.T], axis=1),),
    lambda v: tuple(half.T for half in np.split(v, 2, axis=1)),
  )


def _swiglu(mlp, prefix: str) -> Iterator[_Entry]:
  yield _gate_up(mlp.gate_up.kernel, prefix)
  yield _kernel(mlp.down.kernel, f"{prefix}.down_proj.weight")


def _attention(attn, config: ModelConfig, prefix: str) -> Iterator[_Entry]:
  H, R = config.num_attention_heads, config.kv_lora_rank
  C, E = config.qk_nope_head_dim, config.v_head_dim
  if config.q_lora_rank is None:
    yield _kernel(attn.q_proj.kernel, f"{prefix}.q_proj.weight")
  else:
    yield _kernel(attn.q_a_proj.kernel, f"{prefix}.q_a_proj.weight")
    yield _as_is(attn.q_a_layernorm.weight, f"{prefix}.q_a_layernorm.weight")
    yield _kernel(attn.q_b_proj.kernel, f"{prefix}.q_b_proj.weight")
  yield _kernel(attn.kv_a_proj.kernel, f"{prefix}.kv_a_proj_with_mqa.weight")
  yield _as_is(attn.kv_a_layernorm.weight, f"{prefix}.kv_a_layernorm.weight")

  def pack_kv_b(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    heads = weight.reshape(H, C + E, R)
    return heads[:, :C], heads[:, C:].swapaxes(1, 2)

  def unpack_kv_b(k_up: np.ndarray, v_up: np.ndarray) -> tuple[np.ndarray, ...]:
    return (np.concatenate([k_up, v_up.swapaxes(1, 2)], 1).reshape(-1, R),)

  yield _Entry(
    (attn.k_up, attn.v_up), (f"{prefix}.kv_b_proj.weight",), pack_kv_b, unpack_kv_b
  )
  yield _kernel(attn.o_proj.kernel, f"{prefix}.o_proj.weight")


def _moe(mlp, config: ModelConfig, prefix: str) -> Iterator[_Entry]:
  yield _kernel(mlp.gate.kernel, f"{prefix}.gate.weight")
  if config.topk_method == "noaux_tc":
    yield _as_is(
      mlp.gate.e_score_correction_bias, f"{prefix}.gate.e_score_correction_bias"
    )
  E = config.n_routed_experts
  expert_axis = 1 if mlp.experts.dense else 0
  gate_up_names = tuple(
    f"{prefix}.experts.{e}.{part}_proj.weight"
    for part in ("gate", "up")
    for e in range(E)
  )

  def pack_gate_up(*weights: np.ndarray) -> tuple[np.ndarray, ...]:
    gate = np.stack([w.T for w in weights[:E]], axis=expert_axis)
    up = np.stack([w.T for w in weights[E:]], axis=expert_axis)
    return (np.concatenate([gate, up], axis=2),)

  def unpack_gate_up(value: np.ndarray) -> tuple[np.ndarray, ...]:
    halves = np.split(value, 2, axis=2)
    return tuple(w.T for half in halves for w in np.moveaxis(half, expert_axis, 0))

  yield _Entry((mlp.experts.gate_up,), gate_up_names, pack_gate_up, unpack_gate_up)
  yield _Entry(
    (mlp.experts.down,),
    tuple(f"{prefix}.experts.{e}.down_proj.weight" for e in range(E)),
    lambda *weights: (np.stack([w.T for w in weights]),),
    lambda v: tuple(w.T for w in v),
  )
  if config.n_shared_experts:
    yield from _swiglu(mlp.shared_experts, f"{prefix}.shared_experts")


def _block(block: Block, config: ModelConfig, prefix: str) -> Iterator[_Entry]:
  yield _as_is(block.input_layernorm.weight, f"{prefix}.input_layernorm.weight")
  yield from _attention(block.self_attn, config, f"{prefix}.self_attn")
  yield _as_is(
    block.post_attention_layernorm.weight, f"{prefix}.post_attention_layernorm.weight"
  )
  if isinstance(block.mlp, MoE):
    yield from _moe(block.mlp, config, f"{prefix}.mlp")
  else:
    yield from _swiglu(block.mlp, f"{prefix}.mlp")


def _entries(target: Target) -> Iterator[_Entry]:
  config = target.config
  yield _as_is(target.embed_tokens, "model.embed_tokens.weight")
  for i, block in enumerate(target.layers):
    yield from _block(block, config, f"model.layers.{i}")
  yield _as_is(target.norm.weight, "model.norm.weight")
  if not config.tie_word_embeddings:
    yield _kernel(target.lm_head.kernel, "lm_head.weight")


def target_from_state_dict(
  config: ModelConfig,
  weights: StateDict,
  *,
  dtype: jnp.dtype = jnp.float32,
  fingerprint: str | None = None,
) -> Target:
  """Builds a target from arrays with Hugging Face's names.

  Args:
    config: shapes and settings.
    weights: float arrays; each is rounded once to `dtype` (the router's kernel
      and bias stay fp32).
    dtype: float32 or bfloat16.
    fingerprint: identifies the weights, see `Target`.

  Raises:
    ValueError: a tensor is missing, left over, or of another shape.
  """
  _check(config, weights)
  target = nnx.eval_shape(
    lambda: Target(config, dtype=dtype, rngs=nnx.Rngs(0), fingerprint=fingerprint)
  )
  target.set_rope_tables()
  for entry in _entries(target):
    values = entry.pack(*(np.asarray(weights[name]) for name in entry.names))
    for variable, value in zip(entry.variables, values, strict=True):
      variable.set_value(jnp.asarray(value, variable.dtype))
  return target


def target_to_state_dict(target: Target) -> StateDict:
  """The inverse of `target_from_state_dict`, as f32 arrays."""
  weights: StateDict = {}
  for entry in _entries(target):
    values = (np.asarray(v[...].astype(jnp.float32)) for v in entry.variables)
    for name, part in zip(entry.names, entry.unpack(*values), strict=True):
      weights[name] = np.ascontiguousarray(part)
  return weights


def _check(config: ModelConfig, weights: StateDict) -> None:
  shapes = weight_shapes(config)
  for name, shape in shapes.items():
    if name not in weights:
      raise ValueError(f"tensor {name!r} is missing from the state dict")
    if np.shape(weights[name]) != shape:
      raise ValueError(
        f"tensor {name!r} has shape {np.shape(weights[name])}; the config needs {shape}"
      )
  unexpected = sorted(set(weights) - set(shapes))
  if unexpected:
    raise ValueError(f"unexpected tensor {unexpected[0]!r} in the state dict")
