"""DFlash, the block-diffusion drafter (arXiv 2602.06036; z-lab/dflash).

A few Qwen3-style layers denoise a block [anchor, MASK, ..., MASK] in one pass.
They read the target through one feature per committed token: the residual
streams after some target layers, projected and normed. That feature becomes
extra keys and values in every layer (K/V injection), so the context needs
neither queries nor an MLP, and its keys and values can be cached for good.
Embedding and head are the target's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kdtree_jax.config import ConfigError, DrafterConfig
from kdtree_jax.drafter.attention import cached_attention, dense_attention
from kdtree_jax.drafter.layers import MLP, Linear, rotate
from kdtree_jax.model.layers import RMSNorm
from kdtree_jax.model.placement import Placement, empty, put
from kdtree_jax.model.rounding import copy_rounded
from kdtree_jax.reference.rope import rope_table

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DFlashState:
  """Context keys and values of every layer, and the RoPE table they use.

  Rows at and beyond a sequence's length hold leftovers, which nothing reads.

  Attributes:
    keys: [layers, B, S, K, P] keys after `k_norm` and RoPE, by position.
    values: [layers, B, S, K, P].
    cos: f32 [S + block_size, P / 2], by position. The table is part of the
      state because a constant of its size would bloat the compiled program.
    sin: f32 [S + block_size, P / 2].
  """

  keys: jax.Array  # [layers, B, S, K, P]
  values: jax.Array  # [layers, B, S, K, P]
  cos: jax.Array  # [S + block_size, P / 2]
  sin: jax.Array  # [S + block_size, P / 2]


class Attention(nnx.Module):
  """Grouped-query attention with per-head norms before RoPE."""

  def __init__(self, config: DrafterConfig, *, dtype, rngs: nnx.Rngs):
    self.head_dim = config.head_dim
    width, head = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    self.q_proj = Linear(width, heads * head, dtype=dtype, rngs=rngs)
    self.k_proj = Linear(width, kv_heads * head, dtype=dtype, rngs=rngs)
    self.v_proj = Linear(width, kv_heads * head, dtype=dtype, rngs=rngs)
    self.o_proj = Linear(heads * head, width, dtype=dtype, rngs=rngs)
    self.q_norm = RMSNorm(head, config.rms_norm_eps, dtype)
    self.k_norm = RMSNorm(head, config.rms_norm_eps, dtype)

  def _heads(self, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, self.head_dim)

  def queries(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """[.., D] normed block rows -> [.., H, P]; cos and sin are [.., P / 2]."""
    return rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)

  def keys_values(
    self, x: jax.Array, cos: jax.Array, sin: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """[.., D] context features or normed block rows -> two [.., K, P]."""
    keys = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
    return keys, self._heads(self.v_proj(x))

  def output(self, heads: jax.Array) -> jax.Array:
    """[.., H, P] -> [.., D]."""
    return self.o_proj(heads.reshape(*heads.shape[:-2], -1))


class Layer(nnx.Module):
  """One pre-norm layer: attention, then SwiGLU, each with its residual."""

  def __init__(self, config: DrafterConfig, index: int, *, dtype, rngs: nnx.Rngs):
    width, eps = config.hidden_size, config.rms_norm_eps
    slides = config.layer_types[index] == "sliding_attention"
    self.window = config.sliding_window if slides else None
    self.causal = config.is_causal_layer(index)
    self.input_layernorm = RMSNorm(width, eps, dtype)
    self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
    self.post_attention_layernorm = RMSNorm(width, eps, dtype)
    self.mlp = MLP(width, config.intermediate_size, dtype=dtype, rngs=rngs)

  def __call__(
    self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend
  ) -> jax.Array:
    """[.., W, D] -> [.., W, D].

    Args:
      x: residual stream of the block.
      cos: f32 [.., W, P / 2] RoPE rows at the block's positions.
      sin: likewise.
      attend: takes the block's queries, keys and values, adds the context and
        returns [.., W, H, P].
    """
    normed = self.input_layernorm(x)
    q = self.self_attn.queries(normed, cos, sin)
    keys, values = self.self_attn.keys_values(normed, cos, sin)
    x = x + self.self_attn.output(attend(q, keys, values))
    return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nnx.Module):
  """Parameters of a DFlash drafter, and its pure functions.

  A `kdtree_jax.drafter.base.Drafter`. Computation takes the parameters' dtype.

  Args:
    config: sizes, taps and RoPE.
    dtype: of the parameters.
    rngs: source of the initial values (normal, 0.02); `nnx.Rngs(0)` if None.
  """

  def __init__(
    self,
    config: DrafterConfig,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs | None = None,
  ):
    rngs = nnx.Rngs(0) if rngs is None else rngs
    dtype = jnp.dtype(dtype)
    width, eps = config.hidden_size, config.rms_norm_eps
    taps = len(config.target_layer_ids)
    self.config = config
    self.fc = Linear(taps * config.target_hidden_size, width, dtype=dtype, rngs=rngs)
    self.hidden_norm = RMSNorm(width, eps, dtype)
    self.layers = nnx.List(
      [
        Layer(config, index, dtype=dtype, rngs=rngs)
        for index in range(config.num_hidden_layers)
      ]
    )
    self.norm = RMSNorm(width, eps, dtype)

  @property
  def max_depth(self) -> int:
    return self.config.max_depth

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return self.config.target_layer_ids

  @property
  def dtype(self) -> jnp.dtype:
    return self.fc.kernel[...].dtype

  def context_features(self, features: jax.Array) -> jax.Array:
    """`hidden_norm(fc(features))`, once per token for all layers.

    Args:
      features: [.., taps * target_hidden_size] residual streams after the layers
        `feature_layers`, concatenated in that order.

    Returns:
      [.., D] in the parameters' dtype.
    """
    return self.hidden_norm(self.fc(features))

  def init_state(self, slots: int, cache_len: int) -> DFlashState:
    """The empty context of `slots` sequences of up to `cache_len` tokens."""
    config = self.config
    shape = (
      config.num_hidden_layers,
      slots,
      cache_len,
      config.num_key_value_heads,
      config.head_dim,
    )
    cos, sin = self._rope_table(cache_len + config.block_size)
    return DFlashState(
      keys=jnp.zeros(shape, self.dtype),
      values=jnp.zeros(shape, self.dtype),
      cos=jnp.asarray(cos),
      sin=jnp.asarray(sin),
    )

  def observe(
    self,
    target: Any,
    state: DFlashState,
    tokens: jax.Array,
    features: jax.Array,
    start: jax.Array,
    count: jax.Array,
  ) -> DFlashState:
    """Adds committed tokens to the context; see `Drafter.observe`.

    Rows at and beyond `count`, or beyond the cache, are not written.
    """
    del target, tokens  # The features say all that the context needs.
    slots, size = state.keys.shape[1:3]
    rows = jnp.arange(features.shape[1])
    positions = start[:, None] + rows  # [B, T]
    cos = state.cos.at[positions].get(mode="clip")
    sin = state.sin.at[positions].get(mode="clip")
    context = self.context_features(features)
    keys, values = zip(
      *(layer.self_attn.keys_values(context, cos, sin) for layer in self.layers),
      strict=True,
    )
    # A scatter that drops what is out of bounds: the CPU backend miscompiles a
    # gather followed by dynamic_update_slice and a reshape (openxla/xla#49176).
    where = jnp.where(rows < count[:, None], positions, size)
    slot = jnp.arange(slots)[:, None]
    return dataclasses.replace(
      state,
      keys=state.keys.at[:, slot, where].set(jnp.stack(keys), mode="drop"),
      values=state.values.at[:, slot, where].set(jnp.stack(values), mode="drop"),
    )

  def draft(
    self,
    target: Any,
    state: DFlashState,
    root_tokens: jax.Array,
    lengths: jax.Array,
    sequence_ids: jax.Array | None = None,
  ) -> jax.Array:
    """One denoising pass; see `Drafter.draft`.

    Args:
      target: the target, whose embedding and head are used.
      state: the context.
      root_tokens: i32 [B], the block's first token.
      lengths: i32 [B], the root's position; at most the cache's length.
      sequence_ids: not used.

    Returns:
      f32 [B, block_size - 1, V]; row k is about position `lengths + 1 + k`.
    """
    del sequence_ids
    positions = lengths[:, None] + jnp.arange(self.config.block_size)  # [B, W]
    cos = state.cos.at[positions].get(mode="clip")
    sin = state.sin.at[positions].get(mode="clip")
    hidden = self._embed_block(target, root_tokens)
    for index, layer in enumerate(self.layers):

      def attend(q, keys, values, index=index, layer=layer):
        return cached_attention(
          q,
          keys,
          values,
          state.keys,
          state.values,
          index,
          lengths,
          window=layer.window,
          causal=layer.causal,
        )

      hidden = layer(hidden, cos, sin, attend)
    return target.head(self.norm(hidden[:, 1:]))

  def block_hidden(
    self, target: Any, features: jax.Array, tokens: jax.Array, anchors: jax.Array
  ) -> jax.Array:
    """Final hidden states of many blocks per sequence, in one pass.

    The training form of `draft`: the block at anchor a sees the context at
    positions below a and itself, so its rows are those that `draft` computes
    after observing the first a tokens.

    Args:
      target: the target, whose embedding is used.
      features: [B, T, taps * target_hidden_size], sequences from position 0.
      tokens: i32 [B, T].
      anchors: i32 [B, A] positions of the blocks' first tokens, 0 .. T - 1.

    Returns:
      [B, A, block_size - 1, D] normed hidden states, for the target's head; row
      k is about position `anchor + 1 + k`.
    """
    config = self.config
    T = tokens.shape[1]
    cos, sin = map(jnp.asarray, self._rope_table(T + config.block_size))
    positions = anchors[..., None] + jnp.arange(config.block_size)  # [B, A, W]
    block_cos, block_sin = cos[positions], sin[positions]
    context = self.context_features(features)
    hidden = self._embed_block(target, jnp.take_along_axis(tokens, anchors, axis=1))
    for layer in self.layers:
      keys, values = layer.self_attn.keys_values(context, cos[:T], sin[:T])

      # The scores are the largest arrays here, and cheap to compute again.
      @jax.checkpoint
      def attend(q, own_keys, own_values, keys=keys, values=values, layer=layer):
        return dense_attention(
          q,
          own_keys,
          own_values,
          keys,
          values,
          anchors,
          window=layer.window,
          causal=layer.causal,
        )

      hidden = layer(hidden, block_cos, block_sin, attend)
    return self.norm(hidden[:, :, 1:])

  def block_logits(
    self, target: Any, features: jax.Array, tokens: jax.Array, anchors: jax.Array
  ) -> jax.Array:
    """`target.head` of `block_hidden`: f32 [B, A, block_size - 1, V]."""
    return target.head(self.block_hidden(target, features, tokens, anchors))

  def _embed_block(self, target: Any, anchor_tokens: jax.Array) -> jax.Array:
    """[..] -> [.., W, D]: the anchor's embedding, then the mask's."""
    shape = (*anchor_tokens.shape, self.config.block_size - 1)
    masks = jnp.full(shape, self.config.mask_token_id, anchor_tokens.dtype)
    ids = jnp.concatenate([anchor_tokens[..., None], masks], axis=-1)
    return target.embed(ids).astype(self.dtype)

  def _rope_table(self, length: int) -> tuple[np.ndarray, np.ndarray]:
    config = self.config
    return rope_table(
      config.head_dim,
      length,
      config.rope_theta,
      config.rope_scaling,
      config.rope_angle_dtype,
      config.rope_amplitude,
    )

  @classmethod
  def from_state_dict(
    cls,
    config: DrafterConfig,
    state_dict: Mapping[str, np.ndarray],
    dtype: jax.typing.DTypeLike = jnp.float32,
    sharding: Placement = None,
    finite: bool = False,
  ) -> Self:
    """Builds the drafter from published weights, which are copied one by one.

    Args:
      config: the drafter's configuration.
      state_dict: the flat names of z-lab's checkpoints (`fc.weight`,
        `layers.0.self_attn.q_proj.weight`, ...), Linear weights [out, in].
        It may have a method `error(name, reason)` that gives the exception for
        values that are not finite.
      dtype: of the parameters, float32 or bfloat16; the weights are rounded to it
        once.
      sharding: where parameters go as they are built, see `load_checkpoint`.
      finite: whether weights that are NaN or infinite, or too large for `dtype`, are
        refused, as `load_checkpoint` does.

    Raises:
      ConfigError: a tensor is missing, unexpected, of another shape or not finite.
        Other drafters have other tensors, and would run and propose nonsense.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: cls(config, dtype)))
    flat = dict(nnx.to_flat_state(abstract))
    names = {_published_name(path): path for path in flat}
    missing = sorted(set(names) - set(state_dict))
    if missing:
      raise ConfigError(f"drafter weights lack {missing[0]!r} ({len(missing)} in all)")
    unexpected = sorted(set(state_dict) - set(names))
    if unexpected:
      raise ConfigError(
        f"drafter weights hold {unexpected[0]!r}, which a DFlash drafter of "
        f"{config.num_hidden_layers} layers does not have; is it another drafter?"
      )
    loaded = {}
    for name, path in names.items():
      value = np.asarray(state_dict[name])
      value = value.T if path[-1] == "kernel" else value
      if value.shape != flat[path].shape:
        raise ConfigError(
          f"drafter weight {name!r} has shape {np.shape(state_dict[name])}, which "
          f"does not fit the configuration (as [in, out]: {flat[path].shape})"
        )
      # The host's copy goes to the device, which may take it over: never a view of a
      # file, whose contents may change.
      into = empty(value.shape, jnp.dtype(dtype))
      try:
        copy_rounded(into.T, value.T, finite)  # As the published weights lie.
      except ValueError as error:
        make = getattr(state_dict, "error", None)
        if make:
          raise make(name, str(error)) from error
        raise ConfigError(f"drafter weight {name!r} {error}") from error
      array = put(".".join(map(str, path)), into, sharding)
      loaded[path] = nnx.Param(jax.block_until_ready(array))
      del value, into, array  # Before the next one is read.
    return nnx.merge(graph, nnx.from_flat_state(loaded))

  def to_state_dict(self) -> dict[str, np.ndarray]:
    """The inverse of `from_state_dict`, in the parameters' dtype."""
    out = {}
    for path, param in nnx.to_flat_state(nnx.state(self)):
      value = np.asarray(param[...])
      out[_published_name(path)] = value.T if path[-1] == "kernel" else value
    return out


def _published_name(path: tuple[Any, ...]) -> str:
  return ".".join(map(str, (*path[:-1], "weight")))
