"""The target: a DeepSeek-V3 / Kimi K2.x decoder in Flax NNX.

The module holds parameters (and the RoPE table) and nothing else. Two forms of
the forward pass exist: `step` runs rows of a draft tree over the latent cache
and is the only form that decoding uses, whatever the method; `sequence` runs
whole sequences without a cache, for training and scoring.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.attention import MLA
from kdtree_jax.model.layers import Linear, RMSNorm, SwiGLU, normal
from kdtree_jax.model.moe import MoE, Routing
from kdtree_jax.ops.matmul import matmul
from kdtree_jax.ops.matmul_chain import matmul_chain
from kdtree_jax.ops.norm import add_rms_norm
from kdtree_jax.reference.rope import rope_table


class RopeTable(nnx.Variable):
  """cos or sin per position: a constant that travels with the parameters."""


class Block(nnx.Module):
  """Pre-norm block: `h += attention(norm(h)); h += ffn(norm(h))`."""

  def __init__(
    self,
    config: ModelConfig,
    layer: int,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    int4_experts: bool = False,
  ):
    D, eps = config.hidden_size, config.rms_norm_eps
    self.input_layernorm = RMSNorm(D, eps, dtype)
    self.self_attn = MLA(config, dtype, rngs)
    self.post_attention_layernorm = RMSNorm(D, eps, dtype)
    self.mlp: MoE | SwiGLU
    if config.is_moe_layer(layer):
      self.mlp = MoE(config, dtype, rngs, int4_experts)
    else:
      self.mlp = SwiGLU(D, config.intermediate_size, dtype, rngs)

  def ffn(self, h: jax.Array) -> tuple[jax.Array, Routing | None]:
    """`h + mlp(norm(h))`, and the routing where the layer is a mixture.

    For whole sequences; decoding goes through `step`.
    """
    x = self.post_attention_layernorm(h)
    if isinstance(self.mlp, MoE):
      out, routing = self.mlp(x, training=True)
      return h + out, routing
    return h + self.mlp(x), None

  def after_attention(
    self, h: jax.Array, attended: jax.Array, implementation: str
  ) -> tuple[jax.Array, jax.Array]:
    """Attention's last products, the residual sum and its norm.

    Args:
      h: [B, N, D] residual stream before attention is added, f32 or bf16.
      attended: [B, N, H, R] latents that attention gave, of the same dtype.
      implementation: of the ops.

    Returns:
      (`h` with what attention adds to it, what the MLP takes), both [B, N, D].
    """
    rows = attended.reshape(*h.shape[:-1], -1)
    steps = self.self_attn.output_steps()
    norm = self.post_attention_layernorm.step_after_sum(h)
    *_, h, x = matmul_chain(rows, (*steps, norm), implementation)
    return h, x

  def step_ffn(
    self, h: jax.Array, attended: jax.Array, implementation: str
  ) -> tuple[jax.Array, jax.Array]:
    """A decode step's second half, behind attention.

    Args:
      h, attended, implementation: as in `after_attention`.

    Returns:
      (`h` with what attention adds to it [B, N, D], what the MLP adds [B, N, D]).
    """
    h, x = self.after_attention(h, attended, implementation)
    if isinstance(self.mlp, MoE):
      return h, self.mlp(x, implementation=implementation)[0]
    return h, self.mlp(x, implementation)


class Target(nnx.Module):
  """The language model that is decoded.

  Attributes:
    config: its ModelConfig.
    dtype: of activations and parameters, float32 or bfloat16.
    fingerprint: identifies the exact weights, or None where they are random or
      in training. A drafter is bonded to one fingerprint.
    int4_experts: whether the routed experts are int4, see `Int4Weight`.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    dtype: jnp.dtype = jnp.float32,
    rngs: nnx.Rngs,
    fingerprint: str | None = None,
    int4_experts: bool = False,
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.fingerprint = fingerprint
    self.int4_experts = int4_experts
    V, D = config.vocab_size, config.hidden_size
    self.embed_tokens = nnx.Param(normal(rngs, (V, D), D, dtype))
    layers = range(config.num_hidden_layers)
    self.layers = nnx.List(
      [Block(config, i, dtype, rngs, int4_experts) for i in layers]
    )
    self.norm = RMSNorm(D, config.rms_norm_eps, dtype)
    if not config.tie_word_embeddings:
      self.lm_head = Linear(D, V, dtype, rngs)
    self.set_rope_tables()

  def set_rope_tables(self) -> None:
    """Fills the cos and sin tables from the config."""
    c = self.config
    cos, sin = rope_table(
      c.qk_rope_head_dim,
      c.max_position_embeddings,
      c.rope_theta,
      c.rope_scaling,
      c.rope_angle_dtype,
      c.rope_amplitude,
    )
    self.cos = RopeTable(jnp.asarray(cos))
    self.sin = RopeTable(jnp.asarray(sin))

  def embed(self, tokens: jax.Array) -> jax.Array:
    """i32 [...] -> [..., D] in `dtype`."""
    return self.embed_tokens[...][tokens]

  def head(self, hidden: jax.Array, implementation: str = "xla") -> jax.Array:
    """Normed hidden states [..., D] -> f32 logits [..., V]."""
    tied = self.config.tie_word_embeddings
    kernel = self.embed_tokens if tied else self.lm_head.kernel
    return matmul(
      hidden, kernel[...], implementation, out_dtype=jnp.float32, by_feature=tied
    )

  def step(
    self,
    tokens: jax.Array,
    ancestors: jax.Array,
    depths: jax.Array,
    cache_data: jax.Array,
    lengths: jax.Array,
    *,
    feature_layers: Sequence[int] = (),
    implementation: str = "auto",
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One forward pass over the rows of a draft tree.

    Args:
      tokens: i32 [B, N] token of each node.
      ancestors: i32 [B, N, A] slot of the ancestor-or-self at each depth.
      depths: i32 [B, N]; node n sits at absolute position lengths + depths[n].
      cache_data: [layers, B, S, R + P] committed rows.
      lengths: i32 [B] committed tokens.
      feature_layers: layers after which the residual stream is tapped.
      implementation: of the ops.

    Returns:
      (hidden [B, N, D] after the final norm, features [B, N, taps * D], tree
      keys [layers, B, N, R + P]). `head(hidden)` gives the logits.
    """
    positions = lengths[:, None] + depths
    cos, sin = self.cos[...], self.sin[...]
    h = self.embed(tokens)
    added = None  # What the layer before adds to h.
    tapped, keys = {}, []
    for i, block in enumerate(self.layers):
      with jax.named_scope(f"layer_{i}"):
        h, x = _normed(block.input_layernorm, h, added, implementation)
        if i - 1 in feature_layers:
          tapped[i - 1] = h
        attended, layer_keys = block.self_attn(
          x,
          positions,
          cos,
          sin,
          cache_data,
          i,
          ancestors,
          depths,
          lengths,
          implementation,
        )
        h, added = block.step_ffn(h, attended, implementation)
      # Whether a layer is tapped must not change how it is compiled, or plain
      # decoding (no taps) and speculation would differ in their last bits.
      h, added, layer_keys = jax.lax.optimization_barrier((h, added, layer_keys))
      keys.append(layer_keys)
    h, hidden = _normed(self.norm, h, added, implementation)
    if len(self.layers) - 1 in feature_layers:
      tapped[len(self.layers) - 1] = h
    return hidden, _concat([tapped[i] for i in feature_layers], h), jnp.stack(keys)

  def sequence(
    self,
    tokens: jax.Array,
    *,
    feature_layers: Sequence[int] = (),
    flash: bool = False,
  ) -> tuple[jax.Array, jax.Array, list[Routing]]:
    """Whole sequences from position 0, causal, without a cache.

    Args:
      tokens: i32 [B, T].
      feature_layers: as in `step`.
      flash: as in `MLA.expanded`.

    Returns:
      (hidden [B, T, D] after the final norm, features [B, T, taps * D], the
      routing of each MoE layer).
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos, sin = self.cos[...], self.sin[...]
    h = self.embed(tokens)
    tapped, routings = {}, []
    for i, block in enumerate(self.layers):
      with jax.named_scope(f"layer_{i}"):
        out, _ = block.self_attn.expanded(
          block.input_layernorm(h), positions, cos, sin, flash
        )
        h, routing = block.ffn(h + out)
      if routing is not None:
        routings.append(routing)
      if i in feature_layers:
        tapped[i] = h
    return self.norm(h), _concat([tapped[i] for i in feature_layers], h), routings


def _normed(
  norm: RMSNorm, h: jax.Array, added: jax.Array | None, implementation: str
) -> tuple[jax.Array, jax.Array]:
  """(h + added, its norm), both [B, N, D]; `added` is None before the first layer."""
  if added is None:
    return h, norm(h, implementation)
  return add_rms_norm(h, added, norm.weight[...], norm.eps, implementation)


def _concat(features: list[jax.Array], like: jax.Array) -> jax.Array:
  if not features:
    return jnp.zeros((*like.shape[:-1], 0), like.dtype)
  return jnp.concatenate(features, axis=-1)
