"""Draft trees from drafter logits: the most probable prefixes under a budget.

DDTree (arXiv 2604.12989; liranringel/ddtree: ddtree.py), batched, on the device, with
the same tree in every bit as `kdtree_jax.reference.build_tree` makes of the same table
of log-probabilities. The forms may differ in the last bits of that table.

The CUDA form builds trees of up to 1,023 nodes besides the root; under "auto", larger
budgets have the XLA form.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kdtree_jax._decode_config import MAX_ROWS
from kdtree_jax.ops import _build_tree_cuda, _build_tree_xla, _implementation
from kdtree_jax.ops._checks import as_array, check_integers, check_static_integers
from kdtree_jax.tree import Tree


def log_softmax_topk(
  logits: jax.Array, k: int, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array]:
  """The k most probable tokens of each row, with log-probabilities.

  The log-softmax of the full row, in fp32. Candidates are ordered by logit, equal
  logits by token id (lowest first). A row that holds NaN or +inf, or nothing but -inf,
  has NaN log-probabilities, and then tokens that mean nothing.

  The XLA form computes `x - (max + log(sum(exp(x - max))))`. The CUDA form is within 2
  ulp of the exact value, and a row's bits depend on that row alone.

  Args:
    logits: [B, L, V], f32 or bf16.
    k: candidates to keep, 1 .. V.
    implementation: "auto", "xla" or "cuda".

  Returns:
    log_probs f32[B, L, k], not increasing along k, and token_ids i32[B, L, k].

  Raises:
    ValueError: a shape, the dtype or `k` is not allowed, or "cuda" with too large a k.
    NotImplementedError: "cuda" without the CUDA library.
  """
  logits = as_array(logits)
  check_static_integers(k=k)
  if logits.ndim != 3 or not 1 <= k <= logits.shape[2]:
    raise ValueError(
      f"logits {logits.shape} must be [B, L, V], and k = {k} must be in 1 .. V"
    )
  _check_dtype(logits)
  B, L, V = logits.shape
  implementation = _implementation.within_limits(
    "log_softmax_topk",
    implementation,
    _build_tree_cuda.obstacle(f"k = {k}", k, V),
  )
  if B * L == 0:
    _implementation.resolve("log_softmax_topk", implementation)
    return jnp.zeros((B, L, k), jnp.float32), jnp.zeros((B, L, k), jnp.int32)
  return _implementation.dispatch(
    "log_softmax_topk",
    implementation,
    functools.partial(_build_tree_cuda.candidates, width=k),
    functools.partial(_build_tree_xla.log_softmax_topk, k=k),
    logits,
  )


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
    ValueError: a shape, a dtype, `budget` or `rows` is not allowed, or "cuda" with too
      large a budget.
    NotImplementedError: "cuda" without the CUDA library.
  """
  logits, root_tokens = as_array(logits), as_array(root_tokens)
  _check_logits(logits, root_tokens)
  _check_budget(budget, rows)
  rows = 1 + budget if rows is None else rows
  B, L, V = logits.shape
  limit, max_depth = _per_sequence(B, limit=limit, max_depth=max_depth)
  implementation = _implementation.within_limits(
    "build_tree",
    implementation,
    _build_tree_cuda.obstacle(f"budget = {budget}", budget, V),
  )
  if min(B, budget, V, L) == 0:
    _implementation.resolve("build_tree", implementation)
    return Tree.root_only(root_tokens, rows)
  return _implementation.dispatch(
    "build_tree",
    implementation,
    functools.partial(_build_cuda, depths=L, budget=budget, rows=rows),
    functools.partial(_build_xla, depths=L, budget=budget, rows=rows),
    logits,
    root_tokens.astype(jnp.int32),
    limit,
    max_depth,
  )


