"""What a round must move and compute, part by part, and what follows from it.

Counted from shapes: every weight that a part needs read once, inputs read and outputs
written once, for the live nodes of the tree alone. Of routed experts only those that
the live nodes were routed to count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from kdtree_jax.bench.kimi_slice import bytes_of
from kdtree_jax.drafter import DFlash
from kdtree_jax.model.moe import MoE
from kdtree_jax.model.target import Target

# Parts of the target's pass; `others` are norms, residual sums and what else is left.
TARGET_PARTS = (
  "projections",
  "attention",
  "router",
  "experts",
  "shared",
  "dense",
  "head",
  "others",
)
DRAFTER_PARTS = ("draft", "observe")
LOOP_PARTS = ("build", "accept", "compact", "emit", "loop")
PARTS = TARGET_PARTS + DRAFTER_PARTS + LOOP_PARTS


@dataclasses.dataclass(frozen=True)
class Work:
  """Bytes read and written, and multiplications and additions."""

  bytes_moved: float = 0.0
  flops: float = 0.0

  def __add__(self, other: Work) -> Work:
    return Work(self.bytes_moved + other.bytes_moved, self.flops + other.flops)

  def times(self, count: float) -> Work:
    return Work(count * self.bytes_moved, count * self.flops)


@dataclasses.dataclass(frozen=True)
class Round:
  """What is known of a round besides the models.

  Attributes:
    depths: of the live nodes of its tree, the root's 0 first.
    context: committed tokens.
    distinct: for each sparse layer, experts that the live nodes were routed to.
    plain: no drafter, no tree.
  """

  depths: Sequence[int]
  context: int
  distinct: Sequence[int]
  plain: bool

  @property
  def nodes(self) -> int:
    return len(self.depths)


def round_work(target: Target, drafter: DFlash, round_: Round) -> dict[str, Work]:
  """The work of each of `PARTS` in one round of one sequence."""
  config = target.config
  N, D, V = round_.nodes, config.hidden_size, config.vocab_size
  size = target.dtype.itemsize
  rows = N * D * size  # of hidden states, once
  layers = len(target.layers)
  work: dict[str, Work] = {part: Work() for part in PARTS}
  work["attention"] = _attention(config, round_, size).times(layers)
  distinct = iter(round_.distinct)
  for block in target.layers:
    work["projections"] += _weights(block.self_attn, N, 2 * rows)
    norms = bytes_of(block.input_layernorm) + bytes_of(block.post_attention_layernorm)
    # Two norms, two residual sums: five reads, four writes.
    work["others"] += Work(norms + 9 * rows)
    if not isinstance(block.mlp, MoE):
      work["dense"] += _weights(block.mlp, N, 2 * rows)
      continue
    work["router"] += _weights(block.mlp.gate, N, rows)
    one = bytes_of(block.mlp.experts) / config.n_routed_experts
    products = 3 * D * config.moe_intermediate_size * config.num_experts_per_tok
    work["experts"] += Work(next(distinct) * one + 2 * rows, 2.0 * N * products)
    if config.n_shared_experts:
      work["shared"] += _weights(block.mlp.shared_experts, N, 2 * rows)
  logits = 4 * N * V
  work["head"] = Work(D * V * size + rows + logits, 2.0 * N * D * V)
  # The choice at each node, and the log-probabilities of the path.
  work["accept"] = Work(logits + 4 * V)
  work["compact"] = Work(2.0 * layers * config.cache_width * size)
  if not round_.plain:
    work |= _drafter_work(target, drafter, round_)
  return work


def _drafter_work(target: Target, drafter: DFlash, round_: Round) -> dict[str, Work]:
  c, V = drafter.config, target.config.vocab_size
  size = drafter.dtype.itemsize
  W, D = c.block_size, c.hidden_size
  context_only = bytes_of(drafter.fc) + bytes_of(drafter.hidden_norm)
  weights = bytes_of(drafter) - context_only
  head = D * V * size
  seen = [
    min(round_.context, c.sliding_window or round_.context)
    if kind == "sliding_attention"
    else round_.context
    for kind in c.layer_types
  ]
  width = c.num_key_value_heads * c.head_dim
  heads = c.num_attention_heads * c.head_dim
  draft = Work(
    weights + head + sum(seen) * 2 * width * size + 4 * (W - 1) * V,
    2.0 * W * (weights + head) / size + 4.0 * W * heads * (sum(seen) + W * len(seen)),
  )
  keys = sum(
    bytes_of(layer.self_attn.k_proj) + bytes_of(layer.self_attn.v_proj)
    for layer in drafter.layers
  )
  # One committed token is the least that a round has.
  observe = Work(context_only + keys, 2.0 * (context_only + keys) / size)
  return {"draft": draft, "observe": observe, "build": Work(4.0 * (W - 1) * V)}


def _attention(config: Any, round_: Round, size: int) -> Work:
  """One layer: the context and the tree's own keys read once, queries in, heads out."""
  H, width, R = config.num_attention_heads, config.cache_width, config.kv_lora_rank
  N = round_.nodes
  keys = N * round_.context + sum(depth + 1 for depth in round_.depths)
  values = (round_.context + N) * width + N * H * (width + R)
  return Work(size * values, 2.0 * (width + R) * H * keys)


