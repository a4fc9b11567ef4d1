"""Best-first draft trees in pure JAX, batched: the XLA form of `ops.build_tree`.

There is no heap: each taken node has exactly one candidate, its best child not yet
taken, so the frontier is one value per slot and a pop is an arg-max over slots.

The published heap orders equal sums by the tuple of ranks. No tuple is stored
here, because the tree knows that order already: the candidate of node n comes
after everything below n and before whatever follows n, so candidates are ordered
as their parents are in post-order. A new node is its parent's last child, hence
its post-order index is its parent's, and all from there on move up by one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kdtree_jax.ops._gather import pick
from kdtree_jax.tree import NO_PARENT, Tree

# Partial sums of one row: the CPU backend adds over a leading axis in SIMD lanes,
# along a single long axis one by one.
_LANES = 8


class _Frontier(NamedTuple):
  """State of the search, one value per slot; unused slots have sum -inf."""

  sums: jax.Array  # f32[B, N] path sum of the slot's node
  best: jax.Array  # f32[B, N] path sum of its best child not yet taken
  child: jax.Array  # i32[B, N] that child's index into the flat table
  order: jax.Array  # i32[B, N] post-order index
  parents: jax.Array  # i32[B, N]
  entry: jax.Array  # i32[B, N] the node's own index into the flat table


def log_softmax_topk(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """See `kdtree_jax.ops.log_softmax_topk`."""
  B, L, V = logits.shape
  x = logits.astype(jnp.float32).reshape(B * L, V)
  # top_k orders -0.0 below 0.0; as logits they are a tie.
  x = jnp.where(x == 0, 0.0, x)
  # The barrier keeps slices of the result away from top_k, which the CPU compiler
  # would otherwise turn into a sort of the whole row, a hundred times slower.
  values, ids = jax.lax.optimization_barrier(jax.lax.top_k(x, k))
  top = values[:, :1]
  exps = jnp.exp(x - top)
  exps = jnp.pad(exps, ((0, 0), (0, -V % _LANES)))
  total = jnp.sum(exps.reshape(B * L, _LANES, -(-V // _LANES)), axis=1)
  log_z = top + jnp.log(jnp.sum(total, axis=-1, keepdims=True))
  return (values - log_z).reshape(B, L, k), ids.reshape(B, L, k)


def tree_from_table(
  log_probs: jax.Array,
  token_ids: jax.Array,
  root_tokens: jax.Array,
  limit: jax.Array | None,
  max_depth: jax.Array | None,
  *,
  budget: int,
  rows: int,
) -> Tree:
  """See `kdtree_jax.ops.tree_from_table`. `limit` and `max_depth` are [B] or [1]."""
  B, L, k = log_probs.shape
  depth = jnp.arange(1, L + 1)[:, None]
  table = log_probs.astype(jnp.float32)
  # The root's sum is 0.0, and 0.0 + -0.0 is 0.0: so are the reference's sums.
  table = jnp.where(table == 0, 0.0, jnp.where(table > -jnp.inf, table, -jnp.inf))
  if max_depth is not None:
    table = jnp.where(depth <= max_depth[:, None, None], table, -jnp.inf)
  # One more column ends each list of siblings, one more row the deepest paths.
  table = jnp.pad(table, ((0, 0), (0, 1), (0, 1)), constant_values=-jnp.inf)
  found = _best_first(table.reshape(B, -1), k + 1, budget, limit)
  slots = jnp.arange(1 + budget)
  live = found.sums > -jnp.inf
  if limit is not None:
    live &= slots <= jnp.maximum(limit, 0)[:, None]
  drafted = live & (slots > 0)
  tokens = jnp.pad(token_ids, ((0, 0), (0, 1), (0, 1))).reshape(B, -1)
  tokens = pick(tokens, found.entry)
  tokens = jnp.where(slots == 0, root_tokens[:, None], tokens)
  tree = Tree(
    token_ids=jnp.where(live, tokens, 0).astype(jnp.int32),
    parents=jnp.where(drafted, found.parents, NO_PARENT),
    depths=jnp.where(drafted, jax.lax.div(found.entry, k + 1) + 1, 0),
    log_probs=jnp.where(live, found.sums, -jnp.inf),
    size=jnp.sum(live, axis=1, dtype=jnp.int32),
  )
  return tree.pad_to(rows)


def _best_first(
  table: jax.Array, width: int, budget: int, limit: jax.Array | None
) -> _Frontier:
  """Takes the best candidate `budget` times.

  Args:
    table: f32[B, (L + 1) * width], log-probabilities by depth and rank, each row
      of `width` ended by -inf, and a last row of -inf.
    width: entries per depth.
    budget: nodes to take.
    limit: no more than its maximum are taken, for speed.
  """
  B, N = table.shape[0], 1 + budget
  slots = jnp.arange(N, dtype=jnp.int32)
  zeros = jnp.zeros((B, N), jnp.int32)
  nothing = jnp.full((B, N), -jnp.inf, jnp.float32)
  start = _Frontier(
    sums=jnp.where(slots == 0, 0.0, nothing),
    best=jnp.where(slots == 0, table[:, :1], nothing),
    child=zeros,
    order=zeros,
    parents=zeros,
    entry=zeros,
  )

  def take(slot: jax.Array, s: _Frontier) -> _Frontier:
    path_sum = jnp.max(s.best, axis=1, keepdims=True)
    # Lowest post-order index among the equal ones, and its slot, in one minimum.
    key = jnp.where(s.best == path_sum, s.order * N + slots, N * N)
    key = jnp.min(key, axis=1, keepdims=True)
    order, parent = jax.lax.div(key, N), jax.lax.rem(key, N)
    entry = pick(s.child, parent)
    child = (jax.lax.div(entry, width) + 1) * width  # the next depth's first
    sibling_sum = pick(s.sums, parent) + pick(table, entry + 1)
    child_sum = path_sum + pick(table, child)
    # Once nothing is left, slots are filled with sums of -inf and the parent, whose
    # list of siblings has ended, must not step into the next depth's.
    new, old = slots == slot, (slots == parent) & (path_sum > -jnp.inf)
    return _Frontier(
      sums=jnp.where(new, path_sum, s.sums),
      best=jnp.where(new, child_sum, jnp.where(old, sibling_sum, s.best)),
      child=jnp.where(new, child, s.child + old),
      order=jnp.where(new, order, s.order + (s.order >= order)),
      parents=jnp.where(new, parent, s.parents),
      entry=jnp.where(new, entry, s.entry),
    )

  stop = N
  if limit is not None:
    stop = 1 + jnp.clip(jnp.max(limit), 0, budget)
  return jax.lax.fori_loop(1, stop, take, start)
