"""Whether bits depend on the number of rows and sequences: of an op, and of a step.

`row_ops` gives every op that works on rows; `differences` runs one in companies of
several sizes. `step_outputs` keeps what each op of a whole step gives for a few rows
of a tree, which `Embedding` places among others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import ops
from kdtree_jax.checkpoint import quantize
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.rounds import verify_step
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target
from kdtree_jax.ops import _implementation, int4_weight
from kdtree_jax.ops.rope import RopeFrequencies
from kdtree_jax.tree import NO_PARENT, Tree

# Ops of a round that make no floats of a row: trees, paths and copies.
NOT_OF_ROWS = {
  "ancestors",
  "build_tree",
  "chain_tree",
  "accept_tree",
  "emit",
  "compact",
}
ROWS = 64
COUNTS = (2, 8, 17, 33, ROWS)


@dataclasses.dataclass(frozen=True)
class RowOp:
  """An op with `ROWS` rows of arguments.

  Attributes:
    rows: arrays with a leading axis of rows.
    shared: what all rows have in common.
    ways: each takes (rows, shared, implementation), for any number of rows, and gives
      arrays with a leading axis of rows.
  """

  rows: tuple[Any, ...]
  shared: Any
  ways: tuple[Callable[..., Any], ...]


def differences(op: RowOp, implementation: str) -> list[str]:
  """In which companies rows have other bits than alone."""

  @jax.jit
  def run(rows, shared):
    first, *_ = op.ways
    alone = [first(_take(rows, i, i + 1), shared, implementation) for i in range(ROWS)]
    together = [
      [way(_take(rows, 0, n), shared, implementation) for n in COUNTS]
      for way in op.ways
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *alone), together

  alone, together = jax.device_get(run(op.rows, op.shared))
  found = []
  for way, results in enumerate(together):
    for n, result in zip(COUNTS, results, strict=True):
      want = jax.tree.leaves(_take(alone, 0, n))
      for leaf, (x, y) in enumerate(zip(want, jax.tree.leaves(result), strict=True)):
        rows = _differing_rows(x, y)
        if len(rows):
          found.append(f"way {way}, {n} rows, result {leaf}: rows {rows.tolist()}")
  return found


def row_ops(dtype: Any) -> dict[str, list[RowOp]]:
  """Each op of a round that works on rows, by name, in each of its kinds."""
  rng = np.random.default_rng(0)
  D, H, R, P, C, E, V = 256, 4, 64, 16, 32, 8, 1000

  def draw(*shape: int, scale: float = 1.0, dtype: Any = dtype) -> np.ndarray:
    return (rng.normal(size=shape) * scale).astype(dtype)

  def flat(op: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], ...]:
    """An op of rows and weights."""
    return (lambda rows, w, i: op(*rows, *w, implementation=i, **settings),)

  def chain(*names: str) -> tuple[Callable[..., Any], ...]:
    """Steps on the first of `rows`; a second one is the residual."""

    def way(rows, shared, implementation):
      x, *residual = rows
      steps = []
      for name, w in zip(names, shared, strict=True):
        if name == "rms_norm":
          steps.append((name, w, 1e-6))
        elif name == "add_rms_norm":
          steps.append((name, *residual, w, 1e-6))
        else:
          steps.append((name, w))
      return ops.matmul_chain(x, steps, implementation)

    return (way,)

  def by_sequence(call: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """An op of [B, N, ...]: a row in each sequence, and all rows in one."""

    def run(axis):
      def way(rows, shared, implementation):
        rows = [jnp.expand_dims(x, axis) for x in rows]
        return jnp.squeeze(call(rows, shared, implementation), axis)

      return way

    return run(1), run(0)

  x, h = draw(ROWS, D), draw(ROWS, D)
  wide = np.dtype(np.float32)
  gate_up, down = draw(E, D, 64, scale=D**-0.5), draw(E, 32, D, scale=32**-0.5)
  experts = np.argsort(rng.random((ROWS, E)), axis=1)[:, :3].astype(np.int32)
  routed = (x, experts, rng.random((ROWS, 3)).astype(np.float32))
  tiles = [
    int4_weight.pack(quantize(w.astype(np.float32).swapaxes(1, 2)), gated)
    for w, gated in ((gate_up, True), (down, False))
  ]
  swiglu = (draw(D, 192, scale=D**-0.5), draw(96, D))
  queries_of = (draw(D, 96), draw(96), draw(96, H * (C + P)), draw(H, C, R))
  output = (draw(H, R, C), draw(H * C, D), draw(D))
  positions = rng.integers(0, 200, ROWS).astype(np.int32)
  table = tuple(map(jnp.asarray, ops.rope_table(P, 256, 1e4, None)))
  angles = {
    "frequencies": RopeFrequencies.create(P, 1e4, None),
    "interleave": True,
  }
  queries, keys = draw(ROWS, H, R + P), draw(ROWS, R + P)
  logits = draw(ROWS, V, dtype=np.float32)

  def attend(rows, cache, implementation):
    q, own = rows
    B, N = q.shape[:2]
    slots = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], (B, N, 1))
    return ops.tree_attention(
      q,
      jnp.broadcast_to(cache, (B, *cache.shape)),
      own,
      slots,
      jnp.zeros((B, N), jnp.int32),
      jnp.full((B,), 250, jnp.int32),
      scale=0.2,
      value_dim=R,
      max_positions=2048,
      implementation=implementation,
    )

  def log_probs(rows, _, implementation):
    B, N = rows[1].shape
    path = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    return ops.token_log_probs(*rows, path, implementation=implementation)

  return {
    "rms_norm": [RowOp((x,), (draw(D),), flat(ops.rms_norm, eps=1e-5))],
    "add_rms_norm": [RowOp((x, h), (draw(D),), flat(ops.add_rms_norm, eps=1e-5))],
    "matmul": [
      RowOp((x,), (draw(D, 96),), flat(ops.matmul)),
      RowOp((draw(ROWS, 4096),), (draw(4096, 96),), flat(ops.matmul)),
      # The router's, and a head that is the embedding.
      RowOp((x,), (draw(D, E, dtype=wide),), flat(ops.matmul, out_dtype=wide)),
      RowOp((x,), (draw(V, D),), flat(ops.matmul, out_dtype=wide, by_feature=True)),
    ],
    "matmul_chain": [
      RowOp((x,), swiglu, chain("gated_matmul", "matmul")),
      RowOp((x,), queries_of, chain("matmul", "rms_norm", "matmul", "head_matmul")),
      RowOp(
        (draw(ROWS, H * R), h), output, chain("head_matmul", "matmul", "add_rms_norm")
      ),
    ],
    "routed_experts": [
      RowOp(routed, (gate_up, down), flat(ops.routed_experts)),
      RowOp(
        routed,
        (np.moveaxis(gate_up, 0, 1), down),
        flat(ops.routed_experts, experts_axis=1),
      ),
      RowOp(routed, tiles, flat(ops.routed_experts)),
    ],
    "tree_attention": [RowOp((queries, keys), draw(256, R + P), by_sequence(attend))],
    "rope_keys": [
      RowOp(
        (keys, positions),
        draw(R),
        by_sequence(
          lambda rows, w, i: ops.rope_keys(
            rows[0], w, rows[1], *table, eps=1e-6, implementation=i, **angles
          )
        ),
      )
    ],
    "rope_queries": [
      RowOp(
        (draw(ROWS, H, R), draw(ROWS, H, C + P), positions),
        (),
        by_sequence(
          lambda rows, _, i: ops.rope_queries(*rows, *table, implementation=i, **angles)
        ),
      )
    ],
    "route": [
      RowOp(
        (draw(ROWS, E, dtype=wide),),
        (draw(E, dtype=wide),),
        flat(ops.route, k=3, scoring="sigmoid"),
      )
    ],
    "best_token": [RowOp((logits,), (), flat(ops.best_token))],
    "token_log_probs": [
      RowOp(
        (logits, rng.integers(0, V, ROWS).astype(np.int32)), (), by_sequence(log_probs)
      )
    ],
  }


@dataclasses.dataclass(frozen=True)
class Embedding:
  """Where a few live rows stand: in one of `batch` sequences, among `rows` slots.

  Everything else is random: the other slots' tokens and parents, the other
  sequences' lengths and caches.
  """

  rows: int
  batch: int
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class LiveRows:
  """A tree that hangs on a text of random latents.

  Attributes:
    tokens, parents: of its slots, the root first.
    context: [layers, S, R + P] latents.
    length: how many of them are committed.
  """

  tokens: tuple[int, ...]
  parents: tuple[int, ...]
  context: np.ndarray
  length: int

  @classmethod
  def create(cls, target: Target, length: int, capacity: int = 512) -> LiveRows:
    config, rng = target.config, np.random.default_rng(length)
    parents = (NO_PARENT, 0, 0, 1, 3, 2)
    tokens = tuple(rng.integers(0, config.vocab_size, len(parents)).tolist())
    shape = (config.num_hidden_layers, capacity, config.cache_width)
    return cls(tokens, parents, rng.normal(size=shape).astype(target.dtype), length)


def step_outputs(
  target: Target, live: LiveRows, place: Embedding, implementation: str
) -> dict[str, np.ndarray]:
  """What each op of `verify_step` gives for the live rows, in the order of the calls.

  Returns:
    by "number name", and at last the "logits": [live rows, ...]; of the first so many
    live rows as there are slots.
  """
  tree, cache, sequence, slots = _embedded(target, live, place)
  static, arrays = modules.split(target)
  names: list[str] = []

  def step(arrays, tree, cache):
    model = modules.merge(static, arrays)
    with _recorded() as found:
      logits, _, _ = verify_step(model, cache, tree, (), implementation)
    ours = [(op, x) for op, out in found for x in jax.tree.leaves(out)]
    ours = [(op, x) for op, x in ours if op not in NOT_OF_ROWS]
    ours.append(("logits", logits))
    names.extend(f"{i} {op}" for i, (op, _) in enumerate(ours))
    return [_of_rows(x, place)[sequence, slots] for _, x in ours]

  # As the programs of decoding are compiled.
  platforms = {d.platform for x in jax.tree.leaves(arrays) for d in x.devices()}
  options = dict(modules.SAME_SUMS_OPTIONS) if "gpu" in platforms else None
  compiled = jax.jit(step).lower(arrays, tree, cache).compile(compiler_options=options)
  outputs = jax.device_get(compiled(arrays, tree, cache))
  return dict(zip(names, outputs, strict=True))


def first_difference(
  want: dict[str, np.ndarray], have: dict[str, np.ndarray]
) -> str | None:
  """The first op whose bits differ in the rows that both have; None if none does."""
  assert list(want) == list(have)
  for name, x in want.items():
    count = min(len(x), len(have[name]))
    rows = _differing_rows(x[:count], have[name][:count])
    if len(rows):
      return f"{name}: live rows {rows.tolist()}"
  return None


@contextlib.contextmanager
def _recorded() -> Iterator[list[tuple[str, Any]]]:
  """The outputs of the ops that are traced meanwhile; not of ops within ops."""
  found: list[tuple[str, Any]] = []
  real, depth = _implementation.dispatch, 0

  def dispatch(op: str, *arguments: Any) -> Any:
    nonlocal depth
    depth += 1
    try:
      out = real(op, *arguments)
    finally:
      depth -= 1
    if depth == 0:
      found.append((op, out))
    return out

  _implementation.dispatch = dispatch
  try:
    yield found
  finally:
    _implementation.dispatch = real


def _embedded(
  target: Target, live: LiveRows, place: Embedding
) -> tuple[Tree, LatentCache, int, np.ndarray]:
  """The trees and caches, the live rows' sequence, and their slots."""
  B, N = place.batch, place.rows
  rng = np.random.default_rng((B, N, place.seed))
  count = min(N, len(live.tokens))
  sequence = int(rng.integers(B))
  others = np.sort(rng.choice(np.arange(1, N), count - 1, replace=False))
  slots = np.concatenate([[0], others]).astype(int)
  tokens = rng.integers(0, target.config.vocab_size, (B, N)).astype(np.int32)
  parents = (rng.random((B, N)) * np.arange(N)).astype(np.int32)
  parents[:, 0] = NO_PARENT
  tokens[sequence, slots] = live.tokens[:count]
  ours = [slots[p] if p >= 0 else p for p in live.parents[:count]]
  parents[sequence, slots] = ours
  depths = np.zeros((B, N), np.int32)
  for slot in range(1, N):
    above = np.take_along_axis(depths, parents[:, slot, None], axis=1)
    depths[:, slot] = above[:, 0] + 1
  data = rng.normal(size=(live.context.shape[0], B, *live.context.shape[1:]))
  data = data.astype(live.context.dtype)
  data[:, sequence] = live.context
  lengths = rng.integers(1, live.length, B).astype(np.int32)
  lengths[sequence] = live.length
  tree = Tree(
    token_ids=jnp.asarray(tokens),
    parents=jnp.asarray(parents),
    depths=jnp.asarray(depths),
    log_probs=jnp.zeros((B, N), jnp.float32),
    size=jnp.full((B,), N, jnp.int32),
  )
  return tree, LatentCache(jnp.asarray(data), jnp.asarray(lengths)), sequence, slots


def _of_rows(x: jax.Array, place: Embedding) -> jax.Array:
  """[B, N, ...], of an op's output with these axes or with one of B * N."""
  axes = (place.batch, place.rows)
  if x.shape[:2] == axes:
    return x
  assert x.shape[0] == place.batch * place.rows, x.shape
  return x.reshape(*axes, *x.shape[1:])


def _take(rows: Any, start: int, stop: int) -> Any:
  return jax.tree.map(lambda x: x[start:stop], rows)


def _differing_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape)
  x, y = (np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}") for a in (x, y))
  return np.flatnonzero((x != y).reshape(len(x), -1).any(axis=1))
