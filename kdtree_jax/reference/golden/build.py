"""Golden cases of `build_tree`, from tables of candidates and from logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, bits, rounded_up
from kdtree_jax.reference.tree import Tree, build_tree

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)

_FIELDS = ("token_ids", "parents", "depths", "log_probs", "size")


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Ties, -inf, NaN, fewer candidates than the budget, and limits per sequence.

  Args:
    rng: source of randomness.
    small: fewer trees.
  """
  made = [
    _from_tables("tables of all kinds", rng, depth=4, width=6, budget=20, batch=16),
    _from_tables("as many candidates", rng, depth=7, width=16, budget=16, batch=8),
    _from_tables("more budget than paths", rng, depth=2, width=3, budget=30, batch=8),
    _from_tables("one depth", rng, depth=1, width=9, budget=5, batch=8),
    _from_tables("one candidate", rng, depth=5, width=1, budget=8, batch=8),
    _from_tables("padded rows", rng, depth=3, width=4, budget=6, batch=8, rows=24),
    _from_tables("budget 0", rng, depth=3, width=4, budget=0, batch=8),
    _from_tables("limits", rng, depth=4, width=6, budget=20, batch=16, limits=True),
    _from_logits("random", rng, _spread, depth=4, vocab=300, budget=16),
    _from_logits(
      "vocabulary below the budget", rng, _spread, depth=3, vocab=5, budget=24
    ),
    _from_logits("equal logits", rng, _equal, depth=3, vocab=64, budget=12),
    _from_logits("few values", rng, _few_values, depth=3, vocab=200, budget=16),
    _from_logits("-inf logits", rng, _masked, depth=4, vocab=100, budget=16),
    _from_logits("NaN, +inf, only -inf", rng, _broken, depth=3, vocab=64, budget=12),
    _from_logits("zeros of both signs", rng, _zeros, depth=2, vocab=40, budget=10),
    _from_logits("large logits", rng, _large, depth=3, vocab=128, budget=12),
    _from_logits("bfloat16", rng, _spread, depth=4, vocab=300, budget=16, dtype=BF16),
    _from_logits("limits", rng, _spread, depth=4, vocab=90, budget=16, limits=True),
    _from_logits(
      "odd vocabulary", rng, _spread, depth=3, vocab=1023, budget=16, rows=24
    ),
  ]
  if not small:
    made += [
      _from_tables(f"random {i}", rng, depth=15, width=64, budget=64, batch=8)
      for i in range(4)
    ]
    made += [
      _from_logits(
        "block of 15", rng, _spread, depth=15, vocab=2048, budget=64, batch=2
      ),
      _from_logits("256 nodes", rng, _spread, depth=7, vocab=2000, budget=255),
      _from_logits(
        "large vocabulary",
        rng,
        _spread,
        depth=2,
        vocab=163_840,
        budget=64,
        dtype=BF16,
        batch=1,
      ),
      _from_logits(
        "few values, wide", rng, _few_values, depth=7, vocab=2501, budget=64
      ),
    ]
  return made


def _limits(
  rng: np.random.Generator, batch: int, budget: int, depth: int, wanted: bool
) -> dict[str, np.ndarray]:
  """Nodes and depths that each sequence may take."""
  if not wanted:
    return {
      "limit": np.full(batch, budget, np.int32),
      "max_depth": np.full(batch, depth, np.int32),
    }
  limit = rng.integers(0, budget + 3, size=batch).astype(np.int32)
  deepest = rng.integers(0, depth + 2, size=batch).astype(np.int32)
  limit[0], deepest[-1] = -1, 0
  return {"limit": limit, "max_depth": deepest}


def _limited_tree(
  log_probs: np.ndarray,
  tokens: np.ndarray,
  root: int,
  rows: int,
  budget: int,
  limit: int,
  max_depth: int,
) -> Tree:
  """A tree of `rows` slots, with at most `limit` nodes and `max_depth` levels."""
  taken = min(max(limit, 0), budget)
  depth = min(max(max_depth, 0), len(log_probs))
  tree = build_tree(log_probs[:depth], tokens[:depth], taken, root)
  more = rows - 1 - taken
  return Tree(
    token_ids=np.pad(tree.token_ids, (0, more)),
    parents=np.pad(tree.parents, (0, more), constant_values=-1),
    depths=np.pad(tree.depths, (0, more)),
    log_probs=np.pad(tree.log_probs, (0, more), constant_values=-np.inf),
    size=tree.size,
  )


