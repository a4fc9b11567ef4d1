"""Every op under jit with vmap and derivatives, in programs for both platforms.

With the library built, "auto" traces the CUDA form too, even where there is no GPU: it
must bear whatever the XLA form bears.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.decoding.emit import append
from kdtree_jax.ops import _implementation
from tests.decoding.emit_test import limits, random_case
from tests.ops.custom_calls import cuda_text, need_library


@pytest.fixture(autouse=True)
def _on_the_cpu():
  """Where "auto" runs the XLA form, and its bits are those of "xla"."""
  with jax.default_device(jax.devices("cpu")[0]):
    yield


LIMITED = "build_tree, limited"
B, N, A, L, V, P = 2, 4, 3, 3, 11, 8


@dataclasses.dataclass(frozen=True)
class Case:
  """An op with arguments.

  Attributes:
    run: the op, of `args` and `implementation`.
    args: pytrees of arrays, each of which can be given another leading axis.
    reverse: whether the XLA form has a gradient; loops of traced length have none.
    rounding: what gradients may differ by, of themselves and of 1. XLA forms the sums
      of a norm's gradient in an order that depends on what it fuses them with.
  """

  run: Callable[..., Any]
  args: tuple[Any, ...]
  reverse: bool = True
  rounding: float = 0.0


@functools.cache
def cases() -> dict[str, Case]:
  rng = np.random.default_rng(0)

  def floats(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  roots = jnp.array([3, 5], jnp.int32)
  tree = ops.build_tree(floats(B, L, V), roots, N - 1, implementation="xla")
  choices = jnp.asarray(rng.integers(0, V, (B, N)), jnp.int32)
  path = jnp.array([[0, 1, -1], [0, 2, 3]], jnp.int32)
  length, start = jnp.array([2, 3], jnp.int32), jnp.array([4, 0], jnp.int32)
  positions = jnp.asarray(rng.integers(0, 9, (B, N)), jnp.int32)
  table = tuple(map(jnp.asarray, ops.rope_table(P, 9, 1e4, None)))
  angles = {
    "frequencies": ops.RopeFrequencies.create(P, 1e4, None),
    "interleave": True,
  }
  state, accepted = random_case(rng, B)

  def emit(tokens, log_probs, implementation):
    mine = dataclasses.replace(accepted, token_ids=tokens, log_probs=log_probs)
    return append(state, mine, limits(), implementation)[0].logprobs

  def chain(x, w, weight, heads, h, implementation):
    steps = (
      ("matmul", w),
      ("rms_norm", weight, 1e-6),
      ("head_matmul", heads),
      ("add_rms_norm", h, jnp.ones(2 * P), 1e-6),
    )
    return ops.matmul_chain(x, steps, implementation)

  attention = functools.partial(ops.tree_attention, scale=0.3, value_dim=6)
  reach = ops.ancestors(tree, A, implementation="xla")
  keys = (floats(B, N, 2, 8), floats(B, 128, 8), floats(B, N, 8))
  logits = floats(B, L, V)
  log_probs, ids = ops.log_softmax_topk(logits, 4, implementation="xla")
  return {
    "accept_tree": Case(
      functools.partial(ops.accept_tree, max_depth=A), (tree, choices)
    ),
    "add_rms_norm": Case(
      functools.partial(ops.add_rms_norm, eps=1e-6),
      (floats(B, N, P), floats(B, N, P), floats(P)),
      rounding=1e-5,
    ),
    "ancestors": Case(functools.partial(ops.ancestors, max_depth=A), (tree,)),
    "best_token": Case(ops.best_token, (logits,)),
    "build_tree": Case(functools.partial(ops.build_tree, budget=5), (logits, roots)),
    LIMITED: Case(
      lambda x, r, limit, **i: ops.build_tree(x, r, 5, limit=limit, **i),
      (logits, roots, length),
      reverse=False,
    ),
    "chain_tree": Case(ops.chain_tree, (logits, roots)),
    "compact": Case(
      ops.compact, (floats(2, B, 9, 5), floats(2, B, N, 5), path, length, start)
    ),
    "emit": Case(emit, (accepted.token_ids, accepted.log_probs)),
    "gated_matmul": Case(ops.gated_matmul, (floats(B, N, P), floats(P, 6))),
    "grouped_matmul": Case(
      ops.grouped_matmul, (floats(5, P), floats(3, P, 6), jnp.array([2, 0, 3]))
    ),
    "head_matmul": Case(ops.head_matmul, (floats(B, N, 3, P), floats(3, P, 6))),
    "log_softmax_topk": Case(functools.partial(ops.log_softmax_topk, k=4), (logits,)),
    "matmul": Case(ops.matmul, (floats(B, N, P), floats(P, 6))),
    "matmul_chain": Case(
      chain,
      (floats(B, N, P), floats(P, 6), floats(6), floats(2, 3, P), floats(B, N, 2 * P)),
      rounding=1e-5,  # As of rms_norm: four steps of sums of up to 16 such values.
    ),
    "rms_norm": Case(
      functools.partial(ops.rms_norm, eps=1e-6),
      (floats(B, N, P), floats(P)),
      rounding=1e-5,  # Some ten sums of eight values of size 1, with 2^-24 each.
    ),
    "rope": Case(
      functools.partial(ops.rope, **angles), (floats(B, N, P), positions, *table)
    ),
    "rope_keys": Case(
      functools.partial(ops.rope_keys, eps=1e-6, **angles),
      (floats(B, N, 6 + P), floats(6), positions, *table),
    ),
    "rope_queries": Case(
      functools.partial(ops.rope_queries, **angles),
      (floats(B, N, 2, 6), floats(B, N, 2, 3 + P), positions, *table),
    ),
    "route": Case(
      functools.partial(
        ops.route, k=3, scoring="sigmoid", n_group=4, topk_group=2, scaling=0.5
      ),
      (floats(B, P), floats(P)),
    ),
    "routed_experts": Case(
      ops.routed_experts,
      (
        floats(5, P),
        jnp.asarray(rng.integers(0, 3, (5, 2)), jnp.int32),
        floats(5, 2),
        floats(3, P, 12),
        floats(3, 6, P),
      ),
    ),
    "token_log_probs": Case(ops.token_log_probs, (floats(B, N, V), choices, path)),
    "tree_attention": Case(
      attention, (*keys, reach, tree.depths, start), reverse=False
    ),
    "tree_from_table": Case(
      functools.partial(ops.tree_from_table, budget=5), (log_probs, ids, roots)
    ),
  }


every_op = pytest.mark.parametrize("name", sorted(_implementation.CUDA_OPS | {LIMITED}))


def total(case: Case, implementation: str) -> Callable[..., jax.Array]:
  """A number that depends on all floating results, and the integers on none."""

  def run(floating, *args):
    leaves, structure = jax.tree.flatten(args)
    values = iter(floating)
    leaves = [next(values) if _floating(x) else x for x in leaves]
    args = jax.tree.unflatten(structure, leaves)
    out = jax.tree.leaves(case.run(*args, implementation=implementation))
    used = [jnp.sum(jnp.where(jnp.isfinite(x), jnp.sin(x), 0)) for x in out]
    return sum(used, sum(map(jnp.sum, floating), jnp.zeros(())))

  return run


def _floating(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def floating(case: Case) -> list[jax.Array]:
  return [x for x in jax.tree.leaves(case.args) if _floating(x)]


def same(one: Any, other: Any, rounding: float = 0.0) -> None:
  close = functools.partial(np.testing.assert_allclose, rtol=rounding, atol=rounding)
  jax.tree.map(close if rounding else np.testing.assert_array_equal, one, other)


def along(run: Callable[..., jax.Array], args: list[Any], case: Case) -> Any:
  """The derivative along the arguments' own direction."""
  return jax.jvp(lambda *x: run(x, *case.args), args, args)[1]


