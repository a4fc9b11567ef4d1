from __future__ import annotations

import numpy as np
import pytest

from kdtree_jax import reference as ref
from kdtree_jax.reference.attention import (
  absorb_query,
  causal_attention,
  expand_value,
  naive_attention,
  tree_attention,
)

HEADS, RANK, ROPE, NOPE, VALUE = 3, 10, 4, 6, 5
SCALE = 0.31


def random_tree(rng: np.random.Generator, budget: int) -> ref.Tree:
  logits = (2 * rng.standard_normal((4, 20))).astype(np.float32)
  table = ref.log_softmax_topk(logits, 8)
  return ref.build_tree(*table, budget, root_token=3)


def test_naive_equals_absorbed():
  rng = np.random.default_rng(0)
  cache = rng.standard_normal((12, RANK + ROPE))
  q_nope = rng.standard_normal((5, HEADS, NOPE))
  q_pe = rng.standard_normal((5, HEADS, ROPE))
  w_uk = rng.standard_normal((HEADS, NOPE, RANK))
  w_uv = rng.standard_normal((HEADS, VALUE, RANK))
  positions = np.array([6, 7, 8, 9, 10])
  naive = naive_attention(q_nope, q_pe, cache, w_uk, w_uv, positions, SCALE)
  q = absorb_query(q_nope, q_pe, w_uk)
  latent = causal_attention(q, cache, positions, SCALE, RANK)
  np.testing.assert_allclose(expand_value(latent, w_uv), naive, atol=1e-12)


def test_tree_attention_is_masked_softmax_attention():
  rng = np.random.default_rng(1)
  tree = random_tree(rng, 15)
  n, length = len(tree.depths), 7
  q = rng.standard_normal((n, HEADS, RANK + ROPE))
  cache = rng.standard_normal((9, RANK + ROPE))
  keys = rng.standard_normal((n, RANK + ROPE))
  got = tree_attention(
    q, cache, keys, ref.ancestors(tree, 4), tree.depths, length, SCALE, RANK
  )
  everything = np.concatenate([cache[:length], keys])
  visible = np.concatenate([np.ones((n, length), bool), tree.visibility()], axis=1)
  logits = np.einsum("nhw,sw->nhs", q, everything) * SCALE
  weights = np.where(visible[:, None], np.exp(logits), 0)
  weights /= weights.sum(axis=-1, keepdims=True)
  want = np.einsum("nhs,sr->nhr", weights, everything[:, :RANK])
  np.testing.assert_allclose(got, want, atol=1e-12)


def test_what_a_node_does_not_see_leaves_no_trace():
  rng = np.random.default_rng(2)
  tree = random_tree(rng, 12)
  n, length = len(tree.depths), 5
  q = rng.standard_normal((n, HEADS, RANK + ROPE)).astype(np.float32)
  cache = rng.standard_normal((8, RANK + ROPE)).astype(np.float32)
  keys = rng.standard_normal((n, RANK + ROPE)).astype(np.float32)
  paths = ref.ancestors(tree, 4)
  got = tree_attention(q, cache, keys, paths, tree.depths, length, SCALE, RANK)
  cache[length:] = np.nan
  for node in range(n):
    others = keys.copy()
    others[~tree.visibility()[node]] = np.nan
    row = tree_attention(q, cache, others, paths, tree.depths, length, SCALE, RANK)
    np.testing.assert_array_equal(row[node], got[node])


def test_committed_keys_give_the_bits_of_tree_keys():
  """A chain in the tree, partly or wholly committed: the same keys in order."""
  rng = np.random.default_rng(3)
  rows = rng.standard_normal((11, RANK + ROPE)).astype(np.float32)
  q = rng.standard_normal((1, HEADS, RANK + ROPE)).astype(np.float32)
  results = []
  for length in (4, 7, 10):
    chain = rows[length:]
    n = len(chain)
    lower = np.where(np.tri(n, dtype=bool), np.arange(n), -1)
    queries = np.repeat(q, n, axis=0)
    out = tree_attention(queries, rows, chain, lower, np.arange(n), length, SCALE, RANK)
    results.append(out[-1])
  np.testing.assert_array_equal(results[0], results[1])
  np.testing.assert_array_equal(results[0], results[2])
  plain = causal_attention(q, rows, np.array([10]), SCALE, RANK)
  np.testing.assert_array_equal(results[0], plain[0])


def test_empty_prefix():
  keys = np.array([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
  out = tree_attention(
    np.zeros((2, 1, 3)),
    np.zeros((4, 3)),
    keys,
    np.array([[0, -1], [0, 1]]),
    np.array([0, 1]),
    0,
    SCALE,
    2,
  )
  np.testing.assert_array_equal(out[:, 0], [[1.0, 2.0], [3.0, 4.0]])


def test_bad_arguments_are_named():
  arguments = {
    "q": np.zeros((2, 1, 3)),
    "cache": np.zeros((4, 3)),
    "tree_keys": np.zeros((2, 3)),
    "ancestors": np.array([[0, -1], [0, 1]]),
    "depths": np.array([0, 1]),
    "length": 2,
    "scale": 1.0,
    "value_dim": 2,
  }
  with pytest.raises(ValueError, match="length = 5"):
    tree_attention(**(arguments | {"length": 5}))
  with pytest.raises(ValueError, match="depths reach 2"):
    tree_attention(**(arguments | {"depths": np.array([0, 2])}))
