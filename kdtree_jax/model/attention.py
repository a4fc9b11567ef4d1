"""Multi-head latent attention (MLA), absorbed for decoding, expanded for training.

Formulas: DeepSeek-V2 (arXiv 2405.04434, section 2.1) and DeepSeek-V3's published
`inference/model.py`. Absorbed, MLA is attention with one shared key of width
R + P per token, whose first R columns are also the value: that row is all that
the cache holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.layers import Linear, RMSNorm, normal
from kdtree_jax.ops.matmul import einsum
from kdtree_jax.ops.matmul_chain import Step, matmul_chain
from kdtree_jax.ops.rope import RopeFrequencies, rope
from kdtree_jax.ops.rope_rows import rope_keys, rope_queries
from kdtree_jax.ops.tree_attention import tree_attention


class MLA(nnx.Module):
  """One layer's attention.

  Shape letters: B batch, N rows, D hidden, H heads, R kv_lora_rank,
  P qk_rope_head_dim, C qk_nope_head_dim, E v_head_dim.
  """

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.config = config
    c = config
    H, R = c.num_attention_heads, c.kv_lora_rank
    if c.q_lora_rank is None:
      self.q_proj = Linear(c.hidden_size, H * c.qk_head_dim, dtype, rngs)
    else:
      self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, dtype, rngs)
      self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype)
      self.q_b_proj = Linear(c.q_lora_rank, H * c.qk_head_dim, dtype, rngs)
    self.kv_a_proj = Linear(c.hidden_size, c.cache_width, dtype, rngs)
    self.kv_a_layernorm = RMSNorm(R, c.latent_norm_eps, dtype)
    self.k_up = nnx.Param(normal(rngs, (H, c.qk_nope_head_dim, R), R, dtype))
    self.v_up = nnx.Param(normal(rngs, (H, R, c.v_head_dim), R, dtype))
    self.o_proj = Linear(H * c.v_head_dim, c.hidden_size, dtype, rngs)

  def query_steps(self) -> tuple[Step, ...]:
    """From normed hidden states [..., D] to unrotated queries [..., H * (C + P)]."""
    if self.config.q_lora_rank is None:
      return (self.q_proj.step(),)
    return (self.q_a_proj.step(), self.q_a_layernorm.step(), self.q_b_proj.step())

  def output_steps(self) -> tuple[Step, ...]:
    """From the latents of `__call__` [..., H * R] to what is added to the stream."""
    return (("head_matmul", self.v_up[...]), self.o_proj.step())

  def queries(
    self, x: jax.Array, positions: jax.Array, cos: jax.Array, sin: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """[B, N, D] -> per head the plain part [B, N, H, C] and the roped [B, N, H, P]."""
    c = self.config
    q = matmul_chain(x, self.query_steps(), "xla")[-1]
    q = q.reshape(*x.shape[:-1], c.num_attention_heads, c.qk_head_dim)
    nope, pe = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    pe = rope(
      pe,
      positions[..., None],
      cos,
      sin,
      interleave=c.rope_interleave,
      implementation="xla",
    )
    return nope, pe

  def latents(
    self,
    x: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    implementation: str,
  ) -> jax.Array:
    """[B, N, D] -> cache rows [B, N, R + P]: normed latent, roped key."""
    c = self.config
    return rope_keys(
      self.kv_a_proj(x, implementation),
      self.kv_a_layernorm.weight[...],
      positions,
      cos,
      sin,
      eps=self.kv_a_layernorm.eps,
      interleave=c.rope_interleave,
      # On CUDA the kernels form the angles; the tables serve XLA and training.
      frequencies=RopeFrequencies.of(c),
      implementation=implementation,
    )

  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: jax.Array,
    layer: int,
    ancestors: jax.Array,
    depths: jax.Array,
    lengths: jax.Array,
    implementation: str,
  ) -> tuple[jax.Array, jax.Array]:
    """Absorbed attention of tree nodes, up to the values: `output_steps` follow.

    Args:
      x: [B, N, D] normed hidden states.
      positions: i32 [B, N] absolute positions.
      cos, sin: f32 [max_position, P / 2] tables.
      cache: [layers, B, S, R + P] committed rows.
      layer: which layer this is.
      ancestors, depths, lengths: as in `tree_attention`.
      implementation: of the ops.

    Returns:
      ([B, N, H, R] latents that each head attended to, [B, N, R + P] the nodes' own
      cache rows).
    """
    c = self.config
    absorb = ("head_matmul", self.k_up[...])
    *_, q, absorbed = matmul_chain(x, (*self.query_steps(), absorb), implementation)
    q = q.reshape(*absorbed.shape[:-1], c.qk_head_dim)
    keys = self.latents(x, positions, cos, sin, implementation)
    queries = rope_queries(
      absorbed,
      q,
      positions,
      cos,
      sin,
      interleave=c.rope_interleave,
      frequencies=RopeFrequencies.of(c),
      implementation=implementation,
    )
    attended = tree_attention(
      queries,
      cache,
      keys,
      ancestors,
      depths,
      lengths,
      scale=c.softmax_scale,
      value_dim=c.kv_lora_rank,
      layer=layer,
      max_positions=c.max_position_embeddings,
      implementation=implementation,
    )
    return attended, keys

  def expanded(
    self,
    x: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    flash: bool = False,
  ) -> tuple[jax.Array, jax.Array]:
    """Causal attention of whole sequences with keys and values per head.

    The form for training and for full forwards: cheaper than the absorbed one
    from about 170 queries on, and equal to it in exact arithmetic.

    Args:
      x: [B, T, D]; positions: i32 [B, T], ascending along T.
      flash: use cuDNN's fused attention (bf16 on an NVIDIA GPU; for training).

    Returns:
      ([B, T, D] output, [B, T, R + P] cache rows).
    """
    c = self.config
    T = x.shape[1]
    nope, pe = self.queries(x, positions, cos, sin)
    rows = self.latents(x, positions, cos, sin, "xla")
    latent, k_pe = jnp.split(rows, [c.kv_lora_rank], axis=-1)
    k_nope = einsum("btr,hcr->bthc", latent, self.k_up[...], x.dtype)
    values = einsum("btr,hre->bthe", latent, self.v_up[...], x.dtype)
    q = jnp.concatenate([nope, pe], axis=-1)
    k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], k_pe.shape[-1]))
    k = jnp.concatenate([k_nope, k_pe], axis=-1)
    if flash:
      # cuDNN wants one head size for queries, keys and values.
      pad = c.qk_head_dim - c.v_head_dim
      padded = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, pad)))
      out = jax.nn.dot_product_attention(
        q, k, padded, scale=c.softmax_scale, is_causal=True, implementation="cudnn"
      )[..., : c.v_head_dim]
    else:
      s = einsum("bqhd,bkhd->bhqk", q, k) * c.softmax_scale
      s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)
      p = jax.nn.softmax(s, axis=-1).astype(x.dtype)
      out = einsum("bhqk,bkhe->bqhe", p, values, x.dtype)
    return self.o_proj(out.reshape(*x.shape[:-1], -1)), rows
