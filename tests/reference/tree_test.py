from __future__ import annotations

import heapq
import itertools
import json
import pathlib

import numpy as np
import pytest

from kdtree_jax import reference
from tests.tree.random_trees import random_tables, random_tree

GOLDEN = pathlib.Path(__file__).parents[1] / "tree" / "golden_trees.json"


@pytest.mark.parametrize(
  "golden", json.loads(GOLDEN.read_text())["trees"], ids=lambda g: g["name"]
)
def test_golden_trees(golden):
  tree = reference.build_tree(
    np.array(golden["log_probs"], np.float32),
    np.array(golden["token_ids"], np.int32),
    golden["budget"],
    golden["root_token"],
  )
  nodes = zip(
    tree.token_ids.tolist(),
    tree.parents.tolist(),
    tree.depths.tolist(),
    tree.log_probs.tolist(),
    strict=True,
  )
  assert [list(n) for n in nodes][: tree.size] == golden["nodes"]
  assert len(tree.token_ids) == 1 + golden["budget"]


def prefixes(log_probs: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
  """(-path sum, ranks) of every prefix that may be taken, best first."""
  depth, width = log_probs.shape
  found = []
  for d in range(1, depth + 1):
    for ranks in itertools.product(range(width), repeat=d):
      path_sum = np.float32(0)
      for row, rank in enumerate(ranks):
        path_sum = path_sum + log_probs[row, rank]
      if path_sum > -np.inf:
        found.append((-float(path_sum), ranks))
  return sorted(found)


@pytest.mark.parametrize(("depth", "width"), [(1, 4), (2, 5), (3, 3), (4, 3)])
def test_takes_the_best_prefixes_in_order(depth, width):
  rng = np.random.default_rng(depth)
  tables, ids = random_tables(rng, 160, depth, width)
  for log_probs, token_ids in zip(tables, ids, strict=True):
    best = prefixes(log_probs)
    for budget in (1, 4, 200):
      tree = reference.build_tree(log_probs, token_ids, budget)
      ranks: list[tuple[int, ...]] = [()]
      for node in range(1, tree.size):
        row = token_ids[tree.depths[node] - 1]
        rank = int(np.flatnonzero(row == tree.token_ids[node])[0])
        ranks.append((*ranks[tree.parents[node]], rank))
      taken = list(
        zip((-tree.log_probs[1 : tree.size]).tolist(), ranks[1:], strict=True)
      )
      assert taken == best[:budget]


def published(log_probs: np.ndarray, budget: int):
  """The published heap: float64 sums, corrected along the order of expansion."""
  log_probs = log_probs.astype(np.float64)
  depth_limit, width = log_probs.shape
  heap = [(-log_probs[0, 0], (0,), 0)]
  parents, ranks_taken = [], []
  while heap and len(parents) < budget:
    cost, ranks, parent = heapq.heappop(heap)
    parents.append(parent)
    ranks_taken.append(ranks)
    row = log_probs[len(ranks) - 1]
    rank = ranks[-1]
    if rank + 1 < width:
      sibling = (*ranks[:-1], rank + 1)
      heapq.heappush(heap, (cost + row[rank] - row[rank + 1], sibling, parent))
    if len(ranks) < depth_limit:
      child = cost - log_probs[len(ranks), 0]
      heapq.heappush(heap, (child, (*ranks, 0), len(parents)))
  return parents, ranks_taken


def test_agrees_with_the_published_bookkeeping():
  # Generic values, without ties: float32 sums order them as float64 sums do.
  rng = np.random.default_rng(0)
  for budget in (1, 16, 64, 256):
    logits = rng.normal(size=(15, 1000)).astype(np.float32) * 4
    log_probs, token_ids = reference.log_softmax_topk(logits, budget)
    tree = reference.build_tree(log_probs, token_ids, budget)
    parents, ranks = published(log_probs, budget)
    tokens = [token_ids[len(r) - 1, r[-1]] for r in ranks]
    assert tree.parents[1:].tolist() == parents
    assert tree.depths[1:].tolist() == [len(r) for r in ranks]
    assert tree.token_ids[1:].tolist() == tokens


def test_budget_zero_and_no_rows_give_the_root_alone():
  table = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.int32)
  for tree in (
    reference.build_tree(*table, 0, root_token=4),
    reference.build_tree(table[0][:0], table[1][:0], 2, root_token=4),
  ):
    assert tree.size == 1
    assert tree.token_ids.tolist()[:1] == [4]
    assert (tree.parents == -1).all()
    assert (tree.log_probs[1:] == -np.inf).all()


def test_build_errors():
  with pytest.raises(ValueError, match="budget = -1"):
    reference.build_tree(np.zeros((1, 1)), np.zeros((1, 1), np.int32), -1)
  with pytest.raises(ValueError, match=r"\(2, 1\) and token_ids \(1, 2\)"):
    reference.build_tree(np.zeros((2, 1)), np.zeros((1, 2), np.int32), 1)


def test_log_softmax_topk_orders_ties_by_token():
  logits = np.array([[1, 3, -0.0, 3, 0.0, 1]], np.float32)
  log_probs, ids = reference.log_softmax_topk(logits, 6)
  assert ids.tolist() == [[1, 3, 0, 5, 2, 4]]
  assert (np.diff(log_probs) <= 0).all()
  assert np.exp(log_probs.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)
  # Long enough that an unstable sort would show.
  logits = np.random.default_rng(1).integers(0, 3, size=(1, 1000)).astype(np.float32)
  _, ids = reference.log_softmax_topk(logits, 1000)
  assert ids[0].tolist() == sorted(range(1000), key=lambda i: (-logits[0, i], i))


def test_log_softmax_topk_of_rows_without_distribution_is_nan():
  logits = np.zeros((4, 3), np.float32)
  logits[0, 1] = np.nan
  logits[1, 2] = np.inf
  logits[2] = -np.inf
  logits[3, 0] = -np.inf
  log_probs, _ = reference.log_softmax_topk(logits, 3)
  assert np.isnan(log_probs[:3]).all()
  assert log_probs[3, 2] == -np.inf and np.isfinite(log_probs[3, :2]).all()
  with pytest.raises(ValueError, match="k = 4"):
    reference.log_softmax_topk(logits, 4)


def test_ancestors_name_the_visible_slots():
  rng = np.random.default_rng(4)
  for _ in range(50):
    tree = random_tree(rng, 20, vocab=25)
    table = reference.ancestors(tree, 19)
    visible = tree.visibility()
    for node in range(20):
      path = table[node][table[node] >= 0]
      assert sorted(np.flatnonzero(visible[node])) == path.tolist()
      assert len(path) == tree.depths[node] + 1
      assert (tree.depths[path] == np.arange(len(path))).all()


def test_compact_writes_the_path_and_nothing_else():
  rng = np.random.default_rng(5)
  cache, keys = rng.normal(size=(8, 3)), rng.normal(size=(6, 3))
  path = np.array([0, 2, 5, -1])
  out = reference.compact(cache, keys, path, length=3, start=2)
  np.testing.assert_array_equal(out[2:5], keys[[0, 2, 5]])
  np.testing.assert_array_equal(np.delete(out, [2, 3, 4], 0), cache[[0, 1, 5, 6, 7]])
  cut = reference.compact(cache, keys, path, length=3, start=7)
  np.testing.assert_array_equal(cut[7], keys[0])
  np.testing.assert_array_equal(cut[:7], cache[:7])
