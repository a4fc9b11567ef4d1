"""Target parameters under Hugging Face's names, and back.

A state dict maps `model.layers.0.self_attn.o_proj.weight` and the like to numpy
arrays, linear weights as [out, in]; routed experts may be Int4Tensors. The module's
own layout differs (kernels [in, out], gate and up joined, heads split, experts
stacked, int4 in tiles). This file is the only place that knows both.

Building reads a tensor when its place in the result exists, copies it there and drops
it. Threads do so for several experts at once, for as many as are no larger together
than the largest tensor: a mapping that reads files costs no more than that one besides
the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.moe import Experts, MoE
from kdtree_jax.model.placement import Placement, empty, put, variables
from kdtree_jax.model.rounding import copy_rounded
from kdtree_jax.model.target import Block, Target
from kdtree_jax.model.workers import Workers
from kdtree_jax.ops import int4_weight
from kdtree_jax.ops.int4_weight import Int4Weight
from kdtree_jax.reference.weights import is_routed_expert, weight_shapes

if TYPE_CHECKING:  # That package imports this file.
  from kdtree_jax.checkpoint.int4 import Int4Tensor

ExpertDtype = Literal["as_stored", "int4", "dequantized"]
_Jobs = Iterator[Callable[[], None]]


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A tensor that is read when it is called: an array, or an Int4Tensor."""

  weights: Mapping[str, Any]
  name: str
  int4: bool
  finite: bool  # Whether other values are refused.

  def __call__(self) -> Any:
    return (_as_int4 if self.int4 else _as_floats)(self.weights, self.name)

  def copy(self, into: np.ndarray, values: np.ndarray) -> None:
    """`copy_rounded` of what was read; an error says of which tensor."""
    try:
      copy_rounded(into, values, self.finite)
    except ValueError as error:
      raise _error(self.weights, self.name, str(error)) from error


@dataclasses.dataclass(frozen=True)
class _Entry:
  """Variables of the module and the tensors that make them up.

  `pack` gives functions, in any order and at once, that fill empty arrays of the
  variables' shapes and dtypes; it takes functions that read the tensors in the order of
  `names`. `unpack` takes the variables' values.
  """

  variables: tuple[nnx.Variable, ...]
  names: tuple[str, ...]
  pack: Callable[[tuple[np.ndarray, ...], tuple[_Tensor, ...]], _Jobs]
  unpack: Callable[..., tuple[Any, ...]]
  int4: bool = False  # Tensors are Int4Tensors.


def _copy(into: np.ndarray, read: _Tensor) -> Callable[[], None]:
  return lambda: read.copy(into, read())


