"""A pair with random weights, made on the device; the slice of `slice_config`.

Array by array, in place: there is never a second copy of the weights. Values keep the
residual stream near unit scale, and rows of different tokens apart, so that they are
routed to different experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kdtree_jax.bench.rounds import Start
from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.decoding.state import DecodeState
from kdtree_jax.drafter import DFlash
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.moe import CorrectionBias, Experts
from kdtree_jax.model.target import RopeTable, Target
from kdtree_jax.ops.int4_weight import random_int4

# Random values are formed in fp32 in blocks of at most so many.
_BLOCK = 1 << 26
EXPERTS = ("int4", "as_dtype")


def random_target(
  config: ModelConfig, dtype: jnp.dtype, seed: int = 0, experts: str = "int4"
) -> Target:
  """A target with random weights.

  Args:
    config: its ModelConfig.
    dtype: of activations and of all weights but the routed experts.
    seed: of the weights.
    experts: "int4", or "as_dtype" for experts in `dtype`.

  Raises:
    ValueError: an unknown kind of experts.
  """
  if experts not in EXPERTS:
    raise ValueError(
      f"experts = {experts!r} is not allowed; it must be one of {EXPERTS}"
    )
  target = _abstract(config, dtype, experts == "int4")
  target.set_rope_tables()
  _fill(target, jax.random.key(seed + 1))
  return target


def _abstract(config: ModelConfig, dtype: jnp.dtype, int4_experts: bool) -> Target:
  """A target of shapes."""
  return nnx.eval_shape(
    lambda: Target(config, dtype=dtype, rngs=nnx.Rngs(0), int4_experts=int4_experts)
  )


def random_drafter(
  config: DrafterConfig, layers: int, dtype: jnp.dtype, seed: int = 0
) -> DFlash:
  """A DFlash drafter with random weights.

  Args:
    config: its sizes. Its taps follow `layers`, see `spread_taps`.
    layers: of the target.
    dtype: of its weights.
    seed: of its weights.
  """
  if layers != config.num_target_layers:
    taps = spread_taps(len(config.target_layer_ids), layers)
    config = dataclasses.replace(
      config, target_layer_ids=taps, num_target_layers=layers
    )
  drafter = nnx.eval_shape(lambda: DFlash(config, dtype))
  _fill(drafter, jax.random.key(seed + 2))
  return drafter


def spread_taps(count: int, layers: int) -> tuple[int, ...]:
  """Taps at equal distances from layer 1 to the third last, as published drafters'."""
  first = min(1, layers - 1)
  last = max(layers - 3, first)
  step = (last - first) / max(count - 1, 1)
  return tuple(min(layers - 1, max(0, round(first + i * step))) for i in range(count))


def random_start(
  target: Target, drafter: DFlash, context: int, rounds: int, seed: int = 0
) -> Start:
  """One sequence behind a context of random latents, and room for rounds.

  Args:
    target: the model.
    drafter: its drafter; its context is random too.
    context: committed tokens.
    rounds: for which there is room, however much they accept.
    seed: of the context.

  Raises:
    ValueError: more positions than the target has.
  """
  config = target.config
  longest = rounds * (1 + drafter.max_depth) + 2
  if context < 1 or context + longest > config.max_position_embeddings:
    raise ValueError(
      f"context = {context} is not allowed: with {rounds} rounds it must lie between 1 "
      f"and {config.max_position_embeddings - longest}, by the target's positions"
    )
  keys = jax.random.split(jax.random.key(seed + 3), 4)
  cache = random_cache(target, 1, context, longest, keys[0])
  drafted = drafter.init_state(1, cache.capacity)
  drafted = dataclasses.replace(drafted, keys=_like(drafted.keys, keys[1]))
  drafted = dataclasses.replace(drafted, values=_like(drafted.values, keys[2]))
  state = DecodeState.empty(cache, drafted, longest, config.vocab_size, False)
  state = dataclasses.replace(
    state,
    root=jax.random.randint(keys[3], (1,), 0, config.vocab_size, jnp.int32),
    finish=jnp.zeros_like(state.finish),
    generated=jnp.ones_like(state.generated),
  )
  return Start(target, drafter, state, context + longest, rounds)


