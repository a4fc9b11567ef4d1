"""The longest path of a draft tree that the target would have written itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import (
  as_array,
  check_integers,
  check_static_integers,
  checked_tree,
)
from kdtree_jax.ops._gather import pick
from kdtree_jax.tree import ROOT, Tree

# What the CUDA form can hold, kAcceptTreeMaxNodes of custom_calls/accept_tree.h.
CUDA_MAX_NODES = 6144


def accept_tree(
  tree: Tree,
  target_tokens: jax.Array,
  max_depth: int,
  *,
  implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Walks from the root along the target's choices until the tree has no such child.

  Exact for greedy and sampled targets alike, as long as the token at a slot was
  chosen given the path to that slot (liranringel/ddtree: ddtree.py; SpecInfer, arXiv
  2305.09781). Of several children with the chosen token, which a built tree never
  has, the one in the lowest slot counts. Padding is never accepted.

  Any tree is safe: a slot whose parent is outside 0 .. N - 1 is nobody's child, a
  size below 0 counts as 0 and one above N as N, and a path through a cycle of
  parents ends at `max_depth`. The root is accepted whatever the size.

  Args:
    tree: trees of B sequences and N slots.
    target_tokens: i32[B, N], the token that the target chose at each slot, that
      is, after the path from the root to that slot.
    max_depth: static; most drafts to accept.
    implementation: "auto", "xla" or "cuda". Trees of more slots than
      `CUDA_MAX_NODES` have the XLA form alone.

  Returns:
    path i32[B, max_depth + 1], accepted slots from the root, -1 padded;
    length i32[B], accepted slots, the root included; bonus i32[B], the target's
    token after them.

  Raises:
    ValueError: shapes differ, there is no slot, `max_depth` is negative, something is
      not of integers, or "cuda" for larger trees.
    NotImplementedError: "cuda" without the CUDA library.
  """
  tree = checked_tree(tree)
  target_tokens = as_array(target_tokens)
  shape = tree.token_ids.shape
  if shape != target_tokens.shape:
    raise ValueError(
      f"target_tokens {target_tokens.shape} must have the tree's shape [B, N] = {shape}"
    )
  check_integers(target_tokens=target_tokens)
  check_static_integers(max_depth=max_depth)
  if max_depth < 0:
    raise ValueError(f"max_depth = {max_depth} is not allowed: it must be 0 or more")
  obstacle = None
  if tree.rows > CUDA_MAX_NODES:
    obstacle = f"tree has {tree.rows} slots; at most {CUDA_MAX_NODES} slots are allowed"
  return _implementation.dispatch(
    "accept_tree",
    _implementation.within_limits("accept_tree", implementation, obstacle),
    functools.partial(_accept_cuda, max_depth=max_depth),
    functools.partial(_accept_xla, max_depth=max_depth),
    tree,
    target_tokens.astype(jnp.int32),
  )


def _accept_cuda(
  tree: Tree, target_tokens: jax.Array, *, max_depth: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The custom call `custom_calls/accept_tree.cu`."""
  B = target_tokens.shape[0]
  call = jax.ffi.ffi_call(
    "kdtree_jax.accept_tree",
    (
      jax.ShapeDtypeStruct((B, max_depth + 1), jnp.int32),
      jax.ShapeDtypeStruct((B,), jnp.int32),
      jax.ShapeDtypeStruct((B,), jnp.int32),
    ),
    vmap_method="sequential",
  )
  path, length, bonus = call(tree.token_ids, tree.parents, tree.size, target_tokens)
  return path, length, bonus


def _accept_xla(
  tree: Tree, target_tokens: jax.Array, *, max_depth: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  B, N = target_tokens.shape
  slots = jnp.arange(N, dtype=jnp.int32)
  # [B, parent, child]: does the child carry what the target chose at the parent?
  follows = (tree.parents[:, None, :] == slots[:, None]) & (
    tree.token_ids[:, None, :] == target_tokens[:, :, None]
  )
  follows &= slots < tree.size[:, None, None]
  # The end of a walk is slot N, which follows itself.
  step = jnp.min(jnp.where(follows, slots, N), axis=2)
  step = jnp.pad(step, ((0, 0), (0, 1)), constant_values=N)
  path = jnp.full((B, 1), ROOT, jnp.int32)
  # Pointer doubling: `step` leads as many slots down as `path` is long.
  while path.shape[1] <= max_depth:
    path = jnp.concatenate([path, pick(step, path)], axis=1)
    step = pick(step, step)
  path = path[:, : max_depth + 1]
  accepted = path < N
  length = jnp.sum(accepted, axis=1, dtype=jnp.int32)
  last = pick(path, length[:, None] - 1)
  bonus = pick(target_tokens, last)[:, 0]
  return jnp.where(accepted, path, -1), length, bonus
