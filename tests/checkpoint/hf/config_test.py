from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kdtree_jax.checkpoint.hf import CheckpointError
from kdtree_jax.checkpoint.hf.config import HfConfig, read_config
from kdtree_jax.checkpoint.hf.quantization import Quantization
from kdtree_jax.cli.flags import load_experiment
from kdtree_jax.config import ModelConfig, YarnConfig
from tests.checkpoint.hf.directories import (
  FP8,
  INT4,
  hub_config,
  kimi_wrapper,
  write_json,
)
from tests.model.families import FAMILIES, family_config

CONFIGS = Path(__file__).parents[3] / "configs"


def read(directory: Path, document: Any, generation: Any = None) -> HfConfig:
  write_json(directory / "config.json", document)
  if generation is not None:
    write_json(directory / "generation_config.json", generation)
  return read_config(directory)


def refused(
  directory: Path, document: Any, field: str, reason: str, file: str = "config.json"
) -> None:
  write_json(directory / "config.json", document)
  with pytest.raises(CheckpointError) as caught:
    read_config(directory)
  error = caught.value
  assert error.file == str(directory / file)
  assert error.what == (field if field == "config" else f"field {field}")
  assert reason in error.reason, error.reason


def family(name: str, **changes: Any) -> ModelConfig:
  model_type = "deepseek_v2" if name == "v2_lite" else "deepseek_v3"
  ours = {"rope_angle_dtype": "float32", "model_type": model_type, "bos_token_id": 0}
  return family_config(name, **(ours | changes))


def kimi() -> dict[str, Any]:
  return hub_config(family("kimi"))


@pytest.mark.parametrize(
  ("file", "changes"),
  [
    ("deepseek_v3.py", {"num_nextn_predict_layers": 1, "quantization_config": FP8}),
    ("moonlight.py", {}),
    ("kimi_k2_6.py", {}),
  ],
)
def test_published_configurations_give_ours(tmp_path, file, changes):
  ours = load_experiment(CONFIGS / file).model
  got = read(tmp_path, hub_config(ours, **changes))
  assert got.model == ours
  assert got.prefix == ""
  if changes:
    assert got.mtp_layers == 1 and got.quantization == Quantization("fp8", ())
  else:
    assert got.mtp_layers == 0 and got.quantization is None


def test_kimi_k2_6_with_its_wrapper(tmp_path):
  ours = load_experiment(CONFIGS / "kimi_k2_6.py").model
  # Its text_config came through transformers 4, which writes every default there is.
  written = {
    "_name_or_path": "",
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0"},
    "is_decoder": False,
    "max_length": 20,
    "tie_encoder_decoder": False,
    "tf_legacy_loss": False,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
  }
  text = hub_config(ours, quantization_config=INT4, **written)
  got = read(tmp_path, kimi_wrapper(text))
  assert got.model == ours
  assert got.prefix == "language_model."
  assert got.quantization is not None and got.quantization.scheme == "int4"


def test_v2_lite(tmp_path):
  got = read(tmp_path, hub_config(family("v2_lite")))
  assert got.model == family("v2_lite")
  assert got.model.scoring_func == "softmax" and got.model.topk_method == "greedy"


@pytest.mark.parametrize("name", ["kimi", "deepseek_v3", "moonlight", "v2_lite"])
def test_every_family(tmp_path, name):
  ours = family(name)
  assert read(tmp_path, hub_config(ours)).model == ours


def transformers_5(config: ModelConfig) -> dict[str, Any]:
  """The same model as transformers 5 writes it."""
  document = hub_config(config, rope_interleave=config.rope_interleave)
  theta, scaling = document.pop("rope_theta"), document.pop("rope_scaling", None)
  kind = {"rope_type": "yarn", **scaling} if scaling else {"rope_type": "default"}
  for name in ("scoring_func", "moe_layer_freq", "torch_dtype", "ep_size", "auto_map"):
    del document[name]
  if config.model_type == "deepseek_v3":
    del document["topk_method"]
  else:
    del document["rope_interleave"]
    document["mlp_bias"] = False
  return document | {
    "dtype": "bfloat16",
    "head_dim": config.qk_rope_head_dim,
    "qk_head_dim": config.qk_head_dim,
    "output_router_logits": False,
    "rope_parameters": kind | {"rope_theta": theta},
    "transformers_version": "5.24.0",
  }


@pytest.mark.parametrize("name", ["kimi", "deepseek_v3", "moonlight", "v2_lite"])
def test_the_spelling_of_transformers_5(tmp_path, name):
  ours = family(name)
  assert read(tmp_path, transformers_5(ours)).model == ours
  ours = family("other", tie_word_embeddings=True)
  got = read(tmp_path, transformers_5(ours)).model
  assert got == ours and not got.rope_interleave and got.tie_word_embeddings