def _stack(trees: list[Tree]) -> dict[str, np.ndarray]:
  found = {name: np.array([getattr(t, name) for t in trees]) for name in _FIELDS}
  return found | {"size": found["size"].astype(np.int32)}


def _from_tables(
  name: str,
  rng: np.random.Generator,
  *,
  depth: int,
  width: int,
  budget: int,
  batch: int,
  rows: int | None = None,
  limits: bool = False,
) -> GoldenCase:
  rows = 1 + budget if rows is None else rows
  log_probs, token_ids = _random_tables(rng, batch, depth, width)
  roots = rng.integers(1000, size=batch).astype(np.int32)
  limit = _limits(rng, batch, budget, depth, limits)
  trees = [
    _limited_tree(*row, rows=rows, budget=budget, limit=most, max_depth=deepest)
    for *row, most, deepest in zip(
      log_probs, token_ids, roots, *limit.values(), strict=True
    )
  ]
  outputs = _stack(trees)
  return GoldenCase(
    op="build_tree",
    name=f"table: {name}",
    attributes={"budget": budget, "rows": rows},
    inputs={"log_probs": log_probs, "candidates": token_ids, "roots": roots} | limit,
    outputs=outputs,
    compare=bits(outputs),
  )


def _random_tables(
  rng: np.random.Generator, batch: int, depth: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Candidates (log_probs, token_ids), [batch, depth, width] each.

  In turn: any values; few distinct ones, so that siblings and whole subtrees tie;
  rows of one value; tails and rows of -inf; a row of NaN; zeros of either sign.
  """
  log_probs = -rng.exponential(size=(batch, depth, width))
  kind = np.arange(batch) % 8
  log_probs[kind == 1] = np.round(log_probs[kind == 1] * 2) / 2
  log_probs[kind == 2] = np.round(log_probs[kind == 2])
  log_probs[kind == 3] = log_probs[kind == 3][:, :, :1]
  log_probs[kind == 4] = -1.5
  log_probs = -np.sort(-log_probs, axis=-1).astype(np.float32)
  for b in np.flatnonzero(kind >= 5):
    row = rng.integers(depth)
    if kind[b] == 5:
      tails = rng.integers(0, width + 1, size=depth)
      log_probs[b][np.arange(width) >= tails[:, None]] = -np.inf
    elif kind[b] == 6:
      log_probs[b, row] = rng.choice([-np.inf, np.nan])
    else:
      log_probs[b, row] = rng.choice([0.0, -0.0], size=width)
  token_ids = np.argsort(rng.random(log_probs.shape), axis=-1).astype(np.int32)
  return log_probs, token_ids


Shape = tuple[int, int]  # [L, V]


def _spread(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  return rng.standard_normal(shape) * rng.choice([1.0, 3.0, 6.0])


def _equal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  # Rows of one value each, so that the lowest ids win; all rows alike, so that paths
  # of one length tie too.
  return np.full(shape, np.round(rng.standard_normal() * 4) / 4)


def _few_values(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  return rng.integers(-3, 4, size=shape) * rng.choice([0.5, 2.0])


def _masked(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  x = _spread(rng, shape)
  x[rng.random(shape) < 0.97] = -np.inf
  x[:, 0] = 0.0  # Not the whole row.
  return x


def _broken(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  x = _spread(rng, shape)
  row = int(rng.integers(shape[0]))
  kind = rng.integers(3)
  if kind == 2:
    x[row] = -np.inf
  else:
    x[row, rng.integers(shape[1])] = (np.nan, np.inf)[kind]
  return x


def _zeros(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  # As logits, both zeros are one value.
  return rng.choice([0.0, -0.0, -1.0], size=shape)


def _large(rng: np.random.Generator, shape: Shape) -> np.ndarray:
  return 3000.0 + rng.standard_normal(shape) * 20


def _from_logits(
  name: str,
  rng: np.random.Generator,
  draw: Callable[[np.random.Generator, Shape], np.ndarray],
  *,
  depth: int,
  vocab: int,
  budget: int,
  dtype: np.dtype = F32,
  batch: int = 4,
  rows: int | None = None,
  limits: bool = False,
) -> GoldenCase:
  """Logits whose tree does not hang on the last bits of a log-softmax."""
  rows = 1 + budget if rows is None else rows
  roots = rng.integers(vocab, size=batch).astype(np.int32)
  limit = _limits(rng, batch, budget, depth, limits)
  chosen, trees, bounds = [], [], []
  for root, most, deepest in zip(roots, *limit.values(), strict=True):
    logits, tree, bound = next(
      found
      for logits in _draws(rng, draw, (depth, vocab), dtype)
      if (found := _certain_tree(logits, root, rows, budget, most, deepest)) is not None
    )
    chosen.append(logits)
    trees.append(tree)
    bounds.append(bound)
  outputs = _stack(trees)
  compare = bits(outputs)
  compare["log_probs"] = "bound"
  return GoldenCase(
    op="build_tree",
    name=f"logits: {name}",
    attributes={"budget": budget, "rows": rows},
    inputs={"logits": np.stack(chosen), "roots": roots} | limit,
    outputs=outputs,
    compare=compare,
    bounds={"log_probs": np.stack(bounds)},
  )


def _draws(
  rng: np.random.Generator,
  draw: Callable[[np.random.Generator, Shape], np.ndarray],
  shape: Shape,
  dtype: np.dtype,
) -> Iterator[np.ndarray]:
  while True:
    yield draw(rng, shape).astype(dtype)


def _certain_tree(
  logits: np.ndarray, root: int, rows: int, budget: int, limit: int, max_depth: int
) -> tuple[np.ndarray, Tree, np.ndarray] | None:
  """The tree of these logits and the error of its path sums.

  A kernel's log(sum(exp)) differs from the exact one in its last bits. That shifts all
  path sums of one depth alike, so it can only change the order of paths of different
  depths, or of paths of one depth whose sums round differently.

  Returns:
    (logits, tree, bound f32[N] of its path sums), or None where an allowed error of the
    normaliser might change the tree.
  """
  x = logits.astype(np.float64)
  k = min(budget, x.shape[1])
  ids = np.argsort(-x, axis=-1, kind="stable")[:, :k].astype(np.int32)
  ordered = np.take_along_axis(x, ids, axis=-1)
  with np.errstate(invalid="ignore", over="ignore"):
    top = x.max(axis=-1, keepdims=True)
    log_z = top + np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))
    table = (ordered - log_z).astype(np.float32)
  tree = _limited_tree(table, ids, root, rows, budget, limit, max_depth)
  # 2 ulp of the normaliser and its own rounding; 1 of the difference.
  with np.errstate(invalid="ignore"):
    scale = np.maximum(np.maximum(np.abs(top), np.abs(log_z)), 1.0)[:, 0]
    error = np.nan_to_num(3 * np.spacing(scale.astype(np.float32)), nan=0.0)
  bound = np.zeros(rows)
  path: list[tuple[float, ...]] = [()] * rows
  lookup = [
    dict(zip(row, values, strict=True))
    for row, values in zip(ids, ordered, strict=True)
  ]
  for node in range(1, tree.size):
    parent, depth = tree.parents[node], tree.depths[node]
    rounding = 2 * np.spacing(np.abs(tree.log_probs[node]))
    bound[node] = bound[parent] + error[depth - 1] + rounding
    path[node] = (*path[parent], lookup[depth - 1][tree.token_ids[node]])
  if not _is_certain(tree, table, ids, ordered, path, 2 * np.sum(error), max_depth):
    return None
  return logits, tree, rounded_up(bound)


def _is_certain(
  tree: Tree,
  table: np.ndarray,
  ids: np.ndarray,
  ordered: np.ndarray,
  path: list[tuple[float, ...]],
  slack: float,
  max_depth: int,
) -> bool:
  """Whether nothing that was or could have been taken next is within reach.

  Considered are the taken nodes and all first nodes behind them. Two of them whose
  sums lie closer than `slack` must have the same logits, depth by depth: whatever the
  normaliser, their sums then are equal bits, and the ranks decide.
  """
  # The root stands first whatever the sums.
  sums = [(float(s), p) for s, p in zip(tree.log_probs, path, strict=True)]
  sums = sums[1 : tree.size]
  used: dict[tuple[int, int], set[int]] = {}
  for node in range(1, tree.size):
    key = int(tree.parents[node]), int(tree.depths[node]) - 1
    used.setdefault(key, set()).add(int(tree.token_ids[node]))
  for node in range(tree.size):
    depth = int(tree.depths[node])
    if depth >= min(max_depth, len(table)):
      continue
    taken = used.get((node, depth), set())
    # A node's children are taken in the order of the table.
    rank = len(taken)
    if rank < table.shape[1] and table[depth, rank] > -np.inf:
      total = float(tree.log_probs[node] + table[depth, rank])
      sums.append((total, (*path[node], float(ordered[depth, rank]))))
  sums.sort(key=lambda item: item[0])
  for (low, p), (high, q) in itertools.pairwise(sums):
    if high - low <= slack + 2e-6 * abs(low) and p != q:
      return False
  return True