def random_cache(
  target: Target, slots: int, context: int, room: int, key: jax.Array
) -> LatentCache:
  """A cache of `context` random rows per sequence, and of `room` further positions."""
  shapes = jax.eval_shape(
    lambda: LatentCache.empty(target.config, slots, context + room, target.dtype)
  )
  # Normed latents, and keys that are rotations of values of unit variance.
  data = _like(shapes.data, key)
  return LatentCache(data, jnp.full((slots,), context, jnp.int32))


def bytes_of(tree: Any) -> int:
  """Bytes of all arrays of a module or pytree, or of their shapes."""
  arrays = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def weight_bytes(experiment: Any, dtype: jnp.dtype) -> int:
  """Bytes that the pair will take, routed experts in int4, from shapes alone."""
  target = _abstract(experiment.model, dtype, int4_experts=True)
  if experiment.drafter is None:
    return bytes_of(target)
  drafter = nnx.eval_shape(lambda: DFlash(experiment.drafter, dtype))
  return bytes_of(target) + bytes_of(drafter)


def _fill(module: nnx.Module, key: jax.Array) -> None:
  """Gives values to all variables of a module that have only shapes."""
  experts = {
    id(variable): (node, name == "gate_up")
    for _, node in nnx.iter_graph(module)
    if isinstance(node, Experts) and node.int4
    for name, variable in (("gate_up", node.gate_up), ("down", node.down))
  }
  for path, variable in list(nnx.iter_graph(module)):
    if not isinstance(variable, nnx.Variable) or isinstance(variable, RopeTable):
      continue
    shape = variable.get_value()
    if not isinstance(shape, jax.ShapeDtypeStruct):
      continue
    key, own = jax.random.split(key)
    if id(variable) in experts:
      value = _tiles(*experts[id(variable)], own)
    elif isinstance(variable, CorrectionBias):
      value = jnp.zeros(shape.shape, shape.dtype)
    elif path[-1] == "weight":  # of a norm
      value = jnp.ones(shape.shape, shape.dtype)
    else:
      deviation = _deviation(path, shape.shape)
      value = _normal(own, shape.shape, deviation, shape.dtype)
    variable.set_value(jax.block_until_ready(value))


def _tiles(experts: Experts, gated: bool, key: jax.Array) -> jax.Array:
  """A layer's gate and up, or down, in int4 and of variance 1 / depth."""
  config = experts.config
  D, F = config.hidden_size, config.moe_intermediate_size
  depth, features = (D, 2 * F) if gated else (F, D)
  weight = _int4(key, config.n_routed_experts, depth, features, gated, depth**-0.5)
  return weight.tiles


def _deviation(path: tuple[Any, ...], shape: tuple[int, ...]) -> float:
  """Standard deviation of a weight: unit variance in, unit variance out."""
  if path[-1] == "embed_tokens":
    return 1.0
  if path[-1] == "k_up":  # [H, C, R], both ways
    return shape[2] ** -0.5
  return shape[-2] ** -0.5  # [.., in, out]


_int4 = jax.jit(random_int4, static_argnums=(1, 2, 3, 4, 5))


def _like(array: Any, key: jax.Array) -> jax.Array:
  """Normal values of the same shape and dtype."""
  return _normal(key, array.shape, 1.0, array.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(
  key: jax.Array, shape: tuple[int, ...], deviation: float, dtype: jnp.dtype
) -> jax.Array:
  size, first = math.prod(shape), shape[0]
  count = next(
    n
    for n in range(1, first + 1)
    if first % n == 0 and (size // n <= _BLOCK or n == first)
  )

  def block(key: jax.Array) -> jax.Array:
    values = jax.random.normal(key, (first // count, *shape[1:]), jnp.float32)
    return (deviation * values).astype(dtype)

  return jax.lax.map(block, jax.random.split(key, count)).reshape(shape)
