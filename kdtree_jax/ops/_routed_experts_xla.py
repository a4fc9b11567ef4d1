"""The routed experts in pure JAX.

Each form gives the outputs of the tokens' experts, [T, k, D]; `combine` sums them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kdtree_jax.ops import int4_weight
from kdtree_jax.ops.grouped_matmul import grouped_matmul
from kdtree_jax.ops.int4_weight import Int4Weight
from kdtree_jax.ops.matmul import einsum, matmul
from kdtree_jax.ops.silu import silu_times

# Up to this many experts it is cheaper on every device to run them all on every
# row than to group rows by expert (the weights are read anyway).
DENSE_EXPERTS = 16

Weight = jax.Array | Int4Weight


def routed_experts_xla(
  x: jax.Array,
  experts: jax.Array,
  weights: jax.Array,
  gate_up: Weight,
  down: Weight,
  experts_axis: int,
) -> jax.Array:
  """As `kdtree_jax.ops.routed_experts`, of arguments that fit."""
  E = down.shape[0]
  known = (experts >= 0) & (experts < E)
  experts = jnp.where(known, experts, 0)
  if isinstance(gate_up, Int4Weight):
    assert isinstance(down, Int4Weight), "the op checks that both or neither are"
    outputs = _int4_outputs(x, experts, gate_up, down)
  else:
    assert not isinstance(down, Int4Weight), "the op checks that both or neither are"
    outputs = _float_outputs(x, experts, gate_up, down, experts_axis)
  return combine(jnp.where(known[..., None], outputs, 0), jnp.where(known, weights, 0))


def combine(outputs: jax.Array, weights: jax.Array) -> jax.Array:
  """Sum over slots of weight * output, in fp32 in slot order, with one cast.

  Args:
    outputs: [T, k, D].
    weights: f32 [T, k].

  Returns:
    [T, D] in the dtype of `outputs`.
  """
  total = jnp.zeros(outputs.shape[::2], jnp.float32)
  for slot in range(outputs.shape[1]):
    weight = weights[:, slot, None]
    total = total + outputs[:, slot].astype(jnp.float32) * weight
  return total.astype(outputs.dtype)


def _float_outputs(
  x: jax.Array, experts: jax.Array, gate_up: jax.Array, down: jax.Array, axis: int
) -> jax.Array:
  if axis == 1 and len(x) == 1:
    return _one_row(x, experts, functools.partial(_kernels, gate_up, down, x.dtype, 1))
  if axis == 1:
    return _all(x, experts, gate_up, down)

  def touched(x, experts, gate_up, down):
    kernels = functools.partial(_kernels, gate_up, down, x.dtype, 0)
    return _touched(x, experts, len(down), kernels)

  # XLA's product by groups is one of all rows by all experts on a CPU.
  return jax.lax.platform_dependent(
    x, experts, gate_up, down, cpu=touched, default=_grouped
  )


def _int4_outputs(
  x: jax.Array, experts: jax.Array, gate_up: Int4Weight, down: Int4Weight
) -> jax.Array:
  """Few experts become floats all at once, many one by one."""
  kernels = functools.partial(_kernels, gate_up, down, x.dtype, 0)
  if down.groups > DENSE_EXPERTS:
    return _touched(x, experts, down.groups, kernels)
  if len(x) == 1:
    return _one_row(x, experts, kernels)
  side_by_side = jnp.swapaxes(int4_weight.dequantize(gate_up, x.dtype), 0, 1)
  side_by_side = jax.lax.optimization_barrier(side_by_side)
  return _all(x, experts, side_by_side, _floats(down, x.dtype))


def _floats(weight: Int4Weight, dtype: jnp.dtype) -> jax.Array:
  # The barrier: products of these floats are compiled like those of stored ones.
  return jax.lax.optimization_barrier(int4_weight.dequantize(weight, dtype))


def _kernels(
  gate_up: Weight, down: Weight, dtype: jnp.dtype, axis: int, expert: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """One expert's kernels [D, 2F] and [F, D]; no others are read."""

  def one(weight: Weight, axis: int) -> jax.Array:
    if isinstance(weight, Int4Weight):
      return _floats(int4_weight.take(weight, expert[None]), dtype)[0]
    return jax.lax.dynamic_index_in_dim(weight, expert, axis, keepdims=False)

  return one(gate_up, axis), one(down, 0)


def _expert(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
  h = matmul(x, gate_up)
  F = down.shape[0]
  return matmul(silu_times(h[:, :F], h[:, F:]), down)


def _all(
  x: jax.Array, experts: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
  """Every expert on every row, gate_up [D, E, 2F]; the chosen are picked after."""
  T, D = x.shape
  E, F = down.shape[:2]
  h = matmul(x, gate_up.reshape(D, -1)).reshape(T, E, 2 * F)
  h = silu_times(h[..., :F], h[..., F:])
  out = einsum("tef,efd->etd", h, down, x.dtype)
  return out[experts, jnp.arange(T)[:, None]]


def _one_row(
  x: jax.Array,
  experts: jax.Array,
  kernels: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
  """Reads the weights of the chosen experts only: [1, D] -> [1, k, D]."""
  slots = range(experts.shape[1])
  return jnp.stack([_expert(x, *kernels(experts[0, slot])) for slot in slots], axis=1)


def _touched(
  x: jax.Array,
  experts: jax.Array,
  E: int,
  kernels: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
  """One expert after the other, each on all rows, those alone that a row chose."""
  T, k = experts.shape
  chosen = jnp.zeros((E,), bool).at[experts.reshape(-1)].set(True)
  (ids,) = jnp.nonzero(chosen, size=min(T * k, E), fill_value=E)

  def step(outputs: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
    def run(outputs: jax.Array) -> jax.Array:
      out = _expert(x, *kernels(expert))
      return jnp.where((experts == expert)[..., None], out[:, None], outputs)

    return jax.lax.cond(expert < E, run, lambda outputs: outputs, outputs), None

  outputs = jnp.zeros((T, k, x.shape[1]), x.dtype)
  return jax.lax.scan(step, outputs, ids)[0]


def _grouped(
  x: jax.Array, experts: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
  """Rows sorted by expert, one grouped product each way."""
  T, k = experts.shape
  F = down.shape[1]
  flat = experts.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.bincount(flat, length=len(down)).astype(jnp.int32)
  h = grouped_matmul(x[order // k], gate_up, sizes, implementation="xla")
  h = silu_times(h[:, :F], h[:, F:])
  out = grouped_matmul(h, down, sizes, implementation="xla")
  return jnp.zeros_like(out).at[order].set(out).reshape(T, k, out.shape[1])
