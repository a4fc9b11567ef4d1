"""What `--suite=kernels` measures: an op on one shape, with what it has to move.

Inputs are random and made on the device. Bytes and operations are counted from the
shapes: each input read once and each output written once, whatever an
implementation really does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import ops
from kdtree_jax.bench.kernel_inputs import MAX_DEPTH, Angles, random_tree
from kdtree_jax.bench.timing import SHORT_REPEATS, add_zero
from kdtree_jax.ops import _tree_attention_cuda
from kdtree_jax.tree import Tree, ancestors

BF16 = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
  """One row of the table.

  Attributes:
    op: its name in `kdtree_jax.ops`.
    shape: for the reader.
    inputs: random key -> one input set.
    call: (*shared, input set, implementation) -> outputs; with `carried`, (*shared,
      value of the call before, input set, implementation) -> its new value.
    link: see `kdtree_jax.bench.timing.Chain`.
    bytes_moved: read and written by one call, at least.
    flops: multiplications and additions of one call.
    sets: input sets that calls rotate among.
    calls: calls per program of the CUDA form.
    xla_calls: the same for the XLA form, which takes longer to compile and to run.
    repeats: times that a program runs its calls.
    carried: makes the first value that calls hand on, or None.
    bar_us: what docs/kernels.md asks of the portable kernel, or None.
    hopper_bar_us: what it asks of a kernel for Hopper alone, or None.
    shared: random key -> arguments that all calls have in common, or None.
    no_xla: why the XLA form is not timed, or None.
  """

  op: str
  shape: str
  inputs: Callable[[jax.Array], Any]
  call: Callable[..., Any]
  bytes_moved: int
  flops: int
  link: Callable[[Any, jax.Array], Any] | None = None
  sets: int = 10
  calls: int = 10
  xla_calls: int = 4
  repeats: int = 1
  carried: Callable[[], Any] | None = None
  bar_us: float | None = None
  hopper_bar_us: float | None = None
  shared: Callable[[jax.Array], tuple[Any, ...]] | None = None
  no_xla: str | None = None


def tree_attention(
  nodes: int,
  context: int,
  *,
  heads: int = 64,
  latent: int = 512,
  rope: int = 64,
  dtype: jnp.dtype = BF16,
  max_positions: int | None = None,
  kernel: str = "portable",
  **fields: Any,
) -> Case:
  """Nodes of a random tree behind a full cache of `context` positions, one layer.

  `max_positions` is the model's longest context, which the CUDA form's chunk follows;
  `context` where None. `kernel` is the CUDA form's.
  """
  width = latent + rope
  parents, depths = random_tree(nodes, seed=nodes)

  def inputs(key):
    tree = Tree(
      token_ids=jnp.zeros((1, nodes), jnp.int32),
      parents=jnp.asarray(parents)[None],
      depths=jnp.asarray(depths)[None],
      log_probs=jnp.zeros((1, nodes), jnp.float32),
      size=jnp.full((1,), nodes, jnp.int32),
    )
    q, cache, keys = (
      jax.random.normal(k, shape, dtype)
      for k, shape in zip(
        jax.random.split(key, 3),
        ((1, nodes, heads, width), (1, context, width), (1, nodes, width)),
        strict=True,
      )
    )
    lengths = jnp.full((1,), context, jnp.int32)
    # The table that a decode step gives the op, see `verify_step`.
    return q, cache, keys, ancestors(tree, nodes - 1), tree.depths, lengths

  def call(inputs, implementation):
    return ops.tree_attention(
      *inputs,
      scale=width**-0.5,
      value_dim=latent,
      max_positions=max_positions,
      kernel=kernel,
      implementation=implementation,
    )

  hopper = kernel == "hopper"
  chunk = (
    _tree_attention_cuda.default_chunk_on_hopper
    if hopper
    else _tree_attention_cuda.default_chunk
  )(max_positions or context)
  seen = nodes * (context + 1) + int(depths.sum())
  values = context * width + nodes * width + nodes * heads * (width + latent)
  return Case(
    op="tree_attention",
    shape=f"{_count(nodes, 'row')}, {context // 1024}k, {heads} heads, "
    f"{'hopper, ' * hopper}chunk {chunk}",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=dtype.itemsize * values,
    flops=2 * (width + latent) * heads * seen,
    **fields,
  )


def build_tree(
  depth: int = MAX_DEPTH, vocab: int = 163840, budget: int = 64, **fields: Any
) -> Case:
  """Trees from normal logits, one sequence, fp32."""

  def inputs(key):
    logits = 4.0 * jax.random.normal(key, (1, depth, vocab), jnp.float32)
    return logits, jnp.zeros((1,), jnp.int32)

  def call(inputs, implementation):
    logits, root_tokens = inputs
    return ops.build_tree(logits, root_tokens, budget, implementation=implementation)

  rows = 1 + budget
  return Case(
    op="build_tree",
    shape=f"[1, {depth}, {vocab}] fp32, budget {budget}",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=4 * (depth * vocab + 4 * rows),
    flops=0,
    **fields,
  )


def accept_tree(nodes: int = 64, depth: int = MAX_DEPTH, **fields: Any) -> Case:
  """A random tree whose longest branch the target follows."""
  parents, depths = random_tree(nodes, seed=nodes)
  path = [int(np.argmax(depths))]
  while parents[path[-1]] >= 0:
    path.append(int(parents[path[-1]]))

  def inputs(key):
    tokens = jax.random.permutation(key, 1000 * nodes)[:nodes].astype(jnp.int32)
    # At each slot of the path the target chooses the next one's token.
    targets = jnp.zeros((nodes,), jnp.int32) - 1
    targets = targets.at[np.array(path[1:], np.int32)].set(tokens[np.array(path[:-1])])
    tree = Tree(
      token_ids=tokens[None],
      parents=jnp.asarray(parents)[None],
      depths=jnp.asarray(depths)[None],
      log_probs=jnp.zeros((1, nodes), jnp.float32),
      size=jnp.full((1,), nodes, jnp.int32),
    )
    return tree, targets[None]

  def call(inputs, implementation):
    tree, targets = inputs
    return ops.accept_tree(tree, targets, depth, implementation=implementation)

  return Case(
    op="accept_tree",
    shape=f"{nodes} nodes, greedy",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=4 * (3 * nodes + 1 + depth + 3),
    flops=0,
    **fields,
  )


def best_token(rows: int = 64, vocab: int = 163840, **fields: Any) -> Case:
  """The greedy choice at each slot of a tree, from fp32 logits."""

  def inputs(key):
    return jax.random.normal(key, (1, rows, vocab), jnp.float32)

  def call(logits, implementation):
    return ops.best_token(logits, implementation=implementation)

  return Case(
    op="best_token",
    shape=f"[1, {rows}, {vocab}] fp32",
    inputs=inputs,
    call=call,
    bytes_moved=4 * rows * (vocab + 1),
    flops=0,
    **fields,
  )


def token_log_probs(
  rows: int = 64,
  accepted: int = MAX_DEPTH + 1,
  vocab: int = 163840,
  **fields: Any,
) -> Case:
  """Log-probabilities of the tokens on a path, from the fp32 logits of all slots."""

  def inputs(key):
    keys = jax.random.split(key, 3)
    logits = 4.0 * jax.random.normal(keys[0], (1, rows, vocab), jnp.float32)
    tokens = jax.random.randint(keys[1], (1, rows), 0, vocab)
    path = jnp.sort(jax.random.permutation(keys[2], rows)[:accepted])
    return logits, tokens, path[None].astype(jnp.int32)

  def call(inputs, implementation):
    logits, tokens, path = inputs
    return ops.token_log_probs(logits, tokens, path, implementation=implementation)

  return Case(
    op="token_log_probs",
    shape=f"{accepted} of [1, {rows}, {vocab}] fp32",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=4 * accepted * (vocab + 3),
    flops=0,
    **fields,
  )


def ancestors_table(nodes: int = 64, **fields: Any) -> Case:
  """The index by position that attention finds a node's own keys with."""
  parents, depths = random_tree(nodes, seed=nodes)

  def inputs(key):
    log_probs = jax.random.uniform(key, (1, nodes))
    return log_probs, jnp.asarray(depths)[None], jnp.asarray(parents)[None]

  def call(inputs, implementation):
    log_probs, depths, parents = inputs
    tree = Tree(
      token_ids=jnp.zeros((1, nodes), jnp.int32),
      parents=parents,
      depths=depths,
      log_probs=log_probs,
      size=jnp.full((1,), nodes, jnp.int32),
    )
    return ops.ancestors(tree, nodes - 1, implementation=implementation)

  return Case(
    op="ancestors",
    shape=f"{nodes} nodes",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=4 * nodes * (nodes + 2),
    flops=0,
    **fields,
  )


