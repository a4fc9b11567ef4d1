"""Random draft trees and candidate tables, shared by the tests of the tree ops."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kdtree_jax import reference
from kdtree_jax.tree import Tree

FIELDS = ("token_ids", "parents", "depths", "log_probs", "size")


def random_tree(rng: np.random.Generator, rows: int, vocab: int) -> reference.Tree:
  """A tree of any shape, with distinct siblings; not necessarily a best-first one."""
  size = int(rng.integers(1, rows + 1))
  tokens = np.zeros(rows, np.int32)
  parents = np.full(rows, -1, np.int32)
  depths = np.zeros(rows, np.int32)
  log_probs = np.full(rows, -np.inf, np.float32)
  tokens[0], log_probs[0] = rng.integers(vocab), 0
  children: dict[int, set[int]] = {}
  # Bushy trees, chains and all between.
  reach = int(rng.integers(1, rows + 1))
  for node in range(1, size):
    while True:
      parent = int(rng.integers(max(0, node - reach), node))
      free = set(range(vocab)) - children.setdefault(parent, set())
      if free:
        break
    token = int(rng.choice(sorted(free)))
    children[parent].add(token)
    tokens[node], parents[node], depths[node] = token, parent, depths[parent] + 1
    log_probs[node] = log_probs[parent] - np.float32(rng.exponential())
  return reference.Tree(tokens, parents, depths, log_probs, size)


def stack(trees: Sequence[reference.Tree]) -> Tree:
  """One batch of single trees."""
  return Tree(
    **{
      name: jnp.asarray(np.stack([getattr(t, name) for t in trees])) for name in FIELDS
    }
  )


def differences(batch: Tree, trees: Sequence[reference.Tree]) -> list[tuple[int, str]]:
  """(index, field) of everything in which a batch differs from single trees."""
  found = []
  for name in FIELDS:
    values = np.asarray(getattr(batch, name))
    for b, tree in enumerate(trees):
      expected = np.asarray(getattr(tree, name))
      # Bytes, so that 0.0 and -0.0 differ and NaN equals itself.
      if values[b].dtype.kind != expected.dtype.kind or (
        values[b].tobytes() != expected.astype(values.dtype).tobytes()
      ):
        found.append((b, name))
  return found


def random_tables(
  rng: np.random.Generator, cases: int, depth: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Candidate tables (log_probs, token_ids), both [cases, depth, width].

  Case by case: generic values; few distinct values, so that siblings and whole
  subtrees tie; rows of one value; tails, rows and last rows of -inf; a NaN row;
  rows of zeros of either sign.
  """
  scale = rng.choice([0.1, 1.0, 5.0], size=(cases, 1, 1))
  log_probs = -rng.exponential(size=(cases, depth, width)) * scale
  kind = np.arange(cases) % 8
  log_probs[kind == 1] = np.round(log_probs[kind == 1] * 2) / 2
  log_probs[kind == 2] = np.round(log_probs[kind == 2])
  log_probs[kind == 3] = log_probs[kind == 3][:, :, :1]
  log_probs[kind == 4] = -1.5
  log_probs = -np.sort(-log_probs, axis=-1).astype(np.float32)
  for case in np.flatnonzero(kind >= 5):
    row = rng.integers(depth)
    if kind[case] == 5:
      tails = rng.integers(0, width + 1, size=depth)
      log_probs[case][np.arange(width) >= tails[:, None]] = -np.inf
    elif kind[case] == 6:
      log_probs[case, row] = rng.choice([-np.inf, np.nan])
    else:
      log_probs[case, row] = rng.choice([0.0, -0.0], size=width)
  # Distinct tokens within a row; 0 is among them.
  token_ids = np.argsort(rng.random(log_probs.shape), axis=-1).astype(np.int32)
  return log_probs, token_ids
