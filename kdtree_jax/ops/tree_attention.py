"""Absorbed MLA attention of draft-tree nodes over the latent cache.

A node attends to the committed tokens and to its own ancestors in the tree, and
to nothing else. Keys are addressed by absolute position and reduced in position
order, in fixed chunks of positions, the same for every node. So the bits of a node's
output do not depend on whether its ancestors have been committed yet, on its
siblings, or on the batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kdtree_jax.ops import (
  _implementation,
  _tree_attention_cuda,
  _tree_attention_xla,
)
from kdtree_jax.ops._checks import (
  as_array,
  check_integers,
  check_static_integers,
  check_static_number,
)

CHUNK = _tree_attention_xla.CHUNK


def tree_attention(
  q: jax.Array,
  cache: jax.Array,
  tree_keys: jax.Array,
  ancestors: jax.Array,
  depths: jax.Array,
  lengths: jax.Array,
  *,
  scale: float,
  value_dim: int,
  layer: int | None = None,
  chunk: int | None = None,
  max_positions: int | None = None,
  kernel: str = "auto",
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention over keys in absolute position order.

  Node n sits at absolute position `lengths + depths[n]`. Its key at position p
  is `cache[p]` for p < lengths, and the tree key of its ancestor-or-self at
  depth `p - lengths` from there on. Values are the first `value_dim` columns of
  the keys (DeepSeek-V3 `inference/model.py`, the "absorb" form).

  Args:
    q: [B, N, H, W] queries, f32 or bf16; W = kv_lora_rank + qk_rope_head_dim.
    cache: [B, S, W] committed keys, or [layers, B, S, W] where `layer` is given;
      rows at and beyond `lengths` are ignored. Except for "cuda", S must be a
      multiple of the XLA form's chunk.
    tree_keys: [B, N, W] keys of the tree's nodes.
    ancestors: i32 [B, N, A] slot of the ancestor-or-self at each depth, -1
      beyond the node's own depth.
    depths: i32 [B, N] depth of each node, 0 for the root, at most A - 1.
    lengths: i32 [B] committed tokens, at most S.
    scale: static factor on the logits.
    value_dim: width of the output, kv_lora_rank.
    layer: which layer of the cache to read. A layer cut out by the caller would be
      copied as a whole before the loop over its chunks.
    chunk: positions per chunk, the same in every program whose bits are
      compared. None leaves it to the form: `CHUNK` for XLA, and for CUDA a
      function of `max_positions`, another for each kernel
      (`_tree_attention_cuda.default_chunk`, `default_chunk_on_hopper`).
    max_positions: positions that any cache of this model may have; S where None. A
      model gives its own limit, so that the CUDA form's bits do not depend on how
      large a cache was made.
    kernel: of the CUDA form: "portable", "hopper", or "auto". The kernel for Hopper
      needs a GPU of compute capability 9.x, bfloat16, W = 576, value_dim = 512 and a
      positive scale; "auto" is that one there, if heads are a multiple of 64. Each
      kernel is exact in itself, but their bits differ. `print_environment` says which
      "auto" is.
    implementation: "auto", "xla" or "cuda". The CUDA form takes float32 and
      bfloat16, at most 128 nodes, 129 depths and W = 576, and chunks of a multiple
      of 16; and at most 65,535 sequences, 65,535 chunks and chunks of 2^20. What goes
      beyond has the XLA form under "auto" too, in all programs.

  Returns:
    [B, N, H, value_dim] in `q.dtype`. Where `lengths`, `depths` or `ancestors` are
    out of range a result means nothing, but nothing outside the arrays is read.

  Raises:
    ValueError: shapes or dtypes disagree or are not allowed, S is not a multiple of the
      XLA form's chunk, or "cuda" beyond its limits.
    NotImplementedError: "cuda" without the CUDA library.
  """
  arrays = map(as_array, (q, cache, tree_keys, ancestors, depths, lengths))
  q, cache, tree_keys, ancestors, depths, lengths = arrays
  check_static_integers(
    value_dim=value_dim, layer=layer, chunk=chunk, max_positions=max_positions
  )
  check_static_number("scale", scale)
  _check_shapes(
    q, cache, tree_keys, ancestors, depths, lengths, value_dim, layer is not None
  )
  if layer is not None and not 0 <= layer < cache.shape[0]:
    raise ValueError(f"layer = {layer} must lie in 0 .. {cache.shape[0] - 1}")
  for name, value in (("chunk", chunk), ("max_positions", max_positions)):
    if value is not None and value < 1:
      raise ValueError(f"{name} = {value} must be at least 1")
  if kernel not in _tree_attention_cuda.KERNELS:
    raise ValueError(
      f"kernel = {kernel!r} must be one of {', '.join(_tree_attention_cuda.KERNELS)}"
    )
  capacity = cache.shape[-2]
  cuda_chunk = chunk_on_hopper = chunk
  if cuda_chunk is None:
    cuda_chunk = _tree_attention_cuda.default_chunk(max_positions or capacity)
    chunk_on_hopper = _tree_attention_cuda.default_chunk_on_hopper(
      max_positions or capacity
    )
  if kernel == "hopper" and (
    what := _tree_attention_cuda.kernel_obstacle(q.dtype, q.shape[-1], value_dim, scale)
  ):
    raise ValueError(f"kernel = 'hopper' cannot run: {what}")
  implementation = _implementation.within_limits(
    "tree_attention",
    implementation,
    _tree_attention_cuda.obstacle(q, capacity, ancestors, cuda_chunk),
  )
  xla_chunk = CHUNK if chunk is None else chunk
  if implementation != "cuda":
    _check_whole_chunks(capacity, xla_chunk)
  if q.shape[0] == 0:
    _implementation.resolve("tree_attention", implementation)
    return jnp.zeros((*q.shape[:3], value_dim), q.dtype)

  if layer is None:
    cache, layer = cache[None], 0
  settings = {"scale": scale, "value_dim": value_dim, "layer": layer}
  return _implementation.dispatch(
    "tree_attention",
    implementation,
    functools.partial(
      _tree_attention_cuda.attend,
      **settings,
      chunk=cuda_chunk,
      chunk_on_hopper=chunk_on_hopper,
      kernel=kernel,
    ),
    functools.partial(_tree_attention_xla.attend, **settings, chunk=xla_chunk),
    q,
    cache,
    tree_keys,
    ancestors,
    depths,
    lengths,
  )