def compact(
  batch: int,
  *,
  layers: int = 61,
  accepted: int = MAX_DEPTH + 1,
  nodes: int = 64,
  capacity: int = 4096,
  width: int = 576,
  dtype: jnp.dtype = BF16,
  **fields: Any,
) -> Case:
  """Keys of random slots of each sequence to all layers of the cache, in place."""

  def inputs(key):
    keys = jax.random.split(key, 3)
    tree_keys = jax.random.normal(keys[0], (layers, batch, nodes, width), dtype)
    order = jax.vmap(lambda k: jax.random.permutation(k, nodes))
    path = jnp.sort(order(jax.random.split(keys[1], batch))[:, :accepted])
    start = jax.random.randint(keys[2], (batch,), 0, capacity - accepted)
    length = jnp.full((batch,), accepted, jnp.int32)
    return tree_keys, path.astype(jnp.int32), length, start

  def call(cache, inputs, implementation):
    return ops.compact(cache, *inputs, implementation=implementation)

  calls = fields.pop("calls", 16)
  return Case(
    op="compact",
    shape=f"{layers} layers, {accepted} accepted, batch {batch}",
    inputs=inputs,
    call=call,
    carried=lambda: jnp.zeros((layers, batch, capacity, width), dtype),
    bytes_moved=2 * dtype.itemsize * layers * batch * accepted * width,
    flops=0,
    calls=calls,
    # As many, so that both forms end with the same cache.
    xla_calls=calls,
    sets=calls,
    **fields,
  )


