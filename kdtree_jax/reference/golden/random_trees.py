"""Random draft trees of any shape, not only those that a builder makes."""

from __future__ import annotations

import numpy as np

from kdtree_jax.reference.tree import NO_PARENT, Tree


def random_tree(
  rng: np.random.Generator, rows: int, size: int, reach: int, vocab: int
) -> Tree:
  """A tree whose parents come before their children.

  Args:
    rng: source of randomness.
    rows: slots N.
    size: live slots, 1 to N.
    reach: a node's parent is one of the `reach` slots before it, or all there are:
      1 makes a chain, N a bushy tree.
    vocab: tokens are below it. Where it is small, siblings carry the same token.

  Returns:
    The tree; its path sums count for nothing here.
  """
  tokens, depths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
  parents = np.full(rows, NO_PARENT, np.int32)
  log_probs = np.full(rows, -np.inf, np.float32)
  tokens[:size] = rng.integers(vocab, size=size)
  for node in range(1, size):
    parents[node] = rng.integers(max(0, node - reach), node)
    depths[node] = depths[parents[node]] + 1
  log_probs[:size] = -depths[:size]
  return Tree(tokens, parents, depths, log_probs, size)
