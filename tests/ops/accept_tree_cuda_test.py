"""accept_tree's custom call against the XLA form and the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.ops.accept_tree import CUDA_MAX_NODES
from kdtree_jax.tree import Tree
from tests.ops.accept_tree_test import garbage, random_targets
from tests.ops.custom_calls import assert_same_bits, cuda_text, replayed
from tests.tree.random_trees import random_tree, stack

accept = functools.partial(ops.accept_tree, implementation="cuda")
accept_xla = jax.jit(
  functools.partial(ops.accept_tree, implementation="xla"), static_argnums=2
)


def cases(rows: int, count: int) -> tuple[list[reference.Tree], np.ndarray]:
  rng = np.random.default_rng(rows)
  vocab = 4 + rows // 8
  trees = [random_tree(rng, rows, vocab) for _ in range(count)]
  return trees, np.stack([random_targets(rng, t, vocab) for t in trees])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "max_depth"), [(1, 0), (17, 15), (65, 15), (300, 3)])
def test_bits_of_the_xla_form_and_of_the_reference(rows, max_depth):
  trees, targets = cases(rows, 1000)
  batch = stack(trees)
  got = replayed(lambda *x: accept(*x, max_depth))(batch, jnp.asarray(targets))
  assert_same_bits(accept_xla(batch, targets, max_depth), got)
  for b, tree in enumerate(trees):
    path, length, bonus = reference.accept_tree(tree, targets[b], max_depth)
    assert got[0][b].tolist() == path.tolist()
    assert (got[1][b], got[2][b]) == (length, bonus)


@pytest.mark.gpu
def test_garbage_is_safe_and_means_the_same():
  tree, targets = garbage(np.random.default_rng(0), 2000, 33)
  got = replayed(lambda *x: accept(*x, 15))(tree, targets)
  assert_same_bits(accept_xla(tree, targets, 15), got)


@pytest.mark.gpu
def test_the_largest_tree():
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 3, CUDA_MAX_NODES).astype(np.int32)
  slots = np.arange(CUDA_MAX_NODES, dtype=np.int32)
  spine = stack([reference.Tree(tokens, slots - 1, slots, -1.0 * slots, len(slots))])
  targets = jnp.asarray(np.roll(tokens, -1))[None]
  got = jax.jit(lambda *x: accept(*x, 4000))(spine, targets)
  assert_same_bits(accept_xla(spine, targets, 4000), got)
  assert int(got[1][0]) == 4001


@pytest.mark.gpu
def test_a_sequence_does_not_depend_on_its_neighbours():
  trees, targets = cases(65, 64)
  order = np.random.default_rng(2).permutation(64)
  run = jax.jit(lambda *x: accept(*x, 15))
  straight = run(stack(trees), targets)
  permuted = run(stack([trees[i] for i in order]), targets[order])
  assert_same_bits([np.asarray(x)[order] for x in straight], permuted)
  alone = run(stack(trees[:1]), targets[:1])
  assert_same_bits([np.asarray(x)[:1] for x in straight], alone)


def test_the_program_for_cuda_holds_the_call():
  tree = Tree.root_only(jnp.array([1, 2]), rows=9)
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
    text = cuda_text(
      lambda t, x, i=implementation: ops.accept_tree(t, x, 4, implementation=i),
      tree,
      jnp.zeros((2, 9), jnp.int32),
    )
    assert text.count("@kdtree_jax.accept_tree") == expected
  assert "tensor<2x5xi32>" in text


def test_larger_trees_have_the_xla_form_alone():
  tree = Tree.root_only(jnp.array([1]), rows=CUDA_MAX_NODES + 1)
  targets = jnp.zeros((1, CUDA_MAX_NODES + 1), jnp.int32)
  with pytest.raises(ValueError, match=f"at most {CUDA_MAX_NODES} slots"):
    accept(tree, targets, 1)
  text = cuda_text(lambda *x: ops.accept_tree(*x, 1), tree, targets)
  assert "kdtree_jax.accept_tree" not in text
