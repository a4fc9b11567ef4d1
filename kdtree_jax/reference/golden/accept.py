"""Golden cases of `accept_tree`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, bits
from kdtree_jax.reference.golden.random_trees import random_tree
from kdtree_jax.reference.tree import Tree, accept_tree


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Random trees and targets, and the ends of every range.

  Args:
    rng: source of randomness.
    small: fewer trees.
  """
  made = [
    _random("random", rng, batch=4, rows=17, max_depth=6),
    _random("one node", rng, batch=3, rows=1, max_depth=3),
    _random("no draft is allowed", rng, batch=2, rows=9, max_depth=0),
    _random("128 nodes", rng, batch=2, rows=128, max_depth=15),
    _chain("chain", rng, rows=33, max_depth=32),
    _chain("chain that is cut", rng, rows=33, max_depth=7),
    _same_siblings(rng),
    _hostile("any parents and sizes", rng, rows=40, max_depth=50),
    _empty_batch(rng),
  ]
  if not small:
    made += [
      _random(f"random {i}", rng, batch=8, rows=int(rng.integers(2, 200)), max_depth=16)
      for i in range(40)
    ]
    made.append(_random("1025 nodes", rng, batch=2, rows=1025, max_depth=64))
    made += [_hostile(f"hostile {i}", rng, rows=65, max_depth=80) for i in range(10)]
  return made


def _case(
  name: str, trees: Sequence[Tree], targets: np.ndarray, max_depth: int
) -> GoldenCase:
  batch, rows = targets.shape
  sizes = np.array([tree.size for tree in trees], np.int32)
  path = np.empty((batch, max_depth + 1), np.int32)
  length, bonus = np.empty(batch, np.int32), np.empty(batch, np.int32)
  for b, tree in enumerate(trees):
    # A size outside of the tree counts as the nearest one within.
    live = dataclasses.replace(tree, size=min(max(tree.size, 0), rows))
    path[b], length[b], bonus[b] = accept_tree(live, targets[b], max_depth)
  outputs = {"path": path, "length": length, "bonus": bonus}

  def stack(field: str) -> np.ndarray:
    found = [getattr(tree, field) for tree in trees]
    return np.array(found, np.int32).reshape(batch, rows)

  return GoldenCase(
    op="accept_tree",
    name=name,
    attributes={"max_depth": max_depth},
    inputs={
      "token_ids": stack("token_ids"),
      "parents": stack("parents"),
      "size": sizes,
      "target_tokens": targets,
    },
    outputs=outputs,
    compare=bits(outputs),
  )


def _agreeing(
  rng: np.random.Generator, tree: Tree, chance: float, vocab: int
) -> np.ndarray:
  """Targets i32[N] that choose some child of a slot with this chance."""
  targets = rng.integers(vocab, size=len(tree.parents)).astype(np.int32)
  for node in range(1, tree.size):
    if rng.random() < chance:
      targets[tree.parents[node]] = tree.token_ids[node]
  return targets


def _random(
  name: str, rng: np.random.Generator, batch: int, rows: int, max_depth: int
) -> GoldenCase:
  trees = []
  for b in range(batch):
    size = rows if b == 0 else int(rng.integers(1, rows + 1))
    reach = int(rng.choice([1, 2, 4, rows]))
    trees.append(random_tree(rng, rows, size, reach, vocab=4 * rows))
  targets = [_agreeing(rng, tree, 0.8, 4 * rows) for tree in trees]
  return _case(name, trees, np.stack(targets), max_depth)


def _chain(
  name: str, rng: np.random.Generator, rows: int, max_depth: int
) -> GoldenCase:
  """Chains that are accepted whole, to the middle, and not at all."""
  trees = [random_tree(rng, rows, rows, 1, vocab=1000) for _ in range(3)]
  targets = np.stack([np.append(t.token_ids[1:], 7) for t in trees]).astype(np.int32)
  targets[1, rows // 2] += 1
  targets[2, 0] += 1
  return _case(name, trees, targets, max_depth)


def _same_siblings(rng: np.random.Generator) -> GoldenCase:
  """Siblings of one token, of which the lowest slot counts; token 0, as padding has."""
  trees = [random_tree(rng, 32, 20, 8, vocab=2) for _ in range(4)]
  targets = rng.integers(2, size=(4, 32)).astype(np.int32)
  targets[0] = 0
  return _case("siblings of one token", trees, targets, 12)


def _hostile(
  name: str, rng: np.random.Generator, rows: int, max_depth: int
) -> GoldenCase:
  """Parents behind their children, in cycles and out of range; sizes out of range."""
  trees = []
  for size in (-5, 0, rows // 2, rows, rows + 7, 2**31 - 1):
    parents = rng.integers(-2, rows + 2, size=rows).astype(np.int32)
    parents[rng.integers(rows, size=3)] = (-(2**31), 2**31 - 1, rows)
    tokens = rng.integers(2, size=rows).astype(np.int32)
    trees.append(Tree(tokens, parents, np.zeros_like(tokens), np.zeros(rows), size))
  targets = rng.integers(2, size=(len(trees), rows)).astype(np.int32)
  return _case(name, trees, targets, max_depth)


def _empty_batch(rng: np.random.Generator) -> GoldenCase:
  del rng
  return _case("no sequence", [], np.zeros((0, 9), np.int32), 4)
