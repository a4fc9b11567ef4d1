"""Our configurations as the `config.json` of Hugging Face.

Only what `transformers` computes alike is written: a model that its classes would
run with other numbers is refused, and the error names the field.
"""

from __future__ import annotations

from typing import Any, NoReturn

from kdtree_jax.checkpoint.hf.config import LATENT_NORM_EPS
from kdtree_jax.config import ConfigError, DrafterConfig, ModelConfig, YarnConfig


def target_config(config: ModelConfig, torch_dtype: str, int4: bool) -> dict[str, Any]:
  """The `config.json` of a target.

  Args:
    config: a target's.
    torch_dtype: "bfloat16" or "float32".
    int4: whether the routed experts are in compressed-tensors' int4.

  Returns:
    The fields under their published names, rope in the published spelling
    (`rope_theta`, `rope_scaling`), which old and new versions read.

  Raises:
    ConfigError: naming a field whose value `transformers` does not compute.
  """
  v3 = config.scoring_func == "sigmoid"
  _check_target(config, v3)
  fields: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v3" if v3 else "deepseek_v2",
  }
  for name in (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "first_k_dense_replace",
    "moe_layer_freq",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
    "bos_token_id",
  ):
    fields[name] = getattr(config, name)
  fields |= {
    "num_key_value_heads": config.num_attention_heads,
    "eos_token_id": _one_or_list(config.eos_token_id),
    "rope_scaling": _yarn(config.rope_scaling),
    "rope_interleave": config.rope_interleave,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "use_cache": True,
    "torch_dtype": torch_dtype,
  }
  if int4:
    fields["quantization_config"] = _pack_quantized()
  return fields


def drafter_config(config: DrafterConfig, torch_dtype: str) -> dict[str, Any]:
  """The `config.json` of a DFlash drafter, as z-lab publishes it.

  Raises:
    ConfigError: `rope_amplitude` is not what Hugging Face's code computes; the
      published layout has no field for it.
  """
  if config.rope_amplitude != _amplitude(config.rope_scaling):
    _refuse(
      "rope_amplitude",
      config.rope_amplitude,
      f"the published layout means {_amplitude(config.rope_scaling)}",
    )
  if config.causal == "sliding":
    _refuse(
      "causal", config.causal, "the published layout has one value for all layers"
    )
  fields: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
  }
  for name in (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "block_size",
    "num_target_layers",
    "sliding_window",
  ):
    fields[name] = getattr(config, name)
  if config.target_hidden_size != config.hidden_size:
    fields["target_hidden_size"] = config.target_hidden_size
  return fields | {
    "rope_scaling": _yarn(config.rope_scaling),
    "layer_types": list(config.layer_types),
    "is_causal": config.causal == "all",
    "use_sliding_window": "sliding_attention" in config.layer_types,
    "max_window_layers": config.num_hidden_layers,
    "dflash_config": {
      "mask_token_id": config.mask_token_id,
      "target_layer_ids": list(config.target_layer_ids),
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": torch_dtype,
  }


def generation_config(config: ModelConfig) -> dict[str, Any]:
  """The `generation_config.json`: start and stop tokens."""
  return {
    "bos_token_id": config.bos_token_id,
    "eos_token_id": _one_or_list(config.eos_token_id),
    "do_sample": False,
  }


def _check_target(config: ModelConfig, v3: bool) -> None:
  moe = config.first_k_dense_replace < config.num_hidden_layers
  if config.latent_norm_eps != LATENT_NORM_EPS:
    _refuse(
      "latent_norm_eps",
      config.latent_norm_eps,
      f"it is always {LATENT_NORM_EPS:g} there",
    )
  if config.topk_method != ("noaux_tc" if v3 else "greedy"):
    _refuse("topk_method", config.topk_method, f"scoring by {config.scoring_func}")
  if v3 and moe and config.n_routed_experts < 2 * config.n_group:
    _refuse("n_group", config.n_group, "a group needs two experts there")
  if not v3:
    if config.norm_topk_prob:
      _refuse("norm_topk_prob", True, "DeepSeek-V2's router does not normalise")
    if not config.rope_interleave:
      _refuse("rope_interleave", False, "DeepSeek-V2's code has interleaved pairs")
    if config.n_group != 1:
      _refuse("n_group", config.n_group, "greedy routing has one group")
  yarn = config.rope_scaling
  if yarn is not None and config.rope_amplitude != _amplitude(yarn):
    _refuse(
      "rope_scaling.mscale", yarn.mscale, f"its amplitude would be {_amplitude(yarn)}"
    )


def _amplitude(yarn: YarnConfig | None) -> float:
  """What `transformers` multiplies cosines and sines by."""
  if yarn is None:
    return 1.0
  if yarn.mscale and yarn.mscale_all_dim:
    return yarn.amplitude(yarn.mscale) / yarn.amplitude(yarn.mscale_all_dim)
  return yarn.amplitude(1.0)


def _yarn(yarn: YarnConfig | None) -> dict[str, Any] | None:
  return None if yarn is None else {"type": "yarn", **yarn.to_dict()}


def _one_or_list(tokens: tuple[int, ...]) -> int | list[int] | None:
  if len(tokens) > 1:
    return list(tokens)
  return tokens[0] if tokens else None


def _pack_quantized() -> dict[str, Any]:
  """What Kimi K2.x says of its experts: int4, symmetric, groups of 32."""
  return {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
      "group_0": {
        "targets": ["Linear"],
        "weights": {
          "num_bits": 4,
          "type": "int",
          "symmetric": True,
          "strategy": "group",
          "group_size": 32,
          "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
      }
    },
    "ignore": [
      "lm_head",
      "re:.*self_attn.*",
      "re:.*shared_experts.*",
      "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
  }


def _refuse(field: str, value: object, why: str) -> NoReturn:
  raise ConfigError(f"{field} = {value!r} cannot be exported to transformers: {why}")