def test_every_field_of_the_model_is_covered(tmp_path):
  """A field that is added to ModelConfig must be read, or named here."""
  document = kimi()
  constant = {"latent_norm_eps", "rope_interleave", "rope_angle_dtype", "rope_scaling"}
  fields = {field.name for field in dataclasses.fields(ModelConfig)}
  assert fields - constant <= set(document)


REQUIRED = [
  name
  for name in hub_config(family("kimi"))
  if name in {field.name for field in dataclasses.fields(ModelConfig)}
  and name not in ("bos_token_id", "eos_token_id", "model_type", "rope_scaling")
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(tmp_path, name):
  document = kimi()
  del document[name]
  refused(tmp_path, document, name, "is missing")
  if name != "q_lora_rank":
    document = kimi()
    document[name] = None
    refused(tmp_path, document, name, "is null" if name != "rope_theta" else "")


@pytest.mark.parametrize(
  "name", ["scoring_func", "topk_method", "moe_layer_freq", "hidden_act"]
)
def test_what_transformers_5_does_not_write_must_be_published(tmp_path, name):
  document = kimi()
  del document[name]
  refused(tmp_path, document, name, "is missing")


@pytest.mark.parametrize(
  "name", ["rope_interleave", "n_group", "topk_group", "norm_topk_prob"]
)
def test_what_transformers_5_writes_must_be_there(tmp_path, name):
  document = transformers_5(family("kimi"))
  del document[name]
  refused(tmp_path, document, name, "is missing")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("index_topk", 2048),  # DeepSeek-V3.2: sparse attention.
    ("sliding_window", 4096),
    ("use_qk_norm", True),
    ("attn_logit_softcapping", 50.0),
    ("layer_types", ["full_attention"]),
    ("residual_multiplier", 2.0),
  ],
)
def test_an_unknown_field_is_named(tmp_path, name, value):
  refused(tmp_path, kimi() | {name: value}, name, "is not known here")
  wrapper = kimi_wrapper(kimi() | {name: value})
  refused(tmp_path, wrapper, f"text_config.{name}", "is not known here")
  refused(tmp_path, kimi_wrapper(kimi()) | {name: value}, name, "is not known here")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("initializer_range", 0.5),
    ("use_cache", False),
    ("torch_dtype", "float32"),
    ("aux_loss_alpha", 3.0),
    ("attention_dropout", 0.5),
    ("architectures", None),
    ("num_key_value_heads", None),
    ("temperature", 0.1),
  ],
)
def test_fields_that_do_not_change_the_model(tmp_path, name, value):
  assert read(tmp_path, kimi() | {name: value}).model == family("kimi")


@pytest.mark.parametrize(
  ("name", "value", "reason"),
  [
    ("model_type", "llama", "is not supported"),
    ("architectures", ["DeepseekV3ForSequenceClassification"], "is not supported"),
    ("architectures", ["DeepseekV2ForCausalLM"], "is not supported"),
    ("topk_method", "group_limited_greedy", "is not supported"),
    ("rope_interleave", 1, "must be true or false"),
    ("rope_interleave", None, "must be true or false"),
    ("num_key_value_heads", 2, "must be 4"),
    ("head_dim", 128, "must be 8"),
    ("qk_head_dim", 8, "must be 20"),
    ("num_local_experts", 9, "must be 8"),
    ("mlp_bias", True, "must be False"),
    ("partial_rotary_factor", 0.5, "must be 1.0"),
    ("routed_scaling_factor", "2", "is not a number"),
    ("rms_norm_eps", True, "is not a number"),
    ("norm_topk_prob", 1, "must be true or false"),
    ("tie_word_embeddings", "false", "must be true or false"),
    ("attention_bias", 0, "must be true or false"),
    ("num_nextn_predict_layers", -1, "must be an integer"),
    ("num_nextn_predict_layers", "1", "must be an integer"),
    ("eos_token_id", "1", "must be a token id"),
    ("eos_token_id", [1, None], "must be a token id"),
    ("rope_theta", "1e4", "is not a number"),
    ("quantization_config", [], "must be an object"),
  ],
)
def test_a_value_that_is_not_supported_is_named(tmp_path, name, value, reason):
  refused(tmp_path, kimi() | {name: value}, name, reason)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("attention_bias", True),
    ("hidden_act", "gelu"),
    ("scoring_func", "tanh"),
    ("topk_method", "noaux"),
    ("moe_layer_freq", 2),
    ("hidden_size", 0),
    ("hidden_size", 32.0),
    ("vocab_size", "61"),
    ("qk_rope_head_dim", 8.0),
    ("qk_rope_head_dim", 7),
    ("q_lora_rank", 0),
    ("kv_lora_rank", True),
    ("n_group", 3),
    ("num_experts_per_tok", 9),
    ("first_k_dense_replace", -1),
    ("rms_norm_eps", 0.0),
    ("rope_theta", 1.0),
    ("eos_token_id", 61),
    ("bos_token_id", 61),
  ],
)
def test_a_value_that_no_model_has_is_named(tmp_path, name, value):
  write_json(tmp_path / "config.json", kimi() | {name: value})
  with pytest.raises(CheckpointError, match=name) as caught:
    read_config(tmp_path)
  assert caught.value.file == str(tmp_path / "config.json")