def _as_is(variable: nnx.Variable, name: str) -> _Entry:
  def pack(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    yield _copy(into[0], read[0])

  return _Entry((variable,), (name,), pack, lambda v: (v,))


def _kernel(variable: nnx.Variable, name: str) -> _Entry:
  def pack(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    yield _copy(into[0].T, read[0])

  return _Entry((variable,), (name,), pack, lambda v: (v.T,))


def _gate_up(variable: nnx.Variable, prefix: str) -> _Entry:
  def pack(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    for half, tensor in zip(np.split(into[0], 2, axis=1), read, strict=True):
      yield _copy(half.T, tensor)

  return _Entry(
    (variable,),
    (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
    pack,
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

  def pack_kv_b(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    def both() -> None:
      heads = read[0]().reshape(H, C + E, R)
      read[0].copy(into[0], heads[:, :C])
      read[0].copy(into[1].swapaxes(1, 2), heads[:, C:])

    yield both

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
  experts = _int4_experts if mlp.experts.int4 else _experts
  yield from experts(mlp.experts, config, f"{prefix}.experts")
  if config.n_shared_experts:
    yield from _swiglu(mlp.shared_experts, f"{prefix}.shared_experts")


def _names(prefix: str, config: ModelConfig, *parts: str) -> tuple[str, ...]:
  """Names of the weights of all experts, part after part."""
  return tuple(
    f"{prefix}.{e}.{part}_proj.weight"
    for part in parts
    for e in range(config.n_routed_experts)
  )


def _experts(experts: Experts, config: ModelConfig, prefix: str) -> Iterator[_Entry]:
  E = config.n_routed_experts
  expert_axis = 1 if experts.dense else 0

  def pack_gate_up(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    kernels = np.moveaxis(into[0], expert_axis, 0)
    for part, half in enumerate(np.split(kernels, 2, axis=2)):
      for e in range(E):
        yield _copy(half[e].T, read[part * E + e])

  def pack_down(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    for kernel, tensor in zip(into[0], read, strict=True):
      yield _copy(kernel.T, tensor)

  def unpack_gate_up(value: np.ndarray) -> tuple[np.ndarray, ...]:
    halves = np.split(value, 2, axis=2)
    return tuple(w.T for half in halves for w in np.moveaxis(half, expert_axis, 0))

  yield _Entry(
    (experts.gate_up,),
    _names(prefix, config, "gate", "up"),
    pack_gate_up,
    unpack_gate_up,
  )
  yield _Entry(
    (experts.down,),
    _names(prefix, config, "down"),
    pack_down,
    lambda v: tuple(w.T for w in v),
  )


def _int4_experts(
  experts: Experts, config: ModelConfig, prefix: str
) -> Iterator[_Entry]:
  E, D, F = (
    config.n_routed_experts,
    config.hidden_size,
    config.moe_intermediate_size,
  )

  def pack_gate_up(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    def one(e: int) -> None:
      packed = np.empty((2 * F, D // 2), np.uint8)
      scales = np.empty((2 * F, D // int4_weight.GROUP_SIZE), ml_dtypes.bfloat16)
      for rows, i in ((slice(F), e), (slice(F, None), E + e)):
        tensor = read[i]()
        packed[rows], scales[rows] = tensor.packed, tensor.scales
        del tensor  # Before the next one is read.
      into[0][e] = int4_weight.pack_tiles(packed, scales, gated=True)

    return (functools.partial(one, e) for e in range(E))

  def unpack_gate_up(tiles: np.ndarray) -> tuple[Int4Tensor, ...]:
    both = [_int4_tensor(t, D, 2 * F, gated=True) for t in tiles]
    return tuple(_rows(w, part) for part in (slice(F), slice(F, None)) for w in both)

  def pack_down(into: tuple[np.ndarray, ...], read: tuple[_Tensor, ...]) -> _Jobs:
    def one(e: int) -> None:
      tensor = read[e]()
      into[0][e] = int4_weight.pack_tiles(tensor.packed, tensor.scales)

    return (functools.partial(one, e) for e in range(E))

  def unpack_down(tiles: np.ndarray) -> tuple[Int4Tensor, ...]:
    return tuple(_int4_tensor(t, F, D, gated=False) for t in tiles)

  yield _Entry(
    (experts.gate_up,),
    _names(prefix, config, "gate", "up"),
    pack_gate_up,
    unpack_gate_up,
    int4=True,
  )
  yield _Entry(
    (experts.down,),
    _names(prefix, config, "down"),
    pack_down,
    unpack_down,
    int4=True,
  )


def _int4_tensor(
  tiles: np.ndarray, depth: int, features: int, gated: bool
) -> Int4Tensor:
  """One expert's tiles as a file holds them."""
  from kdtree_jax.checkpoint.int4 import Int4Tensor, pack_int4

  weight = Int4Weight(tiles[None], depth, features, gated)  # type: ignore[arg-type]
  values, scales = int4_weight.unpack(weight)
  return Int4Tensor(pack_int4(values[0]), scales[0])


def _rows(tensor: Int4Tensor, rows: slice) -> Int4Tensor:
  return dataclasses.replace(
    tensor, packed=tensor.packed[rows], scales=tensor.scales[rows]
  )


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
  weights: Mapping[str, np.ndarray | Int4Tensor],
  *,
  dtype: jnp.dtype = jnp.float32,
  fingerprint: str | None = None,
  expert_dtype: ExpertDtype = "as_stored",
  sharding: Placement = None,
  finite: bool = False,
) -> Target:
  """Builds a target from arrays with Hugging Face's names.

  Args:
    config: shapes and settings.
    weights: float arrays; each is rounded once to `dtype` (the router's kernel
      and bias stay fp32). Routed experts may be `kdtree_jax.checkpoint.Int4Tensor`s
      with groups of 32. A mapping that reads when asked may have a method
      `describe(name)` that gives (shape, whether it is int4), as `HfWeights` has; then
      each tensor is read once, and everything is checked before the first one is. A
      method `error(name, reason)` gives the exception for values that are not finite.
      Threads call `weights[name]` at the same time.
    dtype: float32 or bfloat16.
    fingerprint: identifies the weights, see `Target`.
    expert_dtype: "as_stored" keeps routed experts int4 if they are, "int4" quantises
      floats, "dequantized" makes them floats of `dtype`.
    sharding: where parameters go as they are built, see `load_checkpoint`.
    finite: whether weights that are NaN or infinite, or too large for `dtype`, are
      refused, as `load_checkpoint` does. Int4 refuses them anyway.

  Raises:
    ValueError: a tensor is missing, left over, or of another shape; it is int4 and may
      not be; some experts are int4 and others are not; int4 does not fit the config; a
      value is not finite.
  """
  check_expert_dtype(expert_dtype)
  int4 = _check(config, weights, expert_dtype == "as_stored")
  if expert_dtype != "as_stored":
    int4 = expert_dtype == "int4"
  target = nnx.eval_shape(
    lambda: Target(
      config,
      dtype=dtype,
      rngs=nnx.Rngs(0),
      fingerprint=fingerprint,
      int4_experts=int4,
    )
  )
  target.set_rope_tables()
  names = {id(variable): name for name, variable in variables(target).items()}
  for variable in (target.cos, target.sin):
    variable.set_value(put(names[id(variable)], variable[...], sharding))
  shapes = weight_shapes(config)
  largest = max(map(math.prod, shapes.values()))
  with Workers() as workers:
    for entry in _entries(target):
      read = tuple(_Tensor(weights, name, entry.int4, finite) for name in entry.names)
      values = [empty(v.shape, v.dtype) for v in entry.variables]
      at_once = largest // math.prod(shapes[entry.names[0]])
      workers.run(entry.pack(tuple(values), read), at_once)
      for variable in entry.variables:
        # Popped and waited for, so that the host's copy goes before the next is made.
        value = put(names[id(variable)], values.pop(0), sharding)
        variable.set_value(jax.block_until_ready(value))
  return target


def target_to_state_dict(
  target: Target, *, expert_dtype: Literal["as_stored", "dequantized"] = "dequantized"
) -> dict[str, Any]:
  """The inverse of `target_from_state_dict`.

  Args:
    target: the module.
    expert_dtype: "dequantized" gives f32 arrays alone, which hold the values exactly;
      under "as_stored" int4 experts are Int4Tensors, which `save_target` stores bit for
      bit.
  """
  from kdtree_jax.checkpoint.int4 import dequantize

  if expert_dtype not in ("as_stored", "dequantized"):
    raise ValueError(
      f"expert_dtype = {expert_dtype!r} is not allowed: 'as_stored' or 'dequantized'"
    )
  weights: dict[str, Any] = {}
  for entry in _entries(target):
    if entry.int4:
      parts = entry.unpack(*(np.asarray(v[...]) for v in entry.variables))
      if expert_dtype == "dequantized":
        parts = map(dequantize, parts)
    else:
      values = (np.asarray(v[...].astype(jnp.float32)) for v in entry.variables)
      parts = map(np.ascontiguousarray, entry.unpack(*values))
    weights.update(zip(entry.names, parts, strict=True))
  return weights


def check_expert_dtype(expert_dtype: str) -> None:
  """Raises a ValueError for a name that `target_from_state_dict` does not know."""
  if expert_dtype not in get_args(ExpertDtype):
    raise ValueError(
      f"expert_dtype = {expert_dtype!r} is not allowed: it must be one of "
      f"{get_args(ExpertDtype)}"
    )


def _stored_int4(stored: Mapping[str, bool]) -> bool:
  """Whether routed experts are int4: all of them, or none."""
  kinds = set(stored.values())
  if len(kinds) > 1:
    odd = next(name for name, int4 in stored.items() if not int4)
    raise ValueError(
      f"tensor {odd!r} is of floats, but other routed experts are int4: "
      "expert_dtype='int4' or 'dequantized' makes them all the same"
    )
  return kinds == {True}


def _error(weights: Mapping[str, Any], name: str, reason: str) -> Exception:
  own = getattr(weights, "error", None)
  return own(name, reason) if own else ValueError(f"tensor {name!r}: {reason}")


def _is_int4(weight: Any) -> bool:
  return hasattr(weight, "packed") and hasattr(weight, "scales")


def _as_floats(weights: Mapping[str, Any], name: str) -> np.ndarray:
  from kdtree_jax.checkpoint.int4 import dequantize

  weight = weights[name]
  if not _is_int4(weight):
    return np.asarray(weight)
  try:
    return dequantize(weight)
  except ValueError as error:
    raise _error(weights, name, str(error)) from error


def _as_int4(weights: Mapping[str, Any], name: str) -> Int4Tensor:
  """The tensor with groups of 32, its scales looked at."""
  from kdtree_jax.checkpoint.int4 import GROUP_SIZE, check_scales, quantize

  weight = weights[name]
  try:
    if not _is_int4(weight):
      return quantize(np.asarray(weight, np.float32))
    check_scales(weight)
    int4_weight.check_scales(weight.scales)
  except ValueError as error:
    raise _error(weights, name, str(error)) from error
  if weight.group_size != GROUP_SIZE:
    raise ValueError(
      f"tensor {name!r} has int4 groups of {weight.group_size}, not of {GROUP_SIZE}"
    )
  return weight


def _check(config: ModelConfig, weights: Mapping[str, Any], as_stored: bool) -> bool:
  """Compares names and shapes; returns whether routed experts are int4."""
  shapes = weight_shapes(config)
  describe = getattr(weights, "describe", None)
  experts = {}
  for name, shape in shapes.items():
    if name not in weights:
      raise ValueError(f"tensor {name!r} is missing from the state dict")
    found_shape, int4 = describe(name) if describe else _describe(weights[name])
    if found_shape != shape:
      raise ValueError(
        f"tensor {name!r} has shape {found_shape}; the config needs {shape}"
      )
    if is_routed_expert(name):
      experts[name] = int4
    elif int4:
      raise ValueError(f"tensor {name!r} is int4; only routed experts may be")
  unexpected = sorted(set(weights) - set(shapes))
  if unexpected:
    raise ValueError(f"unexpected tensor {unexpected[0]!r} in the state dict")
  return as_stored and _stored_int4(experts)


def _describe(weight: Any) -> tuple[tuple[int, ...], bool]:
  int4 = _is_int4(weight)
  return tuple(weight.shape) if int4 else np.shape(weight), int4
