from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.tree import Tree, ancestors
from tests.tree.random_trees import FIELDS, differences, random_tree, stack


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
def test_visibility_and_ancestors_equal_the_reference(rows):
  rng = np.random.default_rng(rows)
  trees = [random_tree(rng, rows, vocab=max(rows, 3)) for _ in range(50)]
  max_depth = max(int(t.depths.max()) for t in trees)
  batch = stack(trees)
  visible = np.asarray(jax.jit(Tree.visibility)(batch))
  table = np.asarray(jax.jit(ancestors, static_argnums=1)(batch, max_depth))
  for b, tree in enumerate(trees):
    np.testing.assert_array_equal(visible[b], tree.visibility())
    np.testing.assert_array_equal(table[b], reference.ancestors(tree, max_depth))


def test_visibility_is_the_ancestor_relation():
  rng = np.random.default_rng(0)
  batch = stack([random_tree(rng, 33, vocab=40) for _ in range(50)])
  visible = np.asarray(batch.visibility())
  assert not np.triu(visible, k=1).any()
  np.testing.assert_array_equal(visible.sum(-1), np.asarray(batch.depths) + 1)
  steps = visible.astype(np.int32)
  np.testing.assert_array_equal(steps @ steps > 0, visible)  # transitive
  # Nobody sees padding but itself, and padding sees nobody.
  padding = np.arange(33) >= np.asarray(batch.size)[:, None]
  assert padding.any()
  alone = padding[:, None, :] | padding[:, :, None]
  np.testing.assert_array_equal(visible & alone, np.eye(33, dtype=bool) & alone)


def test_root_only():
  tree = Tree.root_only(jnp.array([0, 7]), rows=3)
  expected = [
    reference.build_tree(np.zeros((0, 0)), np.zeros((0, 0)), 2, root_token=token)
    for token in (0, 7)
  ]
  assert differences(tree, expected) == []


def test_pad_to_adds_empty_slots_only():
  rng = np.random.default_rng(1)
  trees = [random_tree(rng, 5, vocab=9) for _ in range(20)]
  padded = stack(trees).pad_to(8)
  assert padded.rows == 8
  empty = {"token_ids": 0, "parents": -1, "depths": 0, "log_probs": -np.inf}
  for name, value in empty.items():
    values = np.asarray(getattr(padded, name))
    np.testing.assert_array_equal(
      values[:, :5], np.stack([getattr(t, name) for t in trees])
    )
    assert (values[:, 5:] == value).all()
  np.testing.assert_array_equal(padded.size, [t.size for t in trees])
  with pytest.raises(ValueError, match="rows = 7 .* 8 slots already"):
    padded.pad_to(7)


def test_chain_adds_from_the_root_down():
  rng = np.random.default_rng(2)
  B, L = 64, 15
  log_probs = -rng.exponential(size=(B, L)).astype(np.float32)
  tokens = rng.integers(0, 5, size=(B, L)).astype(np.int32)
  lengths = rng.integers(0, L + 1, size=B).astype(np.int32)
  roots = rng.integers(0, 5, size=B).astype(np.int32)
  chains = jax.jit(Tree.chain)(tokens, log_probs, roots, lengths)
  expected = []
  for b in range(B):
    cut = lengths[b]
    tree = reference.build_tree(
      log_probs[b, :cut, None], tokens[b, :cut, None], L, int(roots[b])
    )
    expected.append(tree)
  assert differences(chains, expected) == []
  whole = Tree.chain(jnp.asarray(tokens), jnp.asarray(log_probs), jnp.asarray(roots))
  assert (np.asarray(whole.size) == 1 + L).all()


def test_tree_is_a_frozen_pytree():
  tree = Tree.root_only(jnp.array([3]), rows=2)
  assert len(jax.tree.leaves(tree)) == len(FIELDS)
  assert isinstance(jax.jit(lambda t: t)(tree), Tree)
  with pytest.raises(dataclasses.FrozenInstanceError):
    tree.size = tree.size + 1
