"""Cases of `--suite=kernels` that multiply by weights: dense, grouped, routed experts.

Weights are larger than a cache and made once, input sets differ in their rows and in
where they are routed. Of grouped weights only those count that random rows are expected
to reach.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax import ops
from kdtree_jax.bench.kernel_cases import BF16, Case
from kdtree_jax.bench.timing import add_zero
from kdtree_jax.ops.int4_weight import random_int4, tiles_shape
from kdtree_jax.ops.matmul import matmul
from kdtree_jax.ops.routed_experts import routed_experts as routed_experts_op

_int4 = jax.jit(random_int4, static_argnums=(1, 2, 3, 4, 5))


def expected_groups(groups: int, draws: int, of_each: int = 1) -> float:
  """Groups that `draws` rows are expected to reach, each `of_each` different ones."""
  return groups * (1 - (1 - of_each / groups) ** draws)


def dense(rows: int, depth: int = 7168, features: int = 12288, **fields: Any) -> Case:
  """One product, bf16."""

  def shared(key):
    return (depth**-0.5 * _normal(key, (depth, features)),)

  def inputs(key):
    return _normal(key, (rows, depth))

  def call(w, x, implementation):
    return matmul(x, w, implementation=implementation)

  return Case(
    op="matmul",
    shape=f"{_rows(rows)}, {depth} x {features} bf16",
    inputs=inputs,
    shared=shared,
    call=call,
    link=add_zero,
    bytes_moved=2 * (depth * features + rows * (depth + features)),
    flops=2 * rows * depth * features,
    **fields,
  )


def grouped(
  rows: int,
  groups: int = 48,
  depth: int = 7168,
  features: int = 2048,
  **fields: Any,
) -> Case:
  """Rows spread at random over groups, bf16."""

  def shared(key):
    return (depth**-0.5 * _normal(key, (groups, depth, features)),)

  def inputs(key):
    keys = jax.random.split(key)
    chosen = jax.random.randint(keys[0], (rows,), 0, groups)
    sizes = jnp.bincount(chosen, length=groups).astype(jnp.int32)
    return _normal(keys[1], (rows, depth)), sizes

  def call(weights, inputs, implementation):
    x, sizes = inputs
    return ops.grouped_matmul(x, weights, sizes, implementation=implementation)

  reached = expected_groups(groups, rows)
  return Case(
    op="grouped_matmul",
    shape=f"{_rows(rows)}, {groups} x {depth} x {features} bf16",
    inputs=inputs,
    shared=shared,
    call=call,
    link=_link_last,
    bytes_moved=round(2 * (reached * depth * features + rows * (depth + features))),
    flops=2 * rows * depth * features,
    **fields,
  )


def routed_experts(
  tokens: int,
  experts: int = 384,
  chosen: int = 8,
  hidden: int = 7168,
  inner: int = 2048,
  **fields: Any,
) -> Case:
  """The routed experts of a Kimi layer in int4: gate, up, SwiGLU, down, combine."""
  up, down = (experts, hidden, 2 * inner), (experts, inner, hidden)

  def shared(key):
    keys = jax.random.split(key)
    gate_up = _int4(keys[0], *up, True, hidden**-0.5)
    return gate_up, _int4(keys[1], *down, False, inner**-0.5)

  def inputs(key):
    keys = jax.random.split(key, 3)
    ids = jax.lax.top_k(jax.random.uniform(keys[0], (tokens, experts)), chosen)[1]
    weights = jax.random.uniform(keys[1], (tokens, chosen), jnp.float32, 0.1, 0.5)
    return _normal(keys[2], (tokens, hidden)), weights, ids.astype(jnp.int32)

  def call(gate_up, down, inputs, implementation):
    x, weights, ids = inputs
    return routed_experts_op(
      x, ids, weights, gate_up, down, implementation=implementation
    )

  one = sum(math.prod(tiles_shape(1, *shape[1:])) for shape in (up, down))
  reached = expected_groups(experts, tokens, chosen)
  products = 3 * hidden * inner
  return Case(
    op="routed_experts",
    shape=f"{_rows(tokens, 'token')}, {chosen} of {experts}, {hidden} x {inner} int4",
    inputs=inputs,
    shared=shared,
    call=call,
    link=_link_last,
    bytes_moved=round(reached * one + 2 * 2 * tokens * hidden),
    flops=2 * tokens * chosen * products,
    **fields,
  )


def standard() -> list[Case]:
  """Rows of the tables in docs/kernels.md."""
  # All experts as floats are 34 GB a layer, more with what XLA makes on the way.
  alone: dict[str, Any] = {"no_xla": "XLA's form makes floats of all experts"}
  few: dict[str, Any] = {"xla_calls": 2}
  return [
    *(dense(rows, bar_us=50) for rows in (1, 8, 16, 32, 64)),
    grouped(1, bar_us=20, **few),
    grouped(8, bar_us=65, **few),
    grouped(64, bar_us=290, **few),
    routed_experts(1, bar_us=65, **alone),
    routed_experts(4, bar_us=220, **alone),
    routed_experts(16, bar_us=735, **alone),
    routed_experts(64, bar_us=1910, **alone),
  ]


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """bf16 values of unit variance."""
  return jax.random.normal(key, shape, jnp.float32).astype(BF16)


def _link_last(inputs: tuple[Any, ...], zero: jax.Array) -> tuple[Any, ...]:
  return (*inputs[:-1], add_zero(inputs[-1], zero))


def _rows(number: int, noun: str = "row") -> str:
  return f"{number} {noun}" + "s" * (number != 1)