def _weights(module: Any, rows: int, activations: float) -> Work:
  """Products of rows with all weights of a module."""
  arrays = jax.tree.leaves(nnx.state(module))
  return Work(bytes_of(module) + activations, 2.0 * rows * sum(x.size for x in arrays))


def expected_distinct(config: Any, nodes: int) -> float:
  """Experts per layer that nodes meet where routing is uniform and independent."""
  E = config.n_routed_experts
  return E * (1 - (1 - config.num_experts_per_tok / E) ** nodes)


# What the estimate for several GPUs supposes.
GPUS = 8
ALL_REDUCE_US = 10.0  # the least that an all-reduce of a few rows takes
LINK_BYTES_PER_SECOND = 300e9  # that an all-reduce moves, each way
SHORTEST_US = 3.0  # a kernel of its own, however little it has to do
ASSUMPTIONS = (
  f"ESTIMATE, not measured, of all layers on {GPUS} such GPUs joined by NVLink. A "
  "part's measured time is scaled by the share that one GPU keeps, so each kernel is "
  "supposed to keep its share of the floor, and by the number of layers. Cut in "
  f"{GPUS}: each routed expert, the shared expert and the dense layer (along their "
  "inner width), the heads of attention and their projections, the head's vocabulary, "
  "the drafter. Not cut: the low-rank projections, the latent cache (each GPU reads "
  "all of it), router, norms, and all that is no model's pass. No part of a layer is "
  f"shorter than {SHORTEST_US:g} us. Two all-reduces a layer, of the target and of the "
  f"drafter, each {ALL_REDUCE_US:g} us and its bytes at "
  f"{LINK_BYTES_PER_SECOND / 1e9:g} GB/s; logits are gathered at the same rate. "
  "Nothing overlaps."
)


def estimate_us(
  target: Target,
  drafter: DFlash,
  round_: Round,
  parts: Mapping[str, float],
  bytes_per_second: float,
  layers: int,
) -> dict[str, float]:
  """Microseconds per round of a model of `layers` layers on `GPUS` GPUs; a guess.

  Args:
    target: the slice that was measured.
    drafter: its drafter.
    round_: what its rounds were.
    parts: measured microseconds of `PARTS`.
    bytes_per_second: measured, of one GPU.
    layers: of the whole model, with as many leading dense ones as the slice has.

  Returns:
    By part, and "all_reduce", "gather", and the sum as "round".
  """
  config = target.config
  here, dense = len(target.layers), min(config.first_k_dense_replace, layers)
  sparse = here - dense
  attn = target.layers[0].self_attn
  cut = [attn.k_up, attn.v_up, attn.o_proj.kernel]
  cut.append((attn.q_proj if config.q_lora_rank is None else attn.q_b_proj).kernel)
  share = sum(x[...].nbytes for x in cut) / bytes_of(attn)
  split = 1 - share + share / GPUS
  counts = {
    "projections": (here, layers, split),
    "attention": (here, layers, 1 / GPUS),
    "router": (sparse, layers - dense, 1.0),
    "experts": (sparse, layers - dense, 1 / GPUS),
    "shared": (sparse, layers - dense, 1 / GPUS),
    "dense": (dense, dense, 1 / GPUS),
    "others": (here, layers, 1.0),
  }
  out: dict[str, float] = {}
  for part, (measured, wanted, kept) in counts.items():
    if not measured or not parts[part]:
      out[part] = 0.0
      continue
    one = max(parts[part], 0.0) / measured
    least = min(one, SHORTEST_US)
    if part == "attention":
      cache = round_.context * config.cache_width * target.dtype.itemsize
      least = max(least, min(one, 1e6 * cache / bytes_per_second))
    out[part] = wanted * max(one * kept, least)
  for part in ("head", *DRAFTER_PARTS):
    out[part] = parts[part] / GPUS
  for part in LOOP_PARTS:
    out[part] = parts[part]
  size, D = target.dtype.itemsize, config.hidden_size
  passes = [(layers, round_.nodes)]
  vocabulary = round_.nodes * config.vocab_size
  if not round_.plain:
    passes.append((len(drafter.layers), drafter.config.block_size))
    vocabulary += drafter.max_depth * config.vocab_size
  moved = 2 * (GPUS - 1) / GPUS  # of the bytes, by each GPU
  out["all_reduce"] = sum(
    2 * count * (ALL_REDUCE_US + 1e6 * moved * rows * D * size / LINK_BYTES_PER_SECOND)
    for count, rows in passes
  )
  gathered = 4 * vocabulary * (GPUS - 1) / GPUS
  out["gather"] = 1e6 * gathered / LINK_BYTES_PER_SECOND
  out["round"] = sum(out.values())
  return out
