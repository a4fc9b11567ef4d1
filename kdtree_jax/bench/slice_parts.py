"""Times of the target's parts in one verify step, and where its rows are routed.

Each part is a chain of calls in one program (see `timing`), one call per layer on that
layer's weights, inputs and routing, as a step over a random tree has them. So what a
call reads is not in a cache, and no call repeats the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.bench.kernel_inputs import random_tree
from kdtree_jax.bench.rounds import Effort, Start
from kdtree_jax.bench.timing import Chain, add_zero, measure
from kdtree_jax.decoding import modules
from kdtree_jax.model.moe import MoE, Routing
from kdtree_jax.model.target import Target
from kdtree_jax.ops.ancestors import ancestors
from kdtree_jax.ops.tree_attention import tree_attention
from kdtree_jax.tree import Tree

MOST_LAYERS = 4  # Calls of a chain.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
  """What the parts of one layer take in a step of N rows of one sequence.

  Attributes:
    attention: [1, N, D] normed rows before attention.
    ffn: [N, D] normed rows after it.
    routing: of these rows, None in a dense layer.
    layer: which layer.
  """

  attention: jax.Array
  ffn: jax.Array
  routing: Routing | None
  layer: int = dataclasses.field(metadata={"static": True})


class LayerParts:
  """The parts of a step over a random tree.

  Args:
    start: models, and the state whose context the tree stands behind.
    budget: tree nodes without the root.
    rows: of the step.
    implementation: of the ops.
    effort: how much to measure.
    seed: of the tree's tokens.
  """

  def __init__(
    self,
    start: Start,
    budget: int,
    rows: int,
    implementation: str,
    effort: Effort,
    seed: int = 0,
  ):
    self._effort, self._implementation = effort, implementation
    self._static, self._arrays = modules.split(start.target)
    self._config, self._cache = start.target.config, start.state.cache
    self._dtype = start.target.dtype
    self.nodes = nodes = 1 + budget
    parents, depths = random_tree(nodes, seed=nodes)
    self.depths = [int(depth) for depth in depths]
    tokens = np.random.default_rng(seed).integers(0, self._config.vocab_size, nodes)

    def padded(values: Any, filler: int) -> jax.Array:
      return jnp.asarray(np.pad(values, (0, rows - nodes), constant_values=filler))[
        None
      ]

    self._tree = Tree(
      token_ids=padded(tokens.astype(np.int32), 0),
      parents=padded(parents, -1),
      depths=padded(depths, 0),
      log_probs=jnp.zeros((1, rows), jnp.float32),
      size=jnp.full((1,), nodes, jnp.int32),
    )
    table = jax.jit(lambda tree: ancestors(tree, rows - 1, implementation="xla"))
    self._place = (table(self._tree), self._tree.depths, self._cache.lengths)
    trace = jax.jit(self._trace)
    self._inputs: list[LayerInputs] = trace(
      self._arrays, self._cache.data, self._place, self._tree.token_ids
    )

  @property
  def routed(self) -> list[np.ndarray]:
    """For each sparse layer, i32 [rows, k]: experts of each row."""
    found = [x.routing for x in self._inputs if x.routing is not None]
    return [np.asarray(routing.experts) for routing in found]

  def distinct(self, live: bool = True) -> list[int]:
    """For each sparse layer, how many experts its (live) rows are routed to."""
    count = self.nodes if live else None
    return [len(np.unique(experts[:count])) for experts in self.routed]

  def finite(self) -> bool:
    """Whether all hidden states that went into a layer's parts are finite."""
    rows = [x.ffn for x in self._inputs]
    return all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in rows)

  def measure(self, link_us: float) -> dict[str, float]:
    """Microseconds per step of each part that a layer has, and of the head.

    Args:
      link_us: of a chain's call that does nothing; it is taken off each call.
    """
    layers = len(self._inputs)
    sparse = [x for x in self._inputs if x.routing is not None]
    dense = [x for x in self._inputs if x.routing is None]

    def time(part, inputs, count, shared=(), small=False) -> float:
      return count * max(self._time(part, inputs, small, *shared) - link_us, 0.0)

    c, rows = self._config, self._tree.rows
    shape = (1, rows, c.num_attention_heads, c.cache_width)
    queries = jax.random.normal(jax.random.key(4), shape, self._dtype)
    behind = (self._cache.data, self._place)
    whole = time(self._attention_whole, self._inputs[::-1], layers, behind)
    alone = time(
      self._attention_alone, self._inputs[::-1], layers, (*behind, queries), small=True
    )
    times = {"projections": whole - alone, "attention": alone}
    times["router"] = time(self._router, sparse, len(sparse), small=True)
    times["experts"] = time(self._experts, sparse, len(sparse))
    times["shared"] = 0.0
    if self._config.n_shared_experts:
      times["shared"] = time(self._shared, sparse, len(sparse), small=True)
    times["dense"] = time(self._dense, dense, len(dense)) if dense else 0.0
    times["head"] = time(self._head, self._inputs[:2], 1)
    return times

  def _time(
    self,
    part: Callable[..., Any],
    inputs: Sequence[LayerInputs],
    small: bool,
    *shared: Any,
  ) -> float:
    """Microseconds of one call of `part(arrays, *shared, layer's inputs)`."""
    inputs = inputs[:MOST_LAYERS]
    calls = max(2, len(inputs))
    repeats = self._effort.repeats * 2 if small else max(self._effort.repeats // 5, 1)
    chain = Chain(
      part,
      inputs,
      calls=calls,
      link=_link,
      shared=(self._arrays, *shared),
      repeats=repeats,
    )
    effort = self._effort
    return measure({"": chain}, runs=effort.runs, seconds=effort.seconds)[""].us

  def _target(self, arrays: Any) -> Target:
    return modules.merge(self._static, arrays)

  def _mlp(self, arrays: Any, inputs: LayerInputs) -> Any:
    """A layer's MoE, or its SwiGLU where it is dense."""
    return self._target(arrays).layers[inputs.layer].mlp

  def _trace(self, arrays, data, place, tokens) -> list[LayerInputs]:
    """A step of the target, layer by layer, that keeps what the parts take."""
    target = self._target(arrays)
    h = target.embed(tokens)
    kept = []
    form = self._implementation
    for layer, block in enumerate(target.layers):
      x = block.input_layernorm(h, form)
      attended, _ = self._attend(target, x, layer, data, place)
      _, rows = block.after_attention(h, attended, form)
      rows = rows.reshape(-1, h.shape[-1])
      routing = None
      if isinstance(block.mlp, MoE):
        routing = block.mlp.gate(rows, form)
      kept.append(LayerInputs(x, rows, routing, layer))
      h, added = block.step_ffn(h, attended, form)
      h = h + added
    return kept

  def _attend(self, target: Target, x, layer: int, data, place):
    table, depths, lengths = place
    return target.layers[layer].self_attn(
      x,
      lengths[:, None] + depths,
      target.cos[...],
      target.sin[...],
      data,
      layer,
      table,
      depths,
      lengths,
      self._implementation,
    )

  # The parts.

  def _attention_whole(self, arrays, data, place, inputs: LayerInputs):
    """Projections, attention, and the norm behind them together."""
    target = self._target(arrays)
    attended, keys = self._attend(target, inputs.attention, inputs.layer, data, place)
    block = target.layers[inputs.layer]
    return block.after_attention(inputs.attention, attended, self._implementation), keys

  def _attention_alone(self, arrays, data, place, queries, inputs: LayerInputs):
    """The same without projections and RoPE; values do not matter to its time."""
    c = self._config
    return tree_attention(
      queries,
      data,
      inputs.attention[..., : c.cache_width],
      *place,
      scale=c.softmax_scale,
      value_dim=c.kv_lora_rank,
      layer=inputs.layer,
      max_positions=c.max_position_embeddings,
      implementation=self._implementation,
    )

  def _router(self, arrays, inputs: LayerInputs):
    gate = self._mlp(arrays, inputs).gate
    return gate(inputs.ffn, self._implementation)

  def _experts(self, arrays, inputs: LayerInputs):
    experts = self._mlp(arrays, inputs).experts
    return experts(inputs.ffn, inputs.routing, self._implementation)

  def _shared(self, arrays, inputs: LayerInputs):
    shared = self._mlp(arrays, inputs).shared_experts
    return shared(inputs.ffn, self._implementation)

  def _dense(self, arrays, inputs: LayerInputs):
    return self._mlp(arrays, inputs)(inputs.ffn, self._implementation)

  def _head(self, arrays, inputs: LayerInputs):
    return self._target(arrays).head(inputs.ffn, self._implementation)


def _link(inputs: LayerInputs, zero: jax.Array) -> LayerInputs:
  """The rows wait for `zero`."""
  return dataclasses.replace(
    inputs,
    attention=add_zero(inputs.attention, zero),
    ffn=add_zero(inputs.ffn, zero),
  )
