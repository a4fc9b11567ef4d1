"""A target's `config.json` to a ModelConfig.

Every field is read, checked or known not to matter: a field that changes the numbers
and is missing is an error, and so is a field that nobody here has heard of. What
published configurations leave to the code that ships with them (pairs of RoPE features
lie side by side, the norms of the latents have an epsilon of 1e-6) is constant here.

Sources: the `config.json` of DeepSeek-V3, DeepSeek-V2-Lite, Moonlight and Kimi K2.6,
the `modeling_deepseek.py` beside them, and transformers 5.24, models/deepseek_v2,
models/deepseek_v3 and models/kimi_k25.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdtree_jax._validation import is_integer
from kdtree_jax.checkpoint.file_names import CONFIG_FILE, GENERATION_FILE
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.fields import Fields
from kdtree_jax.checkpoint.hf.quantization import Quantization, read_quantization
from kdtree_jax.checkpoint.hf.rope import read_rope
from kdtree_jax.checkpoint.hf.safetensors import load_json
from kdtree_jax.config import ModelConfig

# `q_a_layernorm` and `kv_a_layernorm` are built without an epsilon, both in the code
# that ships with the checkpoints and in transformers: 1e-6, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6

_TEXT_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")
_WRAPPER_TYPE = "kimi_k25"
_ARCHITECTURES = {
  "deepseek_v3": "DeepseekV3ForCausalLM",
  "deepseek_v2": "DeepseekV2ForCausalLM",
  # Kimi K2 ships DeepSeek-V3's code under a model type of its own.
  "kimi_k2": "DeepseekV3ForCausalLM",
}

# Fields that both spellings have; null is no value for any but q_lora_rank.
_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "moe_intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "kv_lora_rank",
  "qk_nope_head_dim",
  "qk_rope_head_dim",
  "v_head_dim",
  "n_routed_experts",
  "num_experts_per_tok",
  "n_shared_experts",
  "norm_topk_prob",
  "routed_scaling_factor",
  "first_k_dense_replace",
  "rms_norm_eps",
  "max_position_embeddings",
  "tie_word_embeddings",
  "hidden_act",
  "attention_bias",
)

_INTEGERS = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "moe_intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "kv_lora_rank",
  "qk_nope_head_dim",
  "qk_rope_head_dim",
  "v_head_dim",
  "n_routed_experts",
  "num_experts_per_tok",
  "n_shared_experts",
  "n_group",
  "topk_group",
  "first_k_dense_replace",
  "moe_layer_freq",
  "max_position_embeddings",
)

# What classes of transformers have no field for: their code fixes it.
_CONSTANTS_OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
  "deepseek_v3": {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
  },
  "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1},
}

# What changes training, generation defaults, sizes of buffers or nothing.
_IRRELEVANT = frozenset(
  """
  _attn_implementation _attn_implementation_autoset _commit_hash _from_model_config
  _name_or_path add_cross_attention architectures attention_dropout auto_map
  aux_loss_alpha bad_words_ids begin_suppress_tokens chunk_size_feed_forward
  cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
  early_stopping encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty
  finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range
  is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type
  no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
  output_hidden_states output_router_logits output_scores pad_token_id prefix
  pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
  return_dict return_dict_in_generate router_aux_loss_coef sep_token_id seq_aux
  suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
  tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
  unsloth_fixed unsloth_version use_bfloat16 use_cache
  """.split()
)

# Of the vision part around Kimi's text model.
_IRRELEVANT_IN_WRAPPER = _IRRELEVANT | frozenset(
  """
  ignore_index image_token_id media_placeholder_token_id projection_hidden_size
  projection_layer_norm_eps use_unified_vision_chunk video_placeholder video_token_id
  vision_config vision_end_token_id vision_start_token_id
  """.split()
)


@dataclasses.dataclass(frozen=True)
class HfConfig:
  """What a directory's configuration says.

  Attributes:
    model: the target.
    quantization: how weights are stored, or None for floats.
    prefix: of the text model's tensors, "" or "language_model.".
    mtp_layers: layers for multi-token prediction that follow the model's own.
  """

  model: ModelConfig
  quantization: Quantization | None
  prefix: str
  mtp_layers: int


def read_config(directory: Path) -> HfConfig:
  """Reads `config.json` and `generation_config.json`.

  Raises:
    CheckpointError: a file is damaged; a field is missing, unknown or has a value that
      is not supported.
  """
  path = directory / CONFIG_FILE
  values = load_json(path)
  model_type = values.get("model_type")
  if model_type == _WRAPPER_TYPE:
    return _read_wrapper(path, values)
  if model_type not in _TEXT_TYPES:
    raise CheckpointError(
      path,
      "field model_type",
      f"{model_type!r} is not supported; there are {[*_TEXT_TYPES, _WRAPPER_TYPE]}",
    )
  return _read_text(Fields(path, values), eos=_generation_eos(directory, values))


def _read_wrapper(path: Path, values: dict[str, Any]) -> HfConfig:
  """Kimi K2.5 and K2.6: a text model inside a model that sees images."""
  outer = Fields(path, values)
  text = outer.required("text_config")
  if not isinstance(text, dict):
    raise outer.error("text_config", "must be an object")
  inner = Fields(path, text, "text_config.")
  if text.get("model_type") not in _TEXT_TYPES:
    raise inner.error(
      "model_type", f"{text.get('model_type')!r} is not supported: {_TEXT_TYPES}"
    )
  inside = text.get("tie_word_embeddings")
  tied = outer.optional("tie_word_embeddings", inside)
  if inside not in (None, tied):
    raise outer.error(
      "tie_word_embeddings", f"is {tied!r}, but {inside!r} in text_config"
    )
  quantization = outer.optional("quantization_config")
  if quantization is None:
    quantization = text.get("quantization_config")
  elif text.get("quantization_config") not in (None, quantization):
    raise outer.error("quantization_config", "differs from text_config's")
  text = text | {"quantization_config": quantization}
  if tied is not None:
    text["tie_word_embeddings"] = tied
  inner = Fields(path, text, "text_config.")
  bos = outer.optional("bos_token_id")
  if bos not in (None, text.get("bos_token_id")):
    raise outer.error(
      "bos_token_id", f"is {bos!r}, but {text.get('bos_token_id')!r} in text_config"
    )
  eos = outer.token_ids("eos_token_id") + _generation_eos(path.parent, text)
  outer.refuse_others(_IRRELEVANT_IN_WRAPPER)
  return dataclasses.replace(_read_text(inner, eos), prefix="language_model.")


def _read_text(fields: Fields, eos: tuple[int, ...]) -> HfConfig:
  model_type = fields.required("model_type")
  _check_architecture(fields, model_type)
  values = {name: fields.required(name) for name in _REQUIRED}
  values["q_lora_rank"] = fields.required("q_lora_rank", null=True)
  rope = read_rope(fields)
  # `rope_parameters` came with transformers 5; `rope_interleave` is in no published
  # configuration, only in those that transformers wrote.
  theirs = rope.new or "rope_interleave" in fields
  constants = _CONSTANTS_OF_TRANSFORMERS.get(model_type, {}) if theirs else {}
  for name in ("scoring_func", "topk_method", "moe_layer_freq"):
    values[name] = (
      fields.optional(name, constants[name])
      if name in constants
      else fields.required(name)
    )
  _check_routing(fields, model_type, values)
  values |= _groups(fields, values["topk_method"])
  values["rope_interleave"] = _interleave(fields, model_type, rope.new)
  if model_type == "deepseek_v2" and values["norm_topk_prob"] is not False:
    raise fields.error(
      "norm_topk_prob",
      "only false is supported with deepseek_v2: the published code then leaves out "
      "routed_scaling_factor, and transformers does not read the field",
    )
  for name in _INTEGERS:
    if not is_integer(values[name]):
      raise fields.error(name, f"{values[name]!r} must be an integer")
  _check_redundant(fields, values)
  for name in ("routed_scaling_factor", "rms_norm_eps"):
    values[name] = fields.number(name, values[name])
  for name in ("norm_topk_prob", "tie_word_embeddings", "attention_bias"):
    if not isinstance(values[name], bool):
      raise fields.error(name, f"{values[name]!r} must be true or false")
  mtp = fields.optional("num_nextn_predict_layers", 0)
  mtp = fields.optional("num_mtp_layers", mtp)
  if not is_integer(mtp) or mtp < 0:
    raise fields.error("num_nextn_predict_layers", f"{mtp!r} must be an integer >= 0")
  quantization = fields.optional("quantization_config")
  if quantization is not None:
    quantization = read_quantization(fields, quantization)
  eos = tuple(dict.fromkeys(fields.token_ids("eos_token_id") + eos))
  bos = fields.optional("bos_token_id")
  fields.refuse_others(_IRRELEVANT)
  try:
    model = ModelConfig(
      **values,
      rope_theta=rope.theta,
      rope_scaling=rope.yarn,
      rope_angle_dtype="float32",
      latent_norm_eps=LATENT_NORM_EPS,
      bos_token_id=bos,
      eos_token_id=eos,
      model_type=model_type,
    )
  except (TypeError, ValueError) as error:
    raise CheckpointError(fields.path, "config", str(error)) from error
  return HfConfig(model, quantization, "", mtp)


def _check_architecture(fields: Fields, model_type: str) -> None:
  wanted = _ARCHITECTURES[model_type]
  architectures = fields.optional("architectures")
  if architectures not in (None, [wanted]):
    raise fields.error(
      "architectures", f"{architectures!r} is not supported: {[wanted]} is"
    )


def _check_routing(fields: Fields, model_type: str, values: Mapping[str, Any]) -> None:
  """Each version's code scores in one way: transformers', whatever the fields say.

  A correction bias is of V3. Without one, V3's experts are chosen by their scores, as
  with a bias of zero.
  """
  if values["topk_method"] == "group_limited_greedy":
    raise fields.error(
      "topk_method", "'group_limited_greedy' (DeepSeek-V2's) is not supported"
    )
  v2 = model_type == "deepseek_v2"
  allowed = {
    "scoring_func": ("softmax",) if v2 else ("sigmoid",),
    "topk_method": ("greedy",) if v2 else ("noaux_tc", "greedy"),
  }
  for name, supported in allowed.items():
    if values[name] not in supported:
      raise fields.error(
        name,
        f"{values[name]!r} is not supported with {model_type}: it must be "
        + " or ".join(map(repr, supported)),
      )


def _groups(fields: Fields, topk_method: Any) -> dict[str, Any]:
  if topk_method == "greedy":  # Without groups, whatever these say.
    return {name: fields.optional(name) or 1 for name in ("n_group", "topk_group")}
  return {name: fields.required(name) for name in ("n_group", "topk_group")}


def _interleave(fields: Fields, model_type: str, new: bool) -> Any:
  """Published checkpoints have pairs side by side; only one class lets one choose."""
  if model_type == "deepseek_v3" and new:
    value = fields.required("rope_interleave")
  else:
    value = fields.optional("rope_interleave", True)
  if not isinstance(value, bool):
    raise fields.error("rope_interleave", f"{value!r} must be true or false")
  if model_type == "deepseek_v2" and not value:
    raise fields.error("rope_interleave", "deepseek_v2 knows only true")
  return value


def _check_redundant(fields: Fields, values: Mapping[str, Any]) -> None:
  """Fields that follow from others, or that have one value in these models."""
  follows = {
    "num_key_value_heads": values["num_attention_heads"],
    "head_dim": values["qk_rope_head_dim"],
    "qk_head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
    "num_local_experts": values["n_routed_experts"],
    "num_experts": values["n_routed_experts"],
  }
  for name, wanted in follows.items():
    found = fields.optional(name, wanted)
    if found != wanted and found is not None:
      raise fields.error(name, f"{found!r} is not supported: it must be {wanted}")
  fields.must_be("mlp_bias", False)
  fields.must_be("partial_rotary_factor", 1.0, 1)


def _generation_eos(directory: Path, model: Mapping[str, Any]) -> tuple[int, ...]:
  path = directory / GENERATION_FILE
  if not path.exists():
    return ()
  fields = Fields(path, load_json(path))
  tokens, size = fields.token_ids("eos_token_id"), model.get("vocab_size")
  if is_integer(size) and tokens and max(tokens) >= size:
    raise fields.error("eos_token_id", f"{max(tokens)} is beyond vocab_size = {size}")
  return tokens
