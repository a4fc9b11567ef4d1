"""One round of decoding, and the compiled loop of many rounds.

Plain decoding, a chain and a tree run the same `verify_step`: only the tree
differs (the root alone, a path, or a tree). The step stands behind optimization
barriers so that the compiler sees the same computation in each of these
programs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.decoding.emit import Accepted, append, keep_logits
from kdtree_jax.decoding.sampling import Sampler
from kdtree_jax.decoding.state import DecodeState, Limits, RoundTrace
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target
from kdtree_jax.ops.accept_tree import accept_tree
from kdtree_jax.ops.ancestors import ancestors
from kdtree_jax.ops.build_tree import build_tree, chain_tree
from kdtree_jax.ops.compaction import compact
from kdtree_jax.ops.token_log_probs import token_log_probs
from kdtree_jax.tree import Tree

# Ops of a round that take `Program.implementation`, the target's among them.
OPS = (
  "rms_norm",
  "add_rms_norm",
  "matmul",
  "matmul_chain",
  "routed_experts",
  "tree_attention",
  "rope_keys",
  "rope_queries",
  "route",
  "ancestors",
  "build_tree",
  "chain_tree",
  "best_token",
  "accept_tree",
  "token_log_probs",
  "emit",
  "compact",
)


@dataclasses.dataclass(frozen=True)
class Program:
  """What one compiled program is specialised for.

  Attributes:
    method: "plain", "chain" or "ddtree".
    rows: rows per sequence of the verify step.
    depth: deepest draft, 0 for "plain".
    trace_rounds: rounds of a call of which a `RoundTrace` is kept, or 0. The
      number of rounds itself is no part of the program.
    implementation: of the ops.
  """

  method: str
  rows: int
  depth: int
  trace_rounds: int
  implementation: str


def verify_step(
  target: Target,
  cache: LatentCache,
  tree: Tree,
  feature_layers: tuple[int, ...],
  implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The target's forward pass over a tree.

  Args:
    target: the model.
    cache: committed tokens; the root sits at position `cache.lengths`.
    tree: N slots.
    feature_layers: taps.
    implementation: of the ops.

  Returns:
    (logits f32 [B, N, V], features [B, N, taps * D], keys [layers, B, N, R + P]).
  """
  # As many ancestors as rows, not as the method's depth: one shape for all methods.
  lineage = ancestors(tree, tree.rows - 1, implementation=implementation)
  inputs = (tree.token_ids, lineage, tree.depths, cache.data)
  tokens, lineage, depths, data = jax.lax.optimization_barrier(inputs)
  hidden, features, keys = target.step(
    tokens,
    lineage,
    depths,
    data,
    cache.lengths,
    feature_layers=feature_layers,
    implementation=implementation,
  )
  logits = target.head(hidden, implementation)
  return jax.lax.optimization_barrier((logits, features, keys))


def one_round(
  target: Target,
  drafter: Any,
  state: DecodeState,
  sampler: Sampler,
  limits: Limits,
  program: Program,
) -> tuple[DecodeState, RoundTrace | None]:
  """Draft, build, verify, accept, commit."""
  lengths = state.cache.lengths
  with jax.named_scope("draft"):
    tree, draft_logits = _propose(target, drafter, state, limits, program)
  with jax.named_scope("verify"):
    taps = () if drafter is None else tuple(drafter.feature_layers)
    logits, features, keys = verify_step(
      target, state.cache, tree, taps, program.implementation
    )
  with jax.named_scope("accept"):
    choices = sampler.choose(
      logits,
      state.sequence_ids,
      lengths + 1,
      tree.depths,
      program.depth,
      program.implementation,
    )
    path, length, bonus = accept_tree(
      tree, choices, program.depth, implementation=program.implementation
    )
    log_probs = token_log_probs(
      logits, choices, path, implementation=program.implementation
    )
    accepted = Accepted(tree.token_ids, choices, path, length, bonus, log_probs)
  with jax.named_scope("commit"):
    generated = state.generated
    state, commit = append(state, accepted, limits, program.implementation)
    state = keep_logits(state, logits, path, commit, generated)
    data = compact(
      state.cache.data,
      keys,
      path,
      commit.length,
      lengths,
      implementation=program.implementation,
    )
    drafter_state = state.drafter
    if drafter is not None:
      slots = jnp.maximum(path, 0)[:, :, None]
      path_features = jnp.take_along_axis(features, slots, axis=1)
      drafter_state = drafter.observe(
        target,
        drafter_state,
        commit.path_tokens,
        path_features,
        lengths,
        commit.length,
      )
    state = dataclasses.replace(
      state,
      cache=LatentCache(data, state.cache.lengths),
      drafter=drafter_state,
    )
  if not program.trace_rounds:
    return state, None
  return state, RoundTrace(tree, draft_logits, path, commit.length, lengths)


def _propose(
  target: Target,
  drafter: Any,
  state: DecodeState,
  limits: Limits,
  program: Program,
) -> tuple[Tree, jax.Array]:
  """The round's tree and the drafter's logits [B, L, V] (L = 0 for plain)."""
  B, V = state.root.shape[0], target.config.vocab_size
  if program.method == "plain":
    tree = Tree.root_only(state.root, program.rows)
    return tree, jnp.zeros((B, 0, V), jnp.float32)
  lengths = state.cache.lengths
  logits = drafter.draft(target, state.drafter, state.root, lengths, state.sequence_ids)
  logits = logits[:, : program.depth]
  # A node needs a free row of the cache at its own position.
  depth_left = limits.capacity - 1 - lengths
  if program.method == "chain":
    limit = jnp.minimum(limits.budget, depth_left)
    tree = chain_tree(
      logits,
      state.root,
      rows=program.rows,
      limit=limit,
      implementation=program.implementation,
    )
    return tree, logits
  tree = build_tree(
    logits,
    state.root,
    program.rows - 1,
    rows=program.rows,
    limit=jnp.broadcast_to(limits.budget, (B,)),
    max_depth=depth_left,
    implementation=program.implementation,
  )
  return tree, logits


def run_rounds(
  target: Target,
  drafter: Any,
  state: DecodeState,
  sampler: Sampler,
  limits: Limits,
  rounds: jax.Array,
  program: Program,
) -> tuple[DecodeState, RoundTrace | None, jax.Array]:
  """Up to `rounds` rounds, fewer where all slots have ended.

  Args:
    target, drafter, state, sampler, limits: as in `one_round`.
    rounds: i32 [], at most `program.trace_rounds` where that is not 0.
    program: static.

  Returns:
    (state, traces with a leading axis [trace_rounds] or None, i32 [] rounds run).
  """
  traces = None
  if program.trace_rounds:
    shapes = jax.eval_shape(
      lambda s: one_round(target, drafter, s, sampler, limits, program)[1], state
    )
    traces = jax.tree.map(
      lambda x: jnp.zeros((program.trace_rounds, *x.shape), x.dtype), shapes
    )

  def goes_on(carry) -> jax.Array:
    state, _, r = carry
    return (r < rounds) & jnp.any(state.running)

  def body(carry):
    state, traces, r = carry
    state, trace = one_round(target, drafter, state, sampler, limits, program)
    if program.trace_rounds:
      traces = jax.tree.map(
        lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, r, 0),
        traces,
        trace,
      )
    return state, traces, r + 1

  return jax.lax.while_loop(goes_on, body, (state, traces, jnp.zeros((), jnp.int32)))