@every_op
def test_forward_derivatives(name: str):
  need_library()
  case = cases()[name]
  args = floating(case)

  def derivative(implementation: str, twice: bool = False):
    def once(*args):
      return along(total(case, implementation), list(args), case)

    if not twice:
      return once
    return lambda *args: jax.jvp(once, args, args)[1]

  derivatives = [jax.jit(derivative(form))(*args) for form in ("xla", "auto")]
  same(*derivatives, case.rounding)
  cuda_text(derivative("auto"), *args)
  cuda_text(derivative("auto", twice=True), *args)


@every_op
def test_gradients(name: str):
  need_library()
  case = cases()[name]
  if not case.reverse:
    pytest.skip("the XLA form has no gradient, for its loop is of traced length")
  args = floating(case)

  def gradient(implementation: str):
    return lambda *args: jax.grad(total(case, implementation))(list(args), *case.args)

  gradients = [jax.jit(gradient(form))(*args) for form in ("xla", "auto")]
  same(*gradients, case.rounding)
  cuda_text(gradient("auto"), *args)


@every_op
def test_vmap(name: str):
  need_library()
  case = cases()[name]
  # Two different members, each of which must come out as if alone.
  batch = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x, 0)]), case.args)

  def mapped(implementation: str):
    run = functools.partial(case.run, implementation=implementation)
    return jax.vmap(lambda *args: run(*args))

  same(jax.jit(mapped("xla"))(*batch), jax.jit(mapped("auto"))(*batch))
  op = name.split(",")[0]
  op = {"chain_tree": "build_tree", "gated_matmul": "matmul"}.get(op, op)
  target = f"@kdtree_jax.{op}"
  text = cuda_text(mapped("auto"), *batch)
  assert text.count(target + "(") == 1 and "stablehlo.while" in text  # One by one.
  if name == "compact":
    assert "output_operand_alias<output_tuple_indices = []" in text


@every_op
def test_the_program_for_cuda_calls_the_kernel_alone(name: str):
  """What makes an op differentiable leaves nothing behind where it is not."""
  case = cases()[name]

  def run(*args):
    return case.run(*args, implementation="auto")

  text = cuda_text(run, *case.args)
  assert text.count("stablehlo.custom_call @kdtree_jax.") == 1
  for form in ("while", "scatter", "sort", "dot_general", "cosine", "exponential"):
    assert f"stablehlo.{form}" not in text
