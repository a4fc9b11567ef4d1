"""The routed experts of a mixture: what the chosen experts make of each token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation, int4_weight
from kdtree_jax.ops._checks import as_array, check_integers, check_static_integers
from kdtree_jax.ops._routed_experts_cuda import obstacle, routed_experts_cuda
from kdtree_jax.ops._routed_experts_xla import Weight, routed_experts_xla
from kdtree_jax.ops.int4_weight import Int4Weight

_FLOATS = (jnp.float32, jnp.bfloat16)


def routed_experts(
  x: jax.Array,
  experts: jax.Array,
  weights: jax.Array,
  gate_up: Weight,
  down: Weight,
  *,
  experts_axis: int = 0,
  implementation: str = "auto",
) -> jax.Array:
  """Sum over a token's slots of `weight * down(silu(gate(x)) * up(x))`.

  Products are accumulated in fp32 and rounded once to the dtype of `x`, as are gate,
  silu(gate) and its product with up; the sum is formed in fp32 in slot order and
  rounded once.

  Args:
    x: [T, D] tokens, f32 or bf16.
    experts: i32 [T, k] expert of each slot. A slot whose id is not in [0, E) adds 0.
    weights: f32 [T, k].
    gate_up: [E, D, 2F] in the dtype of `x`, gate in the first F columns; [D, E, 2F]
      with `experts_axis=1`; or an `Int4Weight` [E, D, 2F] with `gated`.
    down: [E, F, D] in the dtype of `x`, or an `Int4Weight` if gate_up is one.
    experts_axis: axis of gate_up that counts experts. 1 runs all of them on every
      row, as one flat product.
    implementation: "auto", "xla" or "cuda". "cuda" is four launches, in which a
      token's bits depend on the token and its experts alone; it takes up to 8,192
      experts, and in bf16 F and D that are multiples of 16.

  Returns:
    [T, D] in the dtype of `x`. Int4 weights count with their exact value where that is
    float32, rounded once where it is bfloat16.

  Raises:
    ValueError: shapes or dtypes disagree, or what "cuda" does not take.
    NotImplementedError: "cuda" without the CUDA library.
  """
  x, experts, weights = map(as_array, (x, experts, weights))
  _check_rows(x, experts, weights)
  gate_up, down = _checked_weights(x, gate_up, down, experts_axis)
  implementation = _implementation.within_limits(
    "routed_experts", implementation, obstacle(x, down)
  )
  return _implementation.dispatch(
    "routed_experts",
    implementation,
    functools.partial(routed_experts_cuda, experts_axis=experts_axis),
    functools.partial(routed_experts_xla, experts_axis=experts_axis),
    x,
    experts,
    weights,
    gate_up,
    down,
  )


def _check_rows(x: Any, experts: Any, weights: Any) -> None:
  if x.ndim != 2 or x.dtype not in _FLOATS:
    raise ValueError(
      f"x must be [T, D] in float32 or bfloat16; it is {x.dtype} {list(x.shape)}"
    )
  if experts.ndim != 2 or len(experts) != len(x) or not experts.shape[1]:
    raise ValueError(
      f"experts must be [{len(x)}, k] to fit x {list(x.shape)}; "
      f"they are {list(experts.shape)}"
    )
  check_integers(experts=experts)
  if weights.shape != experts.shape or weights.dtype != jnp.float32:
    raise ValueError(
      f"weights must be float32 {list(experts.shape)}, as experts; "
      f"they are {weights.dtype} {list(weights.shape)}"
    )


def _checked_weights(
  x: Any, gate_up: Any, down: Any, experts_axis: int
) -> tuple[Weight, Weight]:
  check_static_integers(experts_axis=experts_axis)
  if experts_axis not in (0, 1):
    raise ValueError(
      f"experts_axis = {experts_axis!r} is not allowed: it must be 0 or 1"
    )
  if isinstance(gate_up, Int4Weight) != isinstance(down, Int4Weight):
    kinds = type(gate_up).__name__, type(down).__name__
    raise ValueError(
      f"gate_up is {kinds[0]}, down is {kinds[1]}: both or neither must be Int4Weight"
    )
  if isinstance(gate_up, Int4Weight):
    if experts_axis:
      raise ValueError(
        "experts_axis = 1 is not allowed with int4 weights: it must be 0"
      )
    for name, weight, gated in (("gate_up", gate_up, True), ("down", down, False)):
      int4_weight.check(name, weight)
      if weight.gated != gated:
        raise ValueError(f"{name}.gated = {weight.gated} is not allowed here: {gated}")
  else:
    gate_up, down = as_array(gate_up), as_array(down)
    for name, weight in (("gate_up", gate_up), ("down", down)):
      if weight.ndim != 3 or weight.dtype != x.dtype:
        raise ValueError(
          f"{name} must be of three axes in the dtype of x, {x.dtype}; "
          f"it is {weight.dtype} {list(weight.shape)}"
        )
  E, F, D = down.shape
  if not F or not D:
    raise ValueError(f"down is [E, {F}, {D}]; no size may be 0")
  wanted = (D, E, 2 * F) if experts_axis else (E, D, 2 * F)
  if D != x.shape[1] or E < 1:
    raise ValueError(
      f"down must be [E, F, {x.shape[1]}] to fit x {list(x.shape)}; it is {[E, F, D]}"
    )
  if gate_up.shape != wanted:
    raise ValueError(
      f"gate_up must be {list(wanted)} to fit down {[E, F, D]}; "
      f"it is {list(gate_up.shape)}"
    )
  return gate_up, down