def test_greedy_routing_has_no_groups(tmp_path):
  document = hub_config(family("v2_lite"))
  for value in (None, 1):
    changed = document | {"n_group": value, "topk_group": value}
    assert read(tmp_path, changed).model == family("v2_lite")
  del document["n_group"], document["topk_group"]
  assert read(tmp_path, document).model == family("v2_lite")


def test_v2_does_not_norm(tmp_path):
  document = hub_config(family("v2_lite")) | {"norm_topk_prob": True}
  refused(tmp_path, document, "norm_topk_prob", "only false is supported")
  document = hub_config(family("v2_lite")) | {"rope_interleave": False}
  refused(tmp_path, document, "rope_interleave", "knows only true")


def test_softmax_and_pairs_in_halves_are_supported(tmp_path):
  document = kimi() | {"scoring_func": "softmax", "rope_interleave": False}
  got = read(tmp_path, document).model
  assert got.scoring_func == "softmax" and not got.rope_interleave


# Stop tokens.


@pytest.mark.parametrize(
  ("config", "generation", "eos"),
  [
    (3, None, (3,)),
    ([3, 5], None, (3, 5)),
    (3, {"eos_token_id": 4}, (3, 4)),
    (3, {"eos_token_id": [4, 3], "temperature": 0.6}, (3, 4)),
    (None, {"eos_token_id": [4]}, (4,)),
    (3, {"max_length": 9}, (3,)),
    (None, None, ()),
  ],
)
def test_stop_tokens_of_both_files(tmp_path, config, generation, eos):
  document = kimi() | {"eos_token_id": config}
  assert read(tmp_path, document, generation).model.eos_token_id == eos


def test_stop_tokens_of_the_wrapper(tmp_path):
  text = kimi() | {"eos_token_id": 3}
  document = kimi_wrapper(text, eos_token_id=5)
  got = read(tmp_path, document, {"eos_token_id": 7})
  assert got.model.eos_token_id == (3, 5, 7)


def test_a_damaged_generation_config(tmp_path):
  write_json(tmp_path / "config.json", kimi())
  (tmp_path / "generation_config.json").write_text("{")
  with pytest.raises(CheckpointError, match=r"generation_config.json: JSON"):
    read_config(tmp_path)
  write_json(tmp_path / "generation_config.json", {"eos_token_id": "x"})
  with pytest.raises(CheckpointError, match="generation_config.json: field eos_token"):
    read_config(tmp_path)


# The wrapper.