def rope(
  nodes: int = 64,
  heads: int = 64,
  width: int = 64,
  *,
  context: int = 4096,
  dtype: jnp.dtype = BF16,
  **fields: Any,
) -> Case:
  """The rotated part of a layer's queries at the positions of a tree, alone."""
  angles = Angles(nodes, width, context)

  def inputs(key):
    return jax.random.normal(key, (1, nodes, heads, width), dtype), *angles.inputs()

  def call(inputs, implementation):
    x, cos, sin, positions = inputs
    return ops.rope(
      x,
      positions[..., None],
      cos,
      sin,
      interleave=True,
      frequencies=angles.frequencies,
      implementation=implementation,
    )

  values = 2 * nodes * heads * width
  return Case(
    op="rope",
    shape=f"[1, {nodes}, {heads}, {width}] {_name(dtype)}",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=dtype.itemsize * values + 4 * nodes,
    flops=3 * nodes * heads * width,
    **fields,
  )


def rope_queries(
  nodes: int = 64,
  heads: int = 64,
  *,
  latent: int = 512,
  plain: int = 128,
  width: int = 64,
  context: int = 4096,
  dtype: jnp.dtype = BF16,
  **fields: Any,
) -> Case:
  """The queries of a layer: the absorbed part beside the rotated one."""
  angles = Angles(nodes, width, context)

  def inputs(key):
    keys = jax.random.split(key)
    absorbed = jax.random.normal(keys[0], (1, nodes, heads, latent), dtype)
    q = jax.random.normal(keys[1], (1, nodes, heads, plain + width), dtype)
    return absorbed, q, *angles.inputs()

  def call(inputs, implementation):
    absorbed, q, cos, sin, positions = inputs
    return ops.rope_queries(
      absorbed,
      q,
      positions,
      cos,
      sin,
      interleave=True,
      frequencies=angles.frequencies,
      implementation=implementation,
    )

  values = 2 * nodes * heads * (latent + width)
  return Case(
    op="rope_queries",
    shape=f"[1, {nodes}, {heads}, {latent} + {width}] {_name(dtype)}",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=dtype.itemsize * values + 4 * nodes,
    flops=3 * nodes * heads * width,
    **fields,
  )


