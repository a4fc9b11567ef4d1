"""Draft trees in numpy: build, mask, accept, compact; one sequence at a time.

The golden definition that the JAX and CUDA forms are held to, bit for bit. The
algorithm is DDTree's (arXiv 2604.12989; liranringel/ddtree: ddtree.py) with
every open choice fixed: path sums are float32, added from the root down (the
published code adds and subtracts in float64 along the order of expansion),
equal sums are ordered by the tuple of ranks, equal logits by token id.

Shapes: N tree slots (1 + budget), L depths, k candidates per depth, V
vocabulary, S cache positions, W values per cached key.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

ROOT = 0
NO_PARENT = -1


@dataclasses.dataclass(frozen=True)
class Tree:
  """A draft tree; slot 0 is the root, nodes follow in the order of popping.

  Attributes:
    token_ids: i32[N] token of each slot; 0 in padding slots.
    parents: i32[N] slot of the parent; -1 for the root and for padding.
    depths: i32[N] tokens below the root; 0 for the root and for padding.
    log_probs: f32[N] sum of the drafter's log-probabilities from the root
      down; 0 for the root, -inf for padding.
    size: live slots, the root included. Slots from `size` on are padding.
  """

  token_ids: np.ndarray
  parents: np.ndarray
  depths: np.ndarray
  log_probs: np.ndarray
  size: int

  def visibility(self) -> np.ndarray:
    """bool[N, N]: may row i see slot j? Its ancestors and itself it may.

    A padding slot sees itself alone, so every row has `depths + 1` ones.
    """
    visible = np.eye(len(self.parents), dtype=bool)
    for node, parent in enumerate(self.parents):
      if parent != NO_PARENT:  # parents come first, so their rows are complete
        visible[node] |= visible[parent]
    return visible


def log_softmax_topk(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
  """The k most probable tokens of each depth, with log-probabilities.

  `x - (max + log(sum(exp(x - max))))` over the full row, in float32. Candidates
  are ordered by logit, equal logits by token id (lowest first). A row that
  holds NaN or +inf, or nothing but -inf, has NaN log-probabilities.

  Args:
    logits: f32[L, V] drafter logits, row d - 1 for depth d.
    k: candidates to keep, at most V.

  Returns:
    log_probs f32[L, k], not increasing along k, and token_ids i32[L, k].

  Raises:
    ValueError: k is negative or larger than V.
  """
  x = np.asarray(logits, np.float32)
  if not 0 <= k <= x.shape[-1]:
    raise ValueError(f"k = {k} is not allowed: it must be in 0 .. V = {x.shape[-1]}")
  with np.errstate(invalid="ignore", over="ignore"):
    top = np.max(x, axis=-1, keepdims=True)
    log_z = top + np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))
    ids = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    log_probs = np.take_along_axis(x, ids, axis=-1) - log_z
  return log_probs, ids.astype(np.int32)


def build_tree(
  log_probs: np.ndarray, token_ids: np.ndarray, budget: int, root_token: int = 0
) -> Tree:
  """The `budget` most probable prefixes under the drafter, as a tree.

  Best-first search with a heap ordered by (-path sum, ranks): a popped node is
  taken into the tree and offers its next sibling and its first child (arXiv
  2604.12989, Proposition 3). A node whose path sum is -inf or NaN is never
  taken, nor is anything behind it.

  Args:
    log_probs: f32[L, k] log-probabilities of the candidates of each depth,
      at most 0 and not increasing along k (NaN allowed).
    token_ids: i32[L, k] their tokens, distinct within a row.
    budget: nodes to take besides the root, 0 or more.
    root_token: token of the root.

  Returns:
    A tree of N = 1 + budget slots.

  Raises:
    ValueError: budget is negative, or the tables' shapes differ.
  """
  log_probs = np.asarray(log_probs, np.float32)
  if budget < 0:
    raise ValueError(f"budget = {budget} is not allowed: it must be 0 or more")
  if log_probs.ndim != 2 or log_probs.shape != np.shape(token_ids):
    raise ValueError(
      f"log_probs {log_probs.shape} and token_ids {np.shape(token_ids)} must have "
      "the same shape [L, k]"
    )
  depth_limit, width = log_probs.shape
  tokens = np.zeros(1 + budget, np.int32)
  parents = np.full(1 + budget, NO_PARENT, np.int32)
  depths = np.zeros(1 + budget, np.int32)
  sums = np.full(1 + budget, -np.inf, np.float32)
  tokens[ROOT], sums[ROOT] = root_token, 0.0
  heap: list[tuple[float, tuple[int, ...], int]] = []

  def offer(parent: int, ranks: tuple[int, ...]) -> None:
    depth, rank = len(ranks), ranks[-1]
    if depth <= depth_limit and rank < width:
      path_sum = sums[parent] + log_probs[depth - 1, rank]
      if path_sum > -np.inf:
        heapq.heappush(heap, (-float(path_sum), ranks, parent))

  size = 1
  offer(ROOT, (0,))
  while heap and size <= budget:
    cost, ranks, parent = heapq.heappop(heap)
    depth, rank = len(ranks), ranks[-1]
    tokens[size] = token_ids[depth - 1, rank]
    parents[size] = parent
    depths[size] = depth
    sums[size] = -cost
    offer(parent, (*ranks[:-1], rank + 1))
    offer(size, (*ranks, 0))
    size += 1
  return Tree(tokens, parents, depths, sums, size)


def ancestors(tree: Tree, max_depth: int) -> np.ndarray:
  """i32[N, max_depth + 1]: the ancestor-or-self of each slot at each depth.

  -1 beyond the slot's own depth. A padding slot stands alone at depth 0.
  """
  table = np.full((len(tree.parents), max_depth + 1), -1, np.int32)
  for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
    if parent != NO_PARENT:
      table[node] = table[parent]
    table[node, depth] = node
  return table


def accept_tree(
  tree: Tree, target_tokens: np.ndarray, max_depth: int
) -> tuple[np.ndarray, int, int]:
  """The longest path of the tree that the target would have written itself.

  Starts at the root and steps to the child that carries the token chosen at the
  current node, until there is none (liranringel/ddtree: ddtree.py). Of several
  such children, which a built tree never has, the one in the lowest slot counts.

  Args:
    tree: the draft tree.
    target_tokens: i32[N] token that the target chose at each slot, that is,
      after the path from the root to that slot.
    max_depth: most drafts to accept.

  Returns:
    path i32[max_depth + 1], accepted slots from the root, -1 padded; length,
    accepted slots, the root included; bonus, the target's token after them.
  """
  path = np.full(max_depth + 1, -1, np.int32)
  path[0] = ROOT
  length = 1
  while length <= max_depth:
    node = path[length - 1]
    live = np.arange(tree.size)
    child = live[
      (tree.parents[live] == node) & (tree.token_ids[live] == target_tokens[node])
    ]
    if len(child) == 0:
      break
    path[length] = child[0]
    length += 1
  return path, length, int(target_tokens[path[length - 1]])


def compact(
  cache: np.ndarray, tree_keys: np.ndarray, path: np.ndarray, length: int, start: int
) -> np.ndarray:
  """Commits the keys of the accepted path to the cache.

  Args:
    cache: [S, W] keys by absolute position.
    tree_keys: [N, W] keys of the tree's slots.
    path: i32[A] accepted slots from the root, -1 padded.
    length: accepted slots.
    start: absolute position of the root.

  Returns:
    The cache with `tree_keys[path[i]]` at position `start + i` for i < length.
    Positions outside 0 .. S - 1 are dropped; nothing else changes.
  """
  cache = cache.copy()
  for i in range(length):
    if 0 <= start + i < len(cache):
      cache[start + i] = tree_keys[path[i]]
  return cache
