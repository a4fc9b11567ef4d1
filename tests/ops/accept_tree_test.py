from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.tree import Tree
from tests.tree.random_trees import random_tree, stack

accept = jax.jit(ops.accept_tree, static_argnums=2)


def walk(tree: reference.Tree, target: np.ndarray, max_depth: int):
  """The walk in the published form: a dict from token to child per node."""
  children = [{} for _ in range(tree.size)]
  for node in range(1, tree.size):
    children[tree.parents[node]][int(tree.token_ids[node])] = node
  path = [0]
  while len(path) <= max_depth and int(target[path[-1]]) in children[path[-1]]:
    path.append(children[path[-1]][int(target[path[-1]])])
  return path, int(target[path[-1]])


def random_targets(rng: np.random.Generator, tree: reference.Tree, vocab: int):
  """Choices that agree with one of the node's children more often than by chance."""
  target = rng.integers(0, vocab, size=len(tree.parents)).astype(np.int32)
  for node in range(1, tree.size):
    if rng.random() < 0.7:
      target[tree.parents[node]] = tree.token_ids[node]
  return target


@pytest.mark.parametrize(("rows", "max_depth"), [(1, 0), (8, 7), (17, 15), (64, 15)])
def test_equals_a_brute_force_walk(rows, max_depth):
  # A vocabulary of 4 to 12 makes matches in wrong places, padding included, and
  # token 0 common.
  rng = np.random.default_rng(rows)
  vocab = 4 + rows // 8
  trees = [random_tree(rng, rows, vocab) for _ in range(500)]
  targets = np.stack([random_targets(rng, t, vocab) for t in trees])
  path, length, bonus = map(np.asarray, accept(stack(trees), targets, max_depth))
  assert path.shape == (500, max_depth + 1)
  assert path.dtype == length.dtype == bonus.dtype == np.int32
  for b, tree in enumerate(trees):
    expected, token = walk(tree, targets[b], max_depth)
    padded = expected + [-1] * (max_depth + 1 - len(expected))
    assert (path[b].tolist(), length[b], bonus[b]) == (padded, len(expected), token)
    single = reference.accept_tree(tree, targets[b], max_depth)
    assert (single[0].tolist(), single[1], single[2]) == (padded, len(expected), token)
  if rows > 8:
    assert {0, 1, 2} < set(length - 1)  # the cases do cover short and longer paths


def tree_of(tokens, parents, rows=None) -> Tree:
  depths = np.zeros(len(tokens), np.int32)
  for node, parent in enumerate(parents):
    depths[node] = 0 if parent < 0 else depths[parent] + 1
  tree = Tree(
    token_ids=jnp.array([tokens]),
    parents=jnp.array([parents]),
    depths=jnp.asarray(depths)[None],
    log_probs=-jnp.asarray(depths, jnp.float32)[None],
    size=jnp.array([len(tokens)]),
  )
  return tree.pad_to(rows or len(tokens))


def result(tree: Tree, targets, max_depth):
  path, length, bonus = accept(tree, jnp.array([targets]), max_depth)
  return np.asarray(path)[0].tolist(), int(length[0]), int(bonus[0])


def test_token_zero_is_an_ordinary_token():
  tree = tree_of([5, 0, 0, 0], [-1, 0, 1, 2])
  assert result(tree, [0, 0, 0, 9], 3) == ([0, 1, 2, 3], 4, 9)
  assert result(tree, [0, 0, 4, 9], 3) == ([0, 1, 2, -1], 3, 4)


def test_accepted_leaf_yields_its_own_choice():
  tree = tree_of([5, 6, 7, 8], [-1, 0, 0, 2])
  assert result(tree, [7, 1, 8, 3], 4) == ([0, 2, 3, -1, -1], 3, 3)


def test_root_only():
  tree = Tree.root_only(jnp.array([0]), rows=4)
  # Padding holds token 0, which the target chose everywhere.
  assert result(tree, [0, 0, 0, 0], 3) == ([0, -1, -1, -1], 1, 0)


def test_padding_that_looks_like_a_match_is_not_accepted():
  # Slots beyond `size` carry the chosen token and a parent on the path.
  tree = tree_of([5, 6, 7], [-1, 0, 1])
  tree = Tree(**{**vars(tree), "size": jnp.array([2])})
  assert result(tree, [6, 7, 1], 2) == ([0, 1, -1], 2, 7)


