"""Draft trees from drafter logits: the most probable prefixes under a budget.

DDTree (arXiv 2604.12989; liranringel/ddtree: ddtree.py) in pure JAX, batched,
with the same bits as `kdtree_jax.reference.build_tree`. There is no heap: each
taken node has exactly one candidate, its best child not yet taken, so the
frontier is one value per slot and a pop is an arg-max over slots.

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

from kdtree_jax.ops import _implementation
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
  """The k most probable tokens of each row, with log-probabilities.

  `x - (max + log(sum(exp(x - max))))` over the full row, in fp32. Candidates are
  ordered by logit, equal logits by token id (lowest first). A row that holds NaN
  or +inf, or nothing but -inf, has NaN log-probabilities.

  Args:
    logits: [B, L, V], f32 or bf16.
    k: candidates to keep, 1 .. V.

  Returns:
    log_probs f32[B, L, k], not increasing along k, and token_ids i32[B, L, k].
  """
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
  total = jnp.sum(exps.reshape(B * L, _LANES, -1), axis=1)
  log_z = top + jnp.log(jnp.sum(total, axis=-1, keepdims=True))
  return (values - log_z).reshape(B, L, k), ids.reshape(B, L, k)


def build_tree(
  logits: jax.Array,
  root_tokens: jax.Array,
  budget: int,
  *,
  rows: int | None = None,
  limit: jax.Array | int | None = None,
  max_depth: jax.Array | int | None = None,
  implementation: str = "auto",
) -> Tree:
  """The best draft tree under a node budget, straight from drafter logits.

  Args:
    logits: [B, L, V], f32 or bf16; row d - 1 holds the drafter's distribution of
      the token at depth d.
    root_tokens: i32[B].
    budget: static number of nodes besides the root, 0 or more.
    rows: static width N of the result, at least 1 + budget (the default).
    limit: i32[B] or a number, traced: nodes to take per sequence, at most
      `budget`. The tree is that of a budget of `limit`.
    max_depth: i32[B] or a number, traced: deepest node per sequence, at most L.
    implementation: "auto", "xla" or "cuda".

  Returns:
    Trees of N slots; fewer than 1 + budget live ones where the candidates end,
    or where a path sum is -inf or NaN.

  Raises:
    ValueError: a shape or `budget` or `rows` is not allowed.
    NotImplementedError: "cuda" without the CUDA library.
  """
  _implementation.resolve("build_tree", implementation)
  _check_logits(logits, root_tokens)
  _check_budget(budget, rows)
  B, L, V = logits.shape
  k = min(budget, V)
  if k == 0 or L == 0:
    return Tree.root_only(root_tokens, 1 + budget if rows is None else rows)
  log_probs, token_ids = log_softmax_topk(logits, k)
  return tree_from_table(
    log_probs,
    token_ids,
    root_tokens,
    budget,
    rows=rows,
    limit=limit,
    max_depth=max_depth,
  )


def chain_tree(
  logits: jax.Array,
  root_tokens: jax.Array,
  *,
  rows: int | None = None,
  limit: jax.Array | int | None = None,
) -> Tree:
  """The drafter's most probable token at each depth, as a tree of one path.

  Args:
    logits: [B, L, V], f32 or bf16.
    root_tokens: i32[B].
    rows: static width N of the result, 1 + L by default; a smaller one cuts the
      chain.
    limit: i32[B] or a number, traced: longest chain per sequence.

  Returns:
    Trees of N slots. A chain ends before a row without finite distribution.

  Raises:
    ValueError: a shape or `rows` is not allowed.
  """
  _check_logits(logits, root_tokens)
  L = logits.shape[1]
  rows = 1 + L if rows is None else rows
  _check_budget(0, rows)
  budget = min(L, rows - 1)
  if budget == 0:
    return Tree.root_only(root_tokens, rows)
  log_probs, token_ids = log_softmax_topk(logits[:, :budget], 1)
  return tree_from_table(
    log_probs, token_ids, root_tokens, budget, rows=rows, limit=limit
  )


def tree_from_table(
  log_probs: jax.Array,
  token_ids: jax.Array,
  root_tokens: jax.Array,
  budget: int,
  *,
  rows: int | None = None,
  limit: jax.Array | int | None = None,
  max_depth: jax.Array | int | None = None,
) -> Tree:
  """`build_tree` from the candidates of each depth instead of from logits.

  Args:
    log_probs: f32[B, L, k], at most 0 and not increasing along k. Candidates
      behind a -inf or NaN are never taken.
    token_ids: i32[B, L, k], distinct within a row.
    root_tokens: i32[B].
    budget: static number of nodes besides the root.
    rows: see `build_tree`.
    limit: see `build_tree`.
    max_depth: see `build_tree`.

  Returns:
    The trees of `kdtree_jax.reference.build_tree`, bit for bit.

  Raises:
    ValueError: a shape or `budget` or `rows` is not allowed.
  """
  if log_probs.ndim != 3 or log_probs.shape != token_ids.shape:
    raise ValueError(
      f"log_probs {log_probs.shape} and token_ids {token_ids.shape} must have the "
      "same shape [B, L, k]"
    )
  _check_budget(budget, rows)
  B, L, k = log_probs.shape
  depth = jnp.arange(1, L + 1)[:, None]
  table = log_probs.astype(jnp.float32)
  # The root's sum is 0.0, and 0.0 + -0.0 is 0.0: so are the reference's sums.
  table = jnp.where(table == 0, 0.0, jnp.where(table > -jnp.inf, table, -jnp.inf))
  if max_depth is not None:
    table = jnp.where(depth <= _per_sequence(max_depth)[..., None], table, -jnp.inf)
  # One more column ends each list of siblings, one more row the deepest paths.
  table = jnp.pad(table, ((0, 0), (0, 1), (0, 1)), constant_values=-jnp.inf)
  found = _best_first(table.reshape(B, -1), k + 1, budget, limit)
  slots = jnp.arange(1 + budget)
  live = found.sums > -jnp.inf
  if limit is not None:
    live &= slots <= jnp.maximum(_per_sequence(limit), 0)
  drafted = live & (slots > 0)
  tokens = jnp.pad(token_ids, ((0, 0), (0, 1), (0, 1))).reshape(B, -1)
  tokens = _pick(tokens, found.entry)
  tokens = jnp.where(slots == 0, root_tokens[:, None], tokens)
  tree = Tree(
    token_ids=jnp.where(live, tokens, 0).astype(jnp.int32),
    parents=jnp.where(drafted, found.parents, NO_PARENT),
    depths=jnp.where(drafted, jax.lax.div(found.entry, k + 1) + 1, 0),
    log_probs=jnp.where(live, found.sums, -jnp.inf),
    size=jnp.sum(live, axis=1, dtype=jnp.int32),
  )
  return tree if rows is None else tree.pad_to(rows)


def _best_first(
  table: jax.Array, width: int, budget: int, limit: jax.Array | int | None
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
    entry = _pick(s.child, parent)
    child = (jax.lax.div(entry, width) + 1) * width  # the next depth's first
    sibling_sum = _pick(s.sums, parent) + _pick(table, entry + 1)
    child_sum = path_sum + _pick(table, child)
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
    stop = 1 + jnp.clip(jnp.max(jnp.asarray(limit)), 0, budget)
  return jax.lax.fori_loop(1, stop, take, start)


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
  """x [B, M], index i32[B, K] -> [B, K]."""
  return jnp.take_along_axis(x, index, axis=1, mode="clip")


def _per_sequence(value: jax.Array | int) -> jax.Array:
  """i32[B] or a number -> [B, 1] or [1, 1]."""
  return jnp.atleast_1d(jnp.asarray(value, jnp.int32))[:, None]


def _check_logits(logits: jax.Array, root_tokens: jax.Array) -> None:
  if logits.ndim != 3 or root_tokens.shape != logits.shape[:1]:
    raise ValueError(
      f"logits {logits.shape} must be [B, L, V], and root_tokens "
      f"{root_tokens.shape} must be [B]"
    )


def _check_budget(budget: int, rows: int | None) -> None:
  if budget < 0:
    raise ValueError(f"budget = {budget} is not allowed: it must be 0 or more")
  if rows is not None and rows < 1 + budget:
    raise ValueError(
      f"rows = {rows} is not allowed: a root and {budget} nodes need at least "
      f"{1 + budget}"
    )
