"""Typed configurations of the target, the drafter, the tree and the loop.

Every class is a frozen dataclass without JAX in it, so a configuration can be
hashed, compared, passed as a static argument of `jax.jit`, and read by the
numpy reference. Model fields carry the names of Hugging Face's `config.json`
for DeepSeek-V3 and Kimi K2 (drafter fields: those of Qwen3 plus DFlash's).

Values that circulate in wrong copies (rope theta, YaRN values, norm epsilons)
have no default: a missing one is a `TypeError` from the constructor, or a
`ConfigError` that names the field when a configuration is read from a dict.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kdtree_jax._config_base import DictMixin, YarnConfig
from kdtree_jax._decode_config import DecodeConfig, TreeConfig
from kdtree_jax._validation import (
  ConfigError,
  check,
  is_integer,
  one_of,
  positive,
  positive_float32,
)

__all__ = [
  "ConfigError",
  "DecodeConfig",
  "DictMixin",
  "DrafterConfig",
  "ModelConfig",
  "TreeConfig",
  "YarnConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(DictMixin):
  """A DeepSeek-V3 / Kimi K2.x target: MLA attention and mixture of experts.

  Attributes (those that are not Hugging Face's, or that need a word):
    q_lora_rank: rank of the query's low-rank projection, or None for a plain
      `q_proj` (Moonlight, V2-Lite).
    scoring_func: "sigmoid" (V3, Kimi) or "softmax" (V2-Lite).
    topk_method: "noaux_tc" selects by score + correction bias, inside the
      best `topk_group` of `n_group` groups; "greedy" selects by score alone.
    first_k_dense_replace: number of leading layers with a dense FFN.
    rms_norm_eps: epsilon of the block norms and the final norm.
    latent_norm_eps: epsilon of `q_a_layernorm` and `kv_a_layernorm`. The
      published remote code leaves it at 1e-6 whatever `rms_norm_eps` says.
    rope_scaling: YaRN values, or None for plain RoPE.
    rope_interleave: True where features (2i, 2i+1) form a pair, as in the
      published weights; False where (i, i + half) do.
    rope_angle_dtype: "float64" (angles rounded once) or "float32" (as the
      Hugging Face code forms them).
    eos_token_id: stop tokens, several allowed.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  moe_intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  q_lora_rank: int | None
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  n_routed_experts: int
  num_experts_per_tok: int
  n_shared_experts: int
  n_group: int
  topk_group: int
  norm_topk_prob: bool
  routed_scaling_factor: float
  scoring_func: Literal["sigmoid", "softmax"]
  topk_method: Literal["noaux_tc", "greedy"]
  first_k_dense_replace: int
  rms_norm_eps: float
  latent_norm_eps: float
  rope_theta: float
  rope_scaling: YarnConfig | None
  rope_interleave: bool
  rope_angle_dtype: Literal["float64", "float32"] = "float64"
  max_position_embeddings: int
  tie_word_embeddings: bool
  moe_layer_freq: int = 1
  hidden_act: Literal["silu"] = "silu"
  attention_bias: bool = False
  bos_token_id: int | None = None
  eos_token_id: tuple[int, ...] = ()
  model_type: str = "deepseek_v3"

  def __post_init__(self) -> None:
    positive(
      self,
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_hidden_layers",
      "num_attention_heads",
      "kv_lora_rank",
      "qk_nope_head_dim",
      "qk_rope_head_dim",
      "v_head_dim",
      "max_position_embeddings",
    )
    if self.q_lora_rank is not None:
      positive(self, "q_lora_rank")
    check(
      self.qk_rope_head_dim % 2 == 0,
      "qk_rope_head_dim",
      self.qk_rope_head_dim,
      "RoPE rotates pairs, so it must be even",
    )
    check(
      self.first_k_dense_replace >= 0,
      "first_k_dense_replace",
      self.first_k_dense_replace,
      "it must be 0 or more",
    )
    if self.first_k_dense_replace < self.num_hidden_layers:
      positive(self, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
      positive(self, "n_group", "topk_group")
      check(
        self.num_experts_per_tok <= self.n_routed_experts,
        "num_experts_per_tok",
        self.num_experts_per_tok,
        f"it must not exceed n_routed_experts = {self.n_routed_experts}",
      )
      check(
        self.n_routed_experts % self.n_group == 0,
        "n_group",
        self.n_group,
        f"it must divide n_routed_experts = {self.n_routed_experts}",
      )
      check(
        self.topk_group <= self.n_group,
        "topk_group",
        self.topk_group,
        f"it must not exceed n_group = {self.n_group}",
      )
      check(
        self.topk_group * (self.n_routed_experts // self.n_group)
        >= self.num_experts_per_tok,
        "topk_group",
        self.topk_group,
        "the kept groups hold fewer experts than num_experts_per_tok",
      )
    check(
      self.n_shared_experts >= 0,
      "n_shared_experts",
      self.n_shared_experts,
      "it must be 0 or more",
    )
    one_of(self, "scoring_func", ("sigmoid", "softmax"))
    one_of(self, "topk_method", ("noaux_tc", "greedy"))
    one_of(self, "rope_angle_dtype", ("float64", "float32"))
    one_of(self, "hidden_act", ("silu",))
    one_of(self, "moe_layer_freq", (1,))
    one_of(self, "attention_bias", (False,))
    positive_float32(
      self, "rms_norm_eps", "latent_norm_eps", "routed_scaling_factor", "rope_theta"
    )
    check(
      self.rope_scaling is None or isinstance(self.rope_scaling, YarnConfig),
      "rope_scaling",
      self.rope_scaling,
      "it must be a YarnConfig or None",
    )
    if self.bos_token_id is not None:
      check(
        is_integer(self.bos_token_id) and 0 <= self.bos_token_id < self.vocab_size,
        "bos_token_id",
        self.bos_token_id,
        f"token ids run from 0 to {self.vocab_size - 1}",
      )
    check(self.rope_theta > 1, "rope_theta", self.rope_theta, "it must be > 1")
    for token in self.eos_token_id:
      check(
        0 <= token < self.vocab_size,
        "eos_token_id",
        token,
        f"token ids run from 0 to {self.vocab_size - 1}",
      )

  @property
  def qk_head_dim(self) -> int:
    return self.qk_nope_head_dim + self.qk_rope_head_dim

  @property
  def cache_width(self) -> int:
    """Values that the latent cache holds per token and layer."""
    return self.kv_lora_rank + self.qk_rope_head_dim

  @property
  def softmax_scale(self) -> float:
    """`qk_head_dim ** -0.5 * mscale ** 2`, with mscale from mscale_all_dim."""
    scale = self.qk_head_dim**-0.5
    if self.rope_scaling is not None:
      scale *= self.rope_scaling.amplitude(self.rope_scaling.mscale_all_dim) ** 2
    return scale

  @property
  def rope_amplitude(self) -> float:
    """Factor on cos and sin: `yarn(mscale) / yarn(mscale_all_dim)`."""
    yarn = self.rope_scaling
    if yarn is None:
      return 1.0
    return yarn.amplitude(yarn.mscale) / yarn.amplitude(yarn.mscale_all_dim)

  def is_moe_layer(self, layer: int) -> bool:
    return layer >= self.first_k_dense_replace


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(DictMixin):
  """A DFlash block-diffusion drafter (arXiv 2602.06036).

  Attributes (those that are not Qwen3's, or that need a word):
    block_size: rows of one drafter pass: the anchor and `block_size - 1` masks.
    mask_token_id: token whose embedding fills the masked rows.
    target_layer_ids: taps; layer l means the residual stream after layer l.
    num_target_layers: layers of the target that the taps refer to.
    target_hidden_size: hidden size of the target.
    layer_types: per layer, "full_attention" or "sliding_attention".
    sliding_window: a sliding layer sees keys with |query - key| < window, on
      both sides, the block included. None where no layer slides.
    causal: layers whose rows do not see the rows of the block after them: "none",
      "sliding" layers, or "all". Trainers differ, and files may not say it: those of
      Kimi-K2.6-DFlash are of the first kind, those of Gemma 4 of the second.
    rope_amplitude: factor on cos and sin (1.0 as in Hugging Face for
      mscale == mscale_all_dim; a legacy server uses 1 + 0.1 ln(factor)).
    rope_angle_dtype: as in `ModelConfig`.
    target_fingerprint: fingerprint of the target that the drafter was trained
      on, or None where unknown. A drafter is bonded to one exact target.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  rms_norm_eps: float
  rope_theta: float
  rope_scaling: YarnConfig | None
  rope_amplitude: float = 1.0
  max_position_embeddings: int
  block_size: int
  mask_token_id: int
  target_layer_ids: tuple[int, ...]
  num_target_layers: int
  target_hidden_size: int
  layer_types: tuple[str, ...]
  sliding_window: int | None
  target_fingerprint: str | None = None
  rope_angle_dtype: Literal["float64", "float32"] = "float64"
  causal: Literal["none", "sliding", "all"] = "none"

  def __post_init__(self) -> None:
    positive(
      self,
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_hidden_layers",
      "num_attention_heads",
      "num_key_value_heads",
      "head_dim",
      "max_position_embeddings",
      "num_target_layers",
      "target_hidden_size",
    )
    check(
      isinstance(self.block_size, int) and self.block_size >= 2,
      "block_size",
      self.block_size,
      "it must be 2 or more: the anchor and at least one mask",
    )
    check(
      0 <= self.mask_token_id < self.vocab_size,
      "mask_token_id",
      self.mask_token_id,
      f"token ids run from 0 to {self.vocab_size - 1}",
    )
    check(
      self.num_attention_heads % self.num_key_value_heads == 0,
      "num_key_value_heads",
      self.num_key_value_heads,
      f"it must divide num_attention_heads = {self.num_attention_heads}",
    )
    check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "it must be even")
    one_of(self, "rope_angle_dtype", ("float64", "float32"))
    one_of(self, "causal", ("none", "sliding", "all"))
    positive_float32(self, "rms_norm_eps", "rope_theta", "rope_amplitude")
    check(len(self.target_layer_ids) > 0, "target_layer_ids", (), "it is empty")
    for layer in self.target_layer_ids:
      check(
        0 <= layer < self.num_target_layers,
        "target_layer_ids",
        layer,
        f"the target has layers 0 to {self.num_target_layers - 1}",
      )
    check(
      len(self.layer_types) == self.num_hidden_layers,
      "layer_types",
      self.layer_types,
      f"it must name {self.num_hidden_layers} layers",
    )
    for kind in self.layer_types:
      check(
        kind in ("full_attention", "sliding_attention"),
        "layer_types",
        kind,
        'it must be "full_attention" or "sliding_attention"',
      )
    if "sliding_attention" in self.layer_types:
      check(
        isinstance(self.sliding_window, int) and self.sliding_window > 0,
        "sliding_window",
        self.sliding_window,
        "sliding layers need a window of at least 1 token",
      )

  @property
  def max_depth(self) -> int:
    """Rows of logits of one pass: the depth of the deepest tree."""
    return self.block_size - 1

  def is_causal_layer(self, layer: int) -> bool:
    """Whether a row of this layer sees no later row of its block."""
    sliding = self.layer_types[layer] == "sliding_attention"
    return self.causal == "all" or (self.causal == "sliding" and sliding)