def chain_tree(
  logits: jax.Array,
  root_tokens: jax.Array,
  *,
  rows: int | None = None,
  limit: jax.Array | int | None = None,
  implementation: str = "auto",
) -> Tree:
  """The drafter's most probable token at each depth, as a tree of one path.

  Args:
    logits: [B, L, V], f32 or bf16.
    root_tokens: i32[B].
    rows: static width N of the result, 1 + L by default; a smaller one cuts the
      chain.
    limit: i32[B] or a number, traced: longest chain per sequence.
    implementation: "auto", "xla" or "cuda".

  Returns:
    Trees of N slots. A chain ends before a row without finite distribution.

  Raises:
    ValueError: a shape, a dtype or `rows` is not allowed, or "cuda" with too long a
      chain.
    NotImplementedError: "cuda" without the CUDA library.
  """
  logits, root_tokens = as_array(logits), as_array(root_tokens)
  _check_logits(logits, root_tokens)
  B, L, V = logits.shape
  _check_budget(0, rows)
  rows = 1 + L if rows is None else rows
  budget = min(L, rows - 1)
  (limit,) = _per_sequence(B, limit=limit)
  what = f"rows = {rows} for logits {logits.shape} makes a chain of {budget} nodes"
  implementation = _implementation.within_limits(
    "chain_tree", implementation, _build_tree_cuda.obstacle(what, budget, V)
  )
  if min(B, budget, V) == 0:
    _implementation.resolve("chain_tree", implementation)
    return Tree.root_only(root_tokens, rows)
  # One candidate per depth leaves nothing but the chain.
  return _implementation.dispatch(
    "chain_tree",
    implementation,
    functools.partial(_build_cuda, depths=budget, budget=budget, rows=rows, width=1),
    functools.partial(_build_xla, depths=budget, budget=budget, rows=rows, width=1),
    logits,
    root_tokens.astype(jnp.int32),
    limit,
    None,
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
  implementation: str = "auto",
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
    implementation: "auto", "xla" or "cuda".

  Returns:
    The trees of `kdtree_jax.reference.build_tree`, bit for bit.

  Raises:
    ValueError: a shape, a dtype, `budget` or `rows` is not allowed, or "cuda" with too
      large a budget.
    NotImplementedError: "cuda" without the CUDA library.
  """
  log_probs, token_ids = as_array(log_probs), as_array(token_ids)
  root_tokens = as_array(root_tokens)
  if log_probs.ndim != 3 or log_probs.shape != token_ids.shape:
    raise ValueError(
      f"log_probs {log_probs.shape} and token_ids {token_ids.shape} must have the "
      "same shape [B, L, k]"
    )
  if root_tokens.shape != log_probs.shape[:1]:
    raise ValueError(
      f"root_tokens {root_tokens.shape} must be [B] for log_probs {log_probs.shape}"
    )
  check_integers(token_ids=token_ids, root_tokens=root_tokens)
  _check_budget(budget, rows)
  rows = 1 + budget if rows is None else rows
  limit, max_depth = _per_sequence(log_probs.shape[0], limit=limit, max_depth=max_depth)
  implementation = _implementation.within_limits(
    "tree_from_table",
    implementation,
    _build_tree_cuda.obstacle(f"budget = {budget}", budget),
  )
  if min(budget, *log_probs.shape) == 0:
    _implementation.resolve("tree_from_table", implementation)
    return Tree.root_only(root_tokens, rows)
  return _implementation.dispatch(
    "tree_from_table",
    implementation,
    functools.partial(_table_cuda, budget=budget, rows=rows),
    functools.partial(_build_tree_xla.tree_from_table, budget=budget, rows=rows),
    log_probs.astype(jnp.float32),
    token_ids.astype(jnp.int32),
    root_tokens.astype(jnp.int32),
    limit,
    max_depth,
  )


def _build_cuda(
  logits: jax.Array,
  root_tokens: jax.Array,
  limit: jax.Array | None,
  max_depth: jax.Array | None,
  *,
  depths: int,
  budget: int,
  rows: int,
  width: int | None = None,
) -> Tree:
  """Of the first `depths` rows, with `width` candidates each (default: `budget`)."""
  tree, _, _ = _build_tree_cuda.build(
    logits,
    root_tokens,
    _or_all(limit, budget),
    _or_all(max_depth, depths),
    depths=depths,
    width=min(width or budget, logits.shape[2]),
    budget=budget,
    rows=rows,
  )
  return tree


def _build_xla(
  logits: jax.Array,
  root_tokens: jax.Array,
  limit: jax.Array | None,
  max_depth: jax.Array | None,
  *,
  depths: int,
  budget: int,
  rows: int,
  width: int | None = None,
) -> Tree:
  """As `_build_cuda`."""
  table = _build_tree_xla.log_softmax_topk(
    logits[:, :depths], min(width or budget, logits.shape[2])
  )
  return _build_tree_xla.tree_from_table(
    *table, root_tokens, limit, max_depth, budget=budget, rows=rows
  )


def _table_cuda(
  log_probs: jax.Array,
  token_ids: jax.Array,
  root_tokens: jax.Array,
  limit: jax.Array | None,
  max_depth: jax.Array | None,
  *,
  budget: int,
  rows: int,
) -> Tree:
  return _build_tree_cuda.from_table(
    log_probs,
    token_ids,
    root_tokens,
    _or_all(limit, budget),
    _or_all(max_depth, log_probs.shape[1]),
    budget=budget,
    rows=rows,
  )


def _per_sequence(
  batch: int, **bounds: jax.Array | int | None
) -> list[jax.Array | None]:
  """i32[B] or a number -> i32[B] or i32[1], each."""
  arrays: list[jax.Array | None] = []
  for name, value in bounds.items():
    if value is None:
      arrays.append(None)
      continue
    array = jnp.atleast_1d(jnp.asarray(value))
    if array.shape not in ((1,), (batch,)) or not jnp.issubdtype(
      array.dtype, jnp.integer
    ):
      raise ValueError(
        f"{name} must be an integer or integers [B] = ({batch},); it is {array.dtype} "
        f"{array.shape}"
      )
    arrays.append(array.astype(jnp.int32))
  return arrays


def _or_all(bound: jax.Array | None, everything: int) -> jax.Array:
  """`bound`, or i32[1] that bounds nothing."""
  return jnp.full((1,), everything, jnp.int32) if bound is None else bound


def _check_logits(logits: jax.Array, root_tokens: jax.Array) -> None:
  if logits.ndim != 3 or root_tokens.shape != logits.shape[:1]:
    raise ValueError(
      f"logits {logits.shape} must be [B, L, V], and root_tokens "
      f"{root_tokens.shape} must be [B]"
    )
  _check_dtype(logits)
  check_integers(root_tokens=root_tokens)


def _check_dtype(logits: jax.Array) -> None:
  if logits.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"logits are {logits.dtype}; they must be float32 or bfloat16")


def _check_budget(budget: int, rows: int | None) -> None:
  check_static_integers(budget=budget, rows=rows)
  if not 0 <= budget < MAX_ROWS:
    raise ValueError(
      f"budget = {budget} is not allowed: it must lie in 0 .. {MAX_ROWS - 1}"
    )
  if rows is not None and rows > MAX_ROWS:
    raise ValueError(f"rows = {rows} is not allowed: at most {MAX_ROWS} are")
  if rows is not None and rows < 1 + budget:
    raise ValueError(
      f"rows = {rows} is not allowed: a root and {budget} nodes need at least "
      f"{1 + budget}"
    )
