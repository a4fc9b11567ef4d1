"""Commits the keys of the accepted path to the latent cache.

The XLA form is a scatter, and nothing else: slicing or gathering from the cache,
writing the result back with `dynamic_update_slice` and reshaping afterwards reads
rows that were overwritten already, in programs compiled for the CPU
(openxla/xla#49176).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_integers


def compact(
  cache: jax.Array,
  tree_keys: jax.Array,
  path: jax.Array,
  length: jax.Array,
  start: jax.Array,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """Writes the accepted slots' keys to consecutive positions of the cache.

  With the cache donated, or carried by a loop, the update is in place.

  Args:
    cache: [layers, B, S, W], keys by absolute position.
    tree_keys: [layers, B, N, W], keys of the trees' slots, of the same dtype.
    path: i32[B, A], accepted slots from the root, -1 padded. Entries are clamped
      to 0 .. N - 1.
    length: i32[B], accepted slots, 0 .. A; more counts as A.
    start: i32[B], absolute position of the root.
    implementation: "auto", "xla" or "cuda". "cuda" copies all layers in one launch.

  Returns:
    The cache with `tree_keys[:, b, path[b, i]]` at position `start[b] + i` for
    i < length[b]. Positions outside 0 .. S - 1 are dropped; nothing else changes.

  Raises:
    ValueError: shapes or dtypes disagree.
    NotImplementedError: "cuda" without the CUDA library.
  """
  cache, tree_keys, path, length, start = map(
    as_array, (cache, tree_keys, path, length, start)
  )
  _check(cache, tree_keys, path, length, start)
  path, length, start = (x.astype(jnp.int32) for x in (path, length, start))
  return _implementation.dispatch(
    "compact", implementation, _cuda, _xla, cache, tree_keys, path, length, start
  )


def _cuda(
  cache: jax.Array,
  tree_keys: jax.Array,
  path: jax.Array,
  length: jax.Array,
  start: jax.Array,
) -> jax.Array:
  """The custom call `custom_calls/compact.cu`, in place."""
  call = jax.ffi.ffi_call(
    "kdtree_jax.compact",
    jax.ShapeDtypeStruct(cache.shape, cache.dtype),
    input_output_aliases={0: 0},
    vmap_method="sequential",
  )
  return call(cache, tree_keys, path, length, start)


def _xla(
  cache: jax.Array,
  tree_keys: jax.Array,
  path: jax.Array,
  length: jax.Array,
  start: jax.Array,
) -> jax.Array:
  B, S = cache.shape[1:3]
  i = jnp.arange(path.shape[1], dtype=jnp.int32)
  position = start[:, None] + i
  kept = (i < length[:, None]) & (position >= 0) & (position < S)
  # Rows to drop get positions beyond the end, all distinct: that the indices are
  # unique spares the GPU its atomics.
  position = jnp.where(kept, position, S + i)
  slots = jnp.maximum(path, 0)[None, :, :, None]
  keys = jnp.take_along_axis(tree_keys, slots, axis=2, mode="clip")
  return cache.at[:, jnp.arange(B)[:, None], position].set(
    keys, mode="drop", unique_indices=True
  )


def _check(
  cache: jax.Array,
  tree_keys: jax.Array,
  path: jax.Array,
  length: jax.Array,
  start: jax.Array,
) -> None:
  if cache.ndim != 4:
    raise ValueError(f"cache {cache.shape} must be [layers, B, S, W]")
  layers, B, _, W = cache.shape
  if tree_keys.dtype != cache.dtype:
    raise ValueError(
      f"tree_keys {tree_keys.dtype} must be of the cache's dtype, {cache.dtype}"
    )
  if tree_keys.ndim != 4 or (
    tree_keys.shape[0],
    tree_keys.shape[1],
    tree_keys.shape[3],
  ) != (layers, B, W):
    raise ValueError(
      f"tree_keys {tree_keys.shape} must be [{layers}, {B}, N, {W}], like the cache "
      f"{cache.shape}"
    )
  if path.shape[:-1] != (B,):
    raise ValueError(f"path {path.shape} must be [B, A] = ({B}, A), like the cache")
  for name, value in (("length", length), ("start", start)):
    if value.shape != (B,):
      raise ValueError(f"{name} {value.shape} must be [B] = ({B},), like the cache")
  check_integers(path=path, length=length, start=start)
