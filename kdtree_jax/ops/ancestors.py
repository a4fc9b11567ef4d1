"""The ancestors of every slot of a draft tree, by depth: where attention finds keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kdtree_jax import tree as tree_lib
from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import check_static_integers, checked_tree
from kdtree_jax.tree import Tree

# Slots that the custom call takes: kTreeAncestorsMaxNodes.
CUDA_MAX_NODES = 4096


def ancestors(tree: Tree, max_depth: int, *, implementation: str = "auto") -> jax.Array:
  """The ancestor-or-self of each slot at each depth.

  Args:
    tree: trees of B sequences and N slots, no deeper than `max_depth`.
    max_depth: static depth that the table covers.
    implementation: "auto", "xla" or "cuda". The CUDA form takes up to 4,096 slots;
      more have the XLA form under "auto".

  Returns:
    i32[B, N, max_depth + 1]: slots by depth, -1 beyond the slot's own depth. A
    padding slot stands alone at depth 0.

  Raises:
    ValueError: `max_depth` is negative or no integer, the tree's fields disagree, or
      "cuda" with too many slots.
    NotImplementedError: "cuda" without the CUDA library.
  """
  tree = checked_tree(tree)
  check_static_integers(max_depth=max_depth)
  if max_depth < 0:
    raise ValueError(f"max_depth = {max_depth} is not allowed: it must be 0 or more")
  obstacle = None
  if tree.rows > CUDA_MAX_NODES:
    obstacle = f"tree has {tree.rows} slots; at most {CUDA_MAX_NODES} slots are allowed"
  return _implementation.dispatch(
    "ancestors",
    _implementation.within_limits("ancestors", implementation, obstacle),
    functools.partial(_cuda, max_depth=max_depth),
    functools.partial(tree_lib.ancestors, max_depth=max_depth),
    tree,
  )


def _cuda(tree: Tree, *, max_depth: int) -> jax.Array:
  """The custom call `custom_calls/tree_ancestors.cu`."""
  call = jax.ffi.ffi_call(
    "kdtree_jax.ancestors",
    jax.ShapeDtypeStruct((*tree.parents.shape, max_depth + 1), jnp.int32),
    vmap_method="sequential",
  )
  return call(tree.parents, tree.depths)
