"""Inputs that several cases of `--suite=kernels` share: random trees, rope's angles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import ops
from kdtree_jax.tree import NO_PARENT, ROOT

MAX_DEPTH = 15  # of the trees: a drafter's block of 16


def random_tree(nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """(parents, depths) of a tree of at most `MAX_DEPTH`, parents before children.

  A slot hangs below one of the eight before it, so that trees reach their depth.
  """
  rng = np.random.default_rng(seed)
  parents = np.full(nodes, NO_PARENT, np.int32)
  depths = np.zeros(nodes, np.int32)
  for i in range(1, nodes):
    allowed = [j for j in range(max(0, i - 8), i) if depths[j] < MAX_DEPTH]
    parents[i] = rng.choice(allowed) if allowed else ROOT
    depths[i] = depths[parents[i]] + 1
  return parents, depths


class Angles:
  """Tables for XLA, frequencies for CUDA, positions of a tree behind `context`."""

  def __init__(self, nodes: int, width: int, context: int):
    _, self._depths = random_tree(nodes, seed=nodes)
    self._context = context
    theta = 50000.0
    self._table = ops.rope_table(width, context + nodes, theta, None)
    self.frequencies = ops.RopeFrequencies.create(width, theta, None)

  def inputs(self) -> tuple[jax.Array, ...]:
    positions = self._context + jnp.asarray(self._depths)[None]
    return jnp.asarray(self._table.cos), jnp.asarray(self._table.sin), positions