def test_max_depth_cuts_the_path():
  tree = tree_of([5, 6, 7, 8], [-1, 0, 1, 2])
  assert result(tree, [6, 7, 8, 9], 2) == ([0, 1, 2], 3, 8)
  assert result(tree, [6, 7, 8, 9], 0) == ([0], 1, 6)


def test_equal_siblings_resolve_to_the_lowest_slot():
  tree = tree_of([5, 6, 6, 7, 7], [-1, 0, 0, 2, 1])
  assert result(tree, [6, 7, 7, 1, 2], 2) == ([0, 1, 4], 3, 2)


def test_permuting_the_batch_permutes_the_results():
  rng = np.random.default_rng(3)
  trees = [random_tree(rng, 17, vocab=6) for _ in range(16)]
  targets = np.stack([random_targets(rng, t, 6) for t in trees])
  order = rng.permutation(16)
  straight = accept(stack(trees), targets, 15)
  permuted = accept(stack([trees[i] for i in order]), targets[order], 15)
  for a, b in zip(straight, permuted, strict=True):
    np.testing.assert_array_equal(np.asarray(a)[order], b)


def garbage(rng: np.random.Generator, cases: int, rows: int) -> tuple[Tree, np.ndarray]:
  """Trees with cycles, parents and sizes out of range, and few distinct tokens."""
  shape = (cases, rows)
  parents = rng.integers(-2, rows + 2, shape).astype(np.int32)
  extreme = np.iinfo(np.int32)
  parents[rng.random(shape) < 0.1] = extreme.min
  parents[rng.random(shape) < 0.1] = extreme.max
  size = rng.integers(-2, rows + 3, cases).astype(np.int32)
  size[:2] = extreme.min, extreme.max
  tokens, targets = rng.integers(-1, 2, (2, *shape)).astype(np.int32)
  zeros = np.zeros(shape, np.int32)
  return Tree(*map(jnp.asarray, (tokens, parents, zeros, zeros, size))), targets


def test_garbage_is_safe():
  tree, targets = garbage(np.random.default_rng(5), 500, 17)
  path, length, bonus = map(np.asarray, accept(tree, targets, 20))
  tokens, parents, _, _, size = (np.asarray(x) for x in jax.tree.leaves(tree))
  for b in range(500):
    single = reference.Tree(
      tokens[b], parents[b], None, None, int(np.clip(size[b], 0, 17))
    )
    expected = reference.accept_tree(single, targets[b], 20)
    assert path[b].tolist() == expected[0].tolist()
    assert (length[b], bonus[b]) == expected[1:]
  assert 21 in length  # a path through a cycle


def test_vmap():
  trees = [random_tree(np.random.default_rng(7 + i), 9, 4) for i in range(6)]
  targets = np.zeros((6, 9), np.int32)
  straight = accept(stack(trees), targets, 5)

  def in_pairs(x):
    return x.reshape(3, 2, *x.shape[1:])

  pairs = jax.tree.map(in_pairs, (stack(trees), jnp.asarray(targets)))
  mapped = jax.vmap(lambda *x: ops.accept_tree(*x, 5))(*pairs)
  for one, other in zip(straight, mapped, strict=True):
    np.testing.assert_array_equal(in_pairs(one), other)


def test_errors_name_the_argument():
  tree = Tree.root_only(jnp.array([1]), rows=2)
  with pytest.raises(ValueError, match=r"target_tokens \(1, 3\)"):
    ops.accept_tree(tree, jnp.zeros((1, 3), jnp.int32), 1)
  with pytest.raises(ValueError, match=r"tree.token_ids \(2, 0\) .* N >= 1"):
    empty = Tree.root_only(jnp.array([1, 1]))
    empty = jax.tree.map(lambda x: x[:, :0] if x.ndim == 2 else x, empty)
    ops.accept_tree(empty, jnp.zeros((2, 0), jnp.int32), 1)
  with pytest.raises(ValueError, match="max_depth = -1"):
    ops.accept_tree(tree, jnp.zeros((1, 2), jnp.int32), -1)


def test_what_is_no_tree_is_named():
  for call in (
    lambda x: ops.accept_tree(x, jnp.zeros((1, 2), jnp.int32), 1),
    lambda x: ops.ancestors(x, 1),
  ):
    with pytest.raises(
      TypeError, match="tree must be a kdtree_jax.Tree; it is a ndarr"
    ):
      call(np.zeros((1, 2), np.int32))