def _check_shapes(
  q, cache, tree_keys, ancestors, depths, lengths, value_dim, with_layers
) -> None:
  if q.ndim != 4:
    raise ValueError(f"q must be [B, N, H, W]; its shape is {q.shape}")
  B, N, _, W = q.shape
  expected = {
    "cache": (cache, (None, B, None, W) if with_layers else (B, None, W)),
    "tree_keys": (tree_keys, (B, N, W)),
    "ancestors": (ancestors, (B, N, None)),
    "depths": (depths, (B, N)),
    "lengths": (lengths, (B,)),
  }
  for name, (value, shape) in expected.items():
    if value.ndim != len(shape) or any(
      want is not None and have != want
      for have, want in zip(value.shape, shape, strict=True)
    ):
      wanted = ", ".join("?" if s is None else str(s) for s in shape)
      raise ValueError(
        f"{name} must have shape [{wanted}] to fit q {q.shape}"
        f"{' and a layer' * (with_layers and name == 'cache')}; it has {value.shape}"
      )
  for name, value, axis, what in (
    ("q", q, 1, "node"),
    ("cache", cache, -2, "position"),
    ("ancestors", ancestors, 2, "depth"),
  ):
    if value.shape[axis] == 0:
      raise ValueError(f"{name} {value.shape} has no {what}")
  check_integers(ancestors=ancestors, depths=depths, lengths=lengths)
  if not (q.dtype == cache.dtype == tree_keys.dtype):
    raise ValueError(
      "q, cache and tree_keys must have one dtype; they have "
      f"{q.dtype}, {cache.dtype} and {tree_keys.dtype}"
    )
  if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    raise ValueError(
      f"q, cache and tree_keys are {q.dtype}; they must be float32 or bfloat16 (or "
      "float16, for the XLA form)"
    )
  if not 0 < value_dim <= W:
    raise ValueError(f"value_dim = {value_dim} must lie in 1 .. {W}")


def _check_whole_chunks(positions: int, chunk: int) -> None:
  if positions % chunk:
    raise ValueError(
      f"cache holds {positions} positions, which is not a multiple of chunk = {chunk}"
    )
