"""Golden cases of `tree_ancestors`."""

from __future__ import annotations

import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, bits
from kdtree_jax.reference.golden.random_trees import random_tree
from kdtree_jax.reference.tree import ancestors


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Chains, bushy trees and padding.

  Args:
    rng: source of randomness.
    small: fewer trees.
  """
  made = [
    _case("random", rng, batch=4, rows=17, spare=2),
    _case("one node", rng, batch=2, rows=1, spare=0),
    _case("one node, deep table", rng, batch=2, rows=1, spare=5),
    _case("chain", rng, batch=2, rows=33, spare=0, reach=1),
    _case("128 nodes", rng, batch=2, rows=128, spare=1),
  ]
  if not small:
    made += [
      _case(f"random {i}", rng, batch=8, rows=int(rng.integers(2, 80)), spare=i % 3)
      for i in range(6)
    ]
  return made


def _case(
  name: str,
  rng: np.random.Generator,
  batch: int,
  rows: int,
  spare: int,
  reach: int | None = None,
) -> GoldenCase:
  """Trees whose table has `spare` depths more than the deepest of them."""
  trees = []
  for b in range(batch):
    size = rows if b == 0 else int(rng.integers(1, rows + 1))
    near = int(rng.choice([1, 2, 4, rows])) if reach is None else reach
    trees.append(random_tree(rng, rows, size, near, 50))
  max_depth = max(int(tree.depths.max()) for tree in trees) + spare
  outputs = {"ancestors": np.stack([ancestors(tree, max_depth) for tree in trees])}
  return GoldenCase(
    op="tree_ancestors",
    name=name,
    attributes={"max_depth": max_depth},
    inputs={
      "parents": np.stack([tree.parents for tree in trees]),
      "depths": np.stack([tree.depths for tree in trees]),
    },
    outputs=outputs,
    compare=bits(outputs),
  )