@pytest.mark.parametrize(
  ("changes", "field", "reason"),
  [
    ({"text_config": None}, "text_config", "is null"),
    ({"text_config": []}, "text_config", "must be an object"),
    ({"text_config": {"model_type": "x"}}, "text_config.model_type", "not supported"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings", "is True, but False in"),
    ({"bos_token_id": 9}, "bos_token_id", "is 9, but 0 in text_config"),
  ],
)
def test_a_wrapper_that_disagrees(tmp_path, changes, field, reason):
  refused(tmp_path, kimi_wrapper(kimi()) | changes, field, reason)


def test_quantization_may_be_said_in_the_wrapper(tmp_path):
  said = kimi_wrapper(kimi(), quantization_config=INT4)
  inside = kimi_wrapper(kimi() | {"quantization_config": INT4})
  both = kimi_wrapper(kimi() | {"quantization_config": INT4}, quantization_config=INT4)
  assert (
    read(tmp_path, said).quantization
    == read(tmp_path, inside).quantization
    == read(tmp_path, both).quantization
    is not None
  )
  differing = kimi_wrapper(kimi() | {"quantization_config": FP8})
  differing["quantization_config"] = INT4
  refused(tmp_path, differing, "quantization_config", "differs from text_config's")


# RoPE.

YARN = {
  "factor": 64.0,
  "original_max_position_embeddings": 4096,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
}


def rope_of(directory: Path, **changes: Any) -> YarnConfig | None:
  return read(directory, kimi() | changes).model.rope_scaling


def test_rope_types_in_both_spellings(tmp_path):
  want = YarnConfig(**YARN)
  for kind in (
    {"type": "yarn"},
    {"rope_type": "yarn"},
    {"type": "yarn", "rope_type": "yarn"},
    {"type": "yarn", "rope_theta": 50000.0},
    {"type": "yarn", "attention_factor": None},
    {"type": "yarn", "attention_factor": 1.0},
    {"type": "yarn", "truncate": True},
    {"type": "yarn", "partial_rotary_factor": 1.0},
  ):
    assert rope_of(tmp_path, rope_scaling=YARN | kind) == want, kind
  assert rope_of(tmp_path, rope_scaling=None) is None
  assert rope_of(tmp_path, rope_scaling={"rope_type": "default"}) is None


def test_integers_are_numbers(tmp_path):
  whole = {"factor": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1}
  got = rope_of(
    tmp_path, rope_theta=50000, rope_scaling=YARN | whole | {"type": "yarn"}
  )
  assert got == YarnConfig(**YARN) and isinstance(got.factor, float)


@pytest.mark.parametrize("name", YARN)
def test_a_missing_yarn_value_is_named(tmp_path, name):
  scaling = YARN | {"type": "yarn"}
  del scaling[name]
  refused(
    tmp_path, kimi() | {"rope_scaling": scaling}, f"rope_scaling.{name}", "missing"
  )
  document = transformers_5(family("kimi"))
  del document["rope_parameters"][name]
  refused(tmp_path, document, f"rope_parameters.{name}", "is missing")


@pytest.mark.parametrize(
  ("changes", "field", "reason"),
  [
    ({"type": None}, "rope_type", "is missing"),
    ({"type": "linear"}, "rope_type", "'linear' is not supported"),
    ({"type": "llama3"}, "rope_type", "'llama3' is not supported"),
    ({"type": "default"}, "beta_fast", "is not known here"),
    ({"rope_type": "default"}, "rope_type", "is 'default', but type is 'yarn'"),
    ({"factor": "64"}, "factor", "is not a number"),
    ({"factor": 0.5}, "factor", "is not supported"),
    ({"factor": None}, "factor", "is null"),
    ({"beta_fast": 0}, "beta_fast", "is not supported"),
    ({"beta_slow": -1}, "beta_slow", "is not supported"),
    ({"mscale": 0}, "mscale", "is not supported"),
    ({"mscale": 2.0, "mscale_all_dim": 0}, "mscale", "where mscale_all_dim is 0"),
    ({"original_max_position_embeddings": 0}, "original_max_position_embeddings", "0"),
    (
      {"original_max_position_embeddings": 4096.5},
      "original_max_position_embeddings",
      "",
    ),
    ({"attention_factor": 1.4}, "attention_factor", "make it 1.0"),
    ({"truncate": False}, "truncate", "must be True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "must be 1.0"),
    ({"rope_theta": 10000.0}, "rope_theta", "but 50000.0 outside"),
    ({"low_freq_factor": 1.0}, "low_freq_factor", "is not known here"),
  ],
)
def test_a_yarn_value_that_is_not_supported(tmp_path, changes, field, reason):
  scaling = YARN | {"type": "yarn"} | changes
  refused(tmp_path, kimi() | {"rope_scaling": scaling}, f"rope_scaling.{field}", reason)


def test_rope_given_twice(tmp_path):
  document = transformers_5(family("kimi"))
  document["rope_scaling"] = YARN | {"type": "yarn"}
  refused(tmp_path, document, "rope_parameters", "stands beside rope_scaling")
  document = kimi() | {"rope_scaling": "yarn"}
  refused(tmp_path, document, "rope_scaling", "must be an object")
  document = transformers_5(family("kimi"))
  del document["rope_parameters"]["rope_theta"]
  refused(tmp_path, document, "rope_parameters.rope_theta", "is missing")


# Quantization.


def quantized(directory: Path, quantization: Any) -> Quantization | None:
  return read(directory, kimi() | {"quantization_config": quantization}).quantization


def test_fp8(tmp_path):
  assert quantized(tmp_path, FP8) == Quantization("fp8", ())
  assert quantized(tmp_path, FP8 | {"scale_fmt": "ue8m0"}) == Quantization("fp8", ())
  ignoring = FP8 | {"modules_to_not_convert": ["lm_head"]}
  assert quantized(tmp_path, ignoring) == Quantization("fp8", ("lm_head",))


def test_int4_ignores(tmp_path):
  got = quantized(tmp_path, INT4)
  assert got is not None and got.scheme == "int4"
  assert got.ignores("model.layers.0.self_attn.o_proj")
  assert got.ignores("model.layers.0.mlp.gate_proj")
  assert got.ignores("model.layers.1.mlp.shared_experts.up_proj")
  assert got.ignores("lm_head") and got.ignores("x", "lm_head")
  assert not got.ignores("model.layers.1.mlp.experts.0.up_proj")
  # Expressions match from the beginning, names as a whole.
  named = Quantization("int4", ("lm_head", "re:mm_projector.*"))
  assert named.ignores("lm_head") and not named.ignores("language_model.lm_head")
  assert not named.ignores("model.mm_projector.0") and not named.ignores("lm_head2")


def weights(**changes: Any) -> dict[str, Any]:
  document = copy.deepcopy(INT4)
  document["config_groups"]["group_0"]["weights"] |= changes
  return document


def group(**changes: Any) -> dict[str, Any]:
  document = copy.deepcopy(INT4)
  document["config_groups"]["group_0"] |= changes
  return document


@pytest.mark.parametrize(
  ("quantization", "field", "reason"),
  [
    ({}, "quant_method", "is missing"),
    ({"quant_method": "gptq"}, "quant_method", "'gptq' is not supported"),
    ({"quant_method": "awq", "bits": 4}, "quant_method", "'awq' is not supported"),
    (FP8 | {"fmt": "e5m2"}, "fmt", "must be 'e4m3'"),
    (FP8 | {"activation_scheme": "static"}, "activation_scheme", "must be 'dynamic'"),
    (FP8 | {"weight_block_size": None}, "weight_block_size", "is null"),
    (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size", "is not supported"),
    (FP8 | {"modules_to_not_convert": "x"}, "modules_to_not_convert", "list of names"),
    (FP8 | {"rotate": True}, "rotate", "is not known here"),
    (INT4 | {"format": "int-quantized"}, "format", "'int-quantized' is not supported"),
    (INT4 | {"format": "marlin-24"}, "format", "'marlin-24' is not supported"),
    (INT4 | {"quantization_status": "frozen"}, "quantization_status", "'compressed'"),
    (INT4 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme", "must be null"),
    (INT4 | {"sparsity_config": {"a": 1}}, "sparsity_config", "must be null"),
    (INT4 | {"transform_config": {"a": 1}}, "transform_config", "must be null"),
    (INT4 | {"config_groups": {}}, "config_groups", "one group"),
    (INT4 | {"config_groups": {"a": 1, "b": 2}}, "config_groups", "one group"),
    (INT4 | {"ignore": [1]}, "ignore", "list of names"),
    (INT4 | {"other": 1}, "other", "is not known here"),
    (group(weights=None), "config_groups.group_0.weights", "is null"),
    (group(weights=4), "config_groups.group_0.weights", "must be an object"),
    (group(targets=["re:x"]), "config_groups.group_0.targets", "['Linear'] is"),
    (group(format="x"), "config_groups.group_0.format", "'x' is not supported"),
    (group(input_activations={}), "config_groups.group_0.input_activations", "null"),
    (group(more=1), "config_groups.group_0.more", "is not known here"),
    (weights(num_bits=8), "config_groups.group_0.weights.num_bits", "must be 4"),
    (weights(type="float"), "config_groups.group_0.weights.type", "must be 'int'"),
    (weights(strategy="channel"), "config_groups.group_0.weights.strategy", "'group'"),
    (weights(group_size=128), "config_groups.group_0.weights.group_size", "must be 32"),
    (weights(symmetric=False), "config_groups.group_0.weights.symmetric", "be True"),
    (weights(dynamic=True), "config_groups.group_0.weights.dynamic", "be False"),
    (weights(actorder="group"), "config_groups.group_0.weights.actorder", "'group'"),
    (weights(zp=1), "config_groups.group_0.weights.zp", "is not known here"),
  ],
)
def test_a_scheme_that_is_not_supported(tmp_path, quantization, field, reason):
  document = kimi() | {"quantization_config": quantization}
  refused(tmp_path, document, f"quantization_config.{field}", reason)


def test_no_config(tmp_path):
  with pytest.raises(CheckpointError, match=r"config.json: file: is missing"):
    read_config(tmp_path)
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(CheckpointError, match="must be an object"):
    read_config(tmp_path)


def test_families_are_all_here():
  assert set(FAMILIES) == {"kimi", "deepseek_v3", "moonlight", "v2_lite", "other"}
