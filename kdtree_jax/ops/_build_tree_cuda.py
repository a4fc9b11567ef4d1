"""The custom calls of `custom_calls/build_tree.cu`: trees and tables of candidates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.tree import Tree

# Slots that a search can fill, and candidates per depth: kBuildTreeMaxNodes.
MAX_BUDGET = 1023
MAX_VOCAB = 2**30
# Logits per slice of a row: kLogitsPerSlice. For the size of the workspace alone, which
# the handler checks.
_SLICE = 20480


def obstacle(what: str, number: int, vocab: int = 0) -> str | None:
  """Why the custom calls cannot build such trees; None where they can.

  Args:
    what: how the caller's argument makes `number`.
    number: nodes besides the root, or candidates per depth.
    vocab: V of the logits, if there are any.
  """
  if number > MAX_BUDGET:
    return f"{what}; at most {MAX_BUDGET} is allowed"
  if vocab > MAX_VOCAB:
    return f"logits have a vocabulary of {vocab}; at most {MAX_VOCAB} is allowed"
  return None


def build(
  logits: jax.Array,
  root_tokens: jax.Array,
  limit: jax.Array,
  max_depth: jax.Array,
  *,
  depths: int,
  width: int,
  budget: int,
  rows: int,
) -> tuple[Tree, jax.Array, jax.Array]:
  """Trees from logits.

  Args:
    logits: [B, L, V], f32 or bf16.
    root_tokens: i32[B].
    limit: i32[B], or of size 1 for all.
    max_depth: i32[B], or of size 1 for all.
    depths: rows of logits to use, 1 .. L.
    width: candidates per row, k, 1 .. min(V, MAX_BUDGET).
    budget: nodes besides the root, 0 .. MAX_BUDGET.
    rows: slots of the trees, at least 1 + budget.

  Returns:
    The trees, and the table that they were built from: log_probs f32[B, depths, k] and
    token_ids i32[B, depths, k].
  """
  B, _, V = logits.shape
  call = jax.ffi.ffi_call(
    "kdtree_jax.build_tree",
    (*_tree_shapes(B, rows), *_table_shapes(B, depths, V, width)),
    vmap_method="sequential",
  )
  out = call(logits, root_tokens, limit, max_depth, budget=budget)
  return Tree(*out[:5]), out[5], out[6]


def from_table(
  log_probs: jax.Array,
  token_ids: jax.Array,
  root_tokens: jax.Array,
  limit: jax.Array,
  max_depth: jax.Array,
  *,
  budget: int,
  rows: int,
) -> Tree:
  """Trees from log_probs f32[B, L, k] and token_ids i32[B, L, k]; else as `build`."""
  call = jax.ffi.ffi_call(
    "kdtree_jax.tree_from_table",
    _tree_shapes(log_probs.shape[0], rows),
    vmap_method="sequential",
  )
  return Tree(*call(log_probs, token_ids, root_tokens, limit, max_depth, budget=budget))


def candidates(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
  """The table of `build` alone: of all rows, and `width` candidates of each."""
  B, L, V = logits.shape
  call = jax.ffi.ffi_call(
    "kdtree_jax.log_softmax_topk",
    _table_shapes(B, L, V, width),
    vmap_method="sequential",
  )
  log_probs, token_ids, _ = call(logits)
  return log_probs, token_ids


def _tree_shapes(B: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Fields of a Tree, in their order."""
  ints = jax.ShapeDtypeStruct((B, rows), jnp.int32)
  floats = jax.ShapeDtypeStruct((B, rows), jnp.float32)
  return ints, ints, ints, floats, jax.ShapeDtypeStruct((B,), jnp.int32)


def _table_shapes(
  B: int, L: int, V: int, width: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """A table, and the workspace for making it: CandidateWorkspaceBytes."""
  per_slice = 16 + 8 * width
  workspace = B * L * -(-V // _SLICE) * per_slice + 4 * B
  return (
    jax.ShapeDtypeStruct((B, L, width), jnp.float32),
    jax.ShapeDtypeStruct((B, L, width), jnp.int32),
    jax.ShapeDtypeStruct((-(-workspace // 8) * 8,), jnp.uint8),
  )
