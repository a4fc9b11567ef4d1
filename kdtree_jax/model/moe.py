"""Mixture of experts: router, routed experts, shared experts.

Router: DeepSeek-V3's "noaux_tc" (arXiv 2412.19437, section 2.1.2) and the older
softmax router, in true fp32. Expert outputs are combined in fp32 in top-k slot
order with one cast, so a token's result does not depend on its neighbours.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.layers import SwiGLU, normal, silu_times
from kdtree_jax.ops.grouped_matmul import grouped_matmul
from kdtree_jax.ops.matmul import einsum, matmul
from kdtree_jax.ops.route import route

# Up to this many experts it is cheaper on every device to run them all on every
# row than to group rows by expert (the weights are read anyway).
DENSE_EXPERTS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Where tokens go. The shape letter k is num_experts_per_tok."""

  experts: jax.Array  # i32 [T, k] expert ids, best first
  weights: jax.Array  # f32 [T, k] combine weights
  scores: jax.Array  # f32 [T, n_routed_experts] before the correction bias


class Router(nnx.Module):
  """Chooses experts per token; kernel and correction bias stay in fp32."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    E = config.n_routed_experts
    self.kernel = nnx.Param(
      normal(rngs, (config.hidden_size, E), config.hidden_size, jnp.float32)
    )
    if config.topk_method == "noaux_tc":
      self.e_score_correction_bias = CorrectionBias(jnp.zeros((E,), jnp.float32))

  def __call__(self, x: jax.Array, implementation: str = "auto") -> Routing:
    """x: [T, D] in any dtype."""
    c = self.config
    logits = matmul(x.astype(jnp.float32), self.kernel[...])
    chooses_by_bias = c.topk_method == "noaux_tc"
    return Routing(
      *route(
        logits,
        self.e_score_correction_bias[...] if chooses_by_bias else None,
        k=c.num_experts_per_tok,
        scoring=c.scoring_func,
        n_group=c.n_group if chooses_by_bias else 1,
        topk_group=c.topk_group if chooses_by_bias else 1,
        norm_topk_prob=c.norm_topk_prob,
        scaling=c.routed_scaling_factor,
        implementation=implementation,
      )
    )


class CorrectionBias(nnx.Variable):
  """The router's selection bias: moved by load, never by a gradient."""


class Experts(nnx.Module):
  """The routed experts of one layer.

  `gate_up` is [D, E, 2F] where all experts run on every row (one flat product),
  [E, D, 2F] where rows are grouped by expert; `down` is [E, F, D].
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.config = config
    E, D = config.n_routed_experts, config.hidden_size
    F = config.moe_intermediate_size
    shape = (D, E, 2 * F) if self.dense else (E, D, 2 * F)
    self.gate_up = nnx.Param(normal(rngs, shape, D, dtype))
    self.down = nnx.Param(normal(rngs, (E, F, D), F, dtype))

  @property
  def dense(self) -> bool:
    return self.config.n_routed_experts <= DENSE_EXPERTS

  def __call__(self, x: jax.Array, routing: Routing) -> jax.Array:
    """x [T, D] -> [T, D]: sum over slots of weight * expert(x), one cast."""
    if not self.dense:
      outputs = self._grouped(x, routing)
    elif x.shape[0] == 1:
      outputs = self._one_row(x, routing)
    else:
      outputs = self._all(x, routing)
    total = jnp.zeros(x.shape, jnp.float32)
    for slot in range(self.config.num_experts_per_tok):
      weight = routing.weights[:, slot, None]
      total = total + outputs[:, slot].astype(jnp.float32) * weight
    return total.astype(x.dtype)

  def _all(self, x: jax.Array, routing: Routing) -> jax.Array:
    """Every expert on every row; the chosen outputs [T, k, D] are picked after."""
    T, D = x.shape
    E, F = self.config.n_routed_experts, self.config.moe_intermediate_size
    h = matmul(x, self.gate_up[...].reshape(D, -1)).reshape(T, E, 2 * F)
    h = silu_times(h[..., :F], h[..., F:])
    out = einsum("tef,efd->etd", h, self.down[...], x.dtype)
    return out[routing.experts, jnp.arange(T)[:, None]]

  def _one_row(self, x: jax.Array, routing: Routing) -> jax.Array:
    """Reads the weights of the chosen experts only: [1, D] -> [1, k, D]."""
    F = self.config.moe_intermediate_size
    outputs = []
    for slot in range(self.config.num_experts_per_tok):
      expert = routing.experts[0, slot]
      gate_up = jax.lax.dynamic_index_in_dim(self.gate_up[...], expert, 1, False)
      down = jax.lax.dynamic_index_in_dim(self.down[...], expert, 0, False)
      h = matmul(x, gate_up)
      outputs.append(matmul(silu_times(h[:, :F], h[:, F:]), down))
    return jnp.stack(outputs, axis=1)

  def _grouped(self, x: jax.Array, routing: Routing) -> jax.Array:
    """Rows sorted by expert, one grouped product each way: -> [T, k, D]."""
    T, D = x.shape
    k, F = self.config.num_experts_per_tok, self.config.moe_intermediate_size
    flat = routing.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=self.config.n_routed_experts)
    sizes = sizes.astype(jnp.int32)
    h = grouped_matmul(x[order // k], self.gate_up[...], sizes)
    h = silu_times(h[:, :F], h[:, F:])
    out = grouped_matmul(h, self.down[...], sizes)
    return jnp.zeros_like(out).at[order].set(out).reshape(T, k, D)

  def training_form(self, x: jax.Array, routing: Routing) -> jax.Array:
    """All experts as two flat products, unselected ones weighted by zero.

    The sum over experts happens inside the product, in expert order: cheap and
    differentiable, but not the combine order of decoding.
    """
    T, D = x.shape
    E, F = self.config.n_routed_experts, self.config.moe_intermediate_size
    gate_up = self.gate_up[...]
    if not self.dense:
      gate_up = jnp.swapaxes(gate_up, 0, 1)
    h = matmul(x, gate_up.reshape(D, -1)).reshape(T, E, 2 * F)
    h = silu_times(h[..., :F], h[..., F:])
    one_hot = jax.nn.one_hot(routing.experts, E, dtype=jnp.float32)
    gate = jnp.einsum("tke,tk->te", one_hot, routing.weights).astype(x.dtype)
    return matmul((h * gate[..., None]).reshape(T, -1), self.down[...].reshape(-1, D))


class MoE(nnx.Module):
  """Routed experts plus the shared experts (one SwiGLU, weight 1)."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.config = config
    self.gate = Router(config, rngs)
    self.experts = Experts(config, dtype, rngs)
    if config.n_shared_experts:
      inner = config.n_shared_experts * config.moe_intermediate_size
      self.shared_experts = SwiGLU(config.hidden_size, inner, dtype, rngs)

  def __call__(self, x: jax.Array, training: bool = False) -> tuple[jax.Array, Routing]:
    """x [..., D] -> (same shape, the routing of the flattened rows)."""
    rows = x.reshape(-1, x.shape[-1])
    routing = self.gate(rows)
    run = self.experts.training_form if training else self.experts
    out = run(rows, routing)
    if self.config.n_shared_experts:
      out = out + self.shared_experts(rows)
    return out.reshape(x.shape), routing