def rope_keys(
  nodes: int = 64,
  *,
  latent: int = 512,
  width: int = 64,
  context: int = 4096,
  dtype: jnp.dtype = BF16,
  **fields: Any,
) -> Case:
  """The cache rows of a layer: the normed latent beside the rotated key."""
  angles = Angles(nodes, width, context)

  def inputs(key):
    kv = jax.random.normal(key, (1, nodes, latent + width), dtype)
    return kv, jnp.ones((latent,), dtype), *angles.inputs()

  def call(inputs, implementation):
    kv, weight, cos, sin, positions = inputs
    return ops.rope_keys(
      kv,
      weight,
      positions,
      cos,
      sin,
      eps=1e-6,
      interleave=True,
      frequencies=angles.frequencies,
      implementation=implementation,
    )

  values = 2 * nodes * (latent + width) + latent
  return Case(
    op="rope_keys",
    shape=f"[1, {nodes}, {latent} + {width}] {_name(dtype)}",
    inputs=inputs,
    call=call,
    link=_link_last,
    bytes_moved=dtype.itemsize * values + 4 * nodes,
    flops=nodes * (4 * latent + 3 * width),
    **fields,
  )


def standard() -> list[Case]:
  """The rows of the tables in docs/kernels.md."""
  k = 1024
  short: dict[str, Any] = {"repeats": SHORT_REPEATS}
  small: dict[str, Any] = {"calls": 32, "xla_calls": 32, "sets": 8, **short}
  # The kernel for sm_90a alone; elsewhere these rows say that it cannot run.
  hopper: dict[str, Any] = {"kernel": "hopper", "no_xla": "as with the portable kernel"}
  return [
    tree_attention(1, 32 * k, bar_us=40, calls=20, sets=20),
    tree_attention(1, 128 * k, bar_us=65),
    tree_attention(16, 32 * k, bar_us=270, hopper_bar_us=129),
    tree_attention(64, 32 * k, bar_us=1000, hopper_bar_us=450),
    # In a model whose context may be 262,144 long, Kimi's, chunks are larger.
    tree_attention(1, 32 * k, max_positions=256 * k, bar_us=40, calls=20, sets=20),
    tree_attention(64, 32 * k, max_positions=256 * k, bar_us=1000, hopper_bar_us=450),
    tree_attention(64, 128 * k, bar_us=4000, hopper_bar_us=1830, calls=5, xla_calls=2),
    tree_attention(1, 32 * k, bar_us=40, calls=20, sets=20, **hopper),
    tree_attention(1, 128 * k, bar_us=65, **hopper),
    tree_attention(16, 32 * k, bar_us=129, **hopper),
    tree_attention(64, 32 * k, bar_us=450, **hopper),
    tree_attention(64, 128 * k, bar_us=1830, calls=5, **hopper),
    build_tree(bar_us=60, calls=16, sets=16, xla_calls=8),
    accept_tree(bar_us=10, **small),
    best_token(**short),
    token_log_probs(**short),
    ancestors_table(**small),
    compact(1, **short),
    compact(8, calls=8, **short),
    rope(**small),
    rope_queries(**small),
    rope_keys(**small),
  ]


def _link_last(inputs: tuple[Any, ...], zero: jax.Array) -> tuple[Any, ...]:
  """The last of the inputs, a small array of integers, waits for `zero`."""
  return (*inputs[:-1], add_zero(inputs[-1], zero))


def _count(number: int, noun: str) -> str:
  return f"{number} {noun}" + "s" * (number != 1)


def _name(dtype: jnp.dtype) -> str:
  return {"bfloat16": "bf16", "float32": "fp32"}.get(dtype.name, dtype.name)
