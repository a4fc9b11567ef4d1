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
from kdtree_jax.model.layers import SwiGLU, normal
from kdtree_jax.ops._routed_experts_xla import DENSE_EXPERTS
from kdtree_jax.ops.int4_weight import GROUP_SIZE, Int4Weight, random_int4
from kdtree_jax.ops.matmul import matmul
from kdtree_jax.ops.route import route
from kdtree_jax.ops.routed_experts import routed_experts
from kdtree_jax.ops.silu import silu_times


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

  def __call__(self, x: jax.Array, implementation: str = "xla") -> Routing:
    """x: [T, D] in any dtype."""
    c = self.config
    logits = matmul(x, self.kernel[...], implementation, out_dtype=jnp.float32)
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


class Int4Tiles(nnx.Variable):
  """Tiles of an `Int4Weight`: moved by load, never by a gradient or a cast."""


class Experts(nnx.Module):
  """The routed experts of one layer.

  `gate_up` is [D, E, 2F] where all experts run on every row (one flat product),
  [E, D, 2F] where rows are grouped by expert; `down` is [E, F, D]. With `int4` both
  are the tiles of an `Int4Weight`.
  """

  def __init__(
    self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, int4: bool = False
  ):
    self.config = config
    self.int4 = int4
    E, D = config.n_routed_experts, config.hidden_size
    F = config.moe_intermediate_size
    if int4:
      for name, size in (("hidden_size", D), ("moe_intermediate_size", F)):
        if size % GROUP_SIZE:
          raise ValueError(
            f"{name} = {size} does not allow int4 experts: it must be a multiple of "
            f"{GROUP_SIZE}, the features that share a scale"
          )
      gate_up = random_int4(rngs.params(), E, D, 2 * F, True, D**-0.5)
      down = random_int4(rngs.params(), E, F, D, False, F**-0.5)
      self.gate_up, self.down = Int4Tiles(gate_up.tiles), Int4Tiles(down.tiles)
      return
    shape = (D, E, 2 * F) if self.dense else (E, D, 2 * F)
    self.gate_up = nnx.Param(normal(rngs, shape, D, dtype))
    self.down = nnx.Param(normal(rngs, (E, F, D), F, dtype))

  @property
  def dense(self) -> bool:
    """Whether `gate_up` is [D, E, 2F]."""
    return not self.int4 and self.config.n_routed_experts <= DENSE_EXPERTS

  def kernels(self) -> tuple[jax.Array, jax.Array] | tuple[Int4Weight, Int4Weight]:
    """gate_up and down as `routed_experts` takes them."""
    gate_up, down = self.gate_up[...], self.down[...]
    if not self.int4:
      return gate_up, down
    D, F = self.config.hidden_size, self.config.moe_intermediate_size
    return Int4Weight(gate_up, D, 2 * F, gated=True), Int4Weight(down, F, D)

  def __call__(
    self, x: jax.Array, routing: Routing, implementation: str = "xla"
  ) -> jax.Array:
    """x [T, D] -> [T, D]: sum over slots of weight * expert(x), one cast."""
    return routed_experts(
      x,
      routing.experts,
      routing.weights,
      *self.kernels(),
      experts_axis=int(self.dense),
      implementation=implementation,
    )

  def training_form(self, x: jax.Array, routing: Routing) -> jax.Array:
    """All experts as two flat products, unselected ones weighted by zero.

    The sum over experts happens inside the product, in expert order: cheap and
    differentiable, but not the combine order of decoding.

    Raises:
      ValueError: the weights are int4.
    """
    if self.int4:
      raise ValueError(
        "int4 experts cannot be trained: load the target with "
        "expert_dtype='dequantized'"
      )
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

  def __init__(
    self,
    config: ModelConfig,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    int4_experts: bool = False,
  ):
    self.config = config
    self.gate = Router(config, rngs)
    self.experts = Experts(config, dtype, rngs, int4_experts)
    if config.n_shared_experts:
      inner = config.n_shared_experts * config.moe_intermediate_size
      self.shared_experts = SwiGLU(config.hidden_size, inner, dtype, rngs)

  def __call__(
    self, x: jax.Array, training: bool = False, implementation: str = "xla"
  ) -> tuple[jax.Array, Routing]:
    """x [..., D] -> (same shape, the routing of the flattened rows).

    Int4 experts have one form, with `training` too: no gradient reaches them.
    """
    rows = x.reshape(-1, x.shape[-1])
    routing = self.gate(rows, implementation)
    if training and not self.experts.int4:
      out = self.experts.training_form(rows, routing)
    else:
      out = self.experts(rows, routing, implementation)
    if self.config.n_shared_experts:
      out = out + self.shared_experts(rows, implementation)
    return out.reshape(x.shape), routing
