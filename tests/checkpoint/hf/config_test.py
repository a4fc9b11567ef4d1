from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kdtree_jax.checkpoint.hf import (
  CheckpointError,
)
from kdtree_jax.checkpoint.hf.config import read_config
from kdtree_jax.checkpoint.hf.quantization import Quantization
from kdtree_jax.cli.flags import load_experiment
from kdtree_jax.config import ModelConfig
from tests.checkpoint.hf.directories import (
  FP8,
  INT4,
  hub_config,
  kimi_wrapper,
  write_json,
)
from tests.checkpoint.hf.models import (
  config_refused,
  family,
  kimi,
  read,
  transformers_5,
)
from tests.model.families import FAMILIES

CONFIGS = Path(__file__).parents[3] / "configs"


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


@pytest.mark.parametrize("name", ["kimi", "deepseek_v3", "moonlight", "v2_lite"])
def test_the_spelling_of_transformers_5(tmp_path, name):
  ours = family(name)
  assert read(tmp_path, transformers_5(ours)).model == ours
  ours = family("other", tie_word_embeddings=True)
  got = read(tmp_path, transformers_5(ours)).model
  assert got == ours and not got.rope_interleave and got.tie_word_embeddings


def test_the_spelling_of_transformers_4(tmp_path):
  """Its own class, told by rope_interleave, has no fields for the router either."""
  document = hub_config(family("kimi"), rope_interleave=True)
  for name in ("scoring_func", "topk_method", "moe_layer_freq"):
    del document[name]
  assert read(tmp_path, document).model == family("kimi")
  del document["rope_interleave"]
  config_refused(tmp_path, document, "scoring_func", "is missing")


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
  config_refused(tmp_path, document, name, "is missing")
  if name != "q_lora_rank":
    document = kimi()
    document[name] = None
    config_refused(tmp_path, document, name, "is null" if name != "rope_theta" else "")


@pytest.mark.parametrize(
  "name", ["scoring_func", "topk_method", "moe_layer_freq", "hidden_act"]
)
def test_what_transformers_5_does_not_write_must_be_published(tmp_path, name):
  document = kimi()
  del document[name]
  config_refused(tmp_path, document, name, "is missing")


@pytest.mark.parametrize(
  "name", ["rope_interleave", "n_group", "topk_group", "norm_topk_prob"]
)
def test_what_transformers_5_writes_must_be_there(tmp_path, name):
  document = transformers_5(family("kimi"))
  del document[name]
  config_refused(tmp_path, document, name, "is missing")


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
  config_refused(tmp_path, kimi() | {name: value}, name, "is not known here")
  wrapper = kimi_wrapper(kimi() | {name: value})
  config_refused(tmp_path, wrapper, f"text_config.{name}", "is not known here")
  config_refused(
    tmp_path, kimi_wrapper(kimi()) | {name: value}, name, "is not known here"
  )


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
    ("routed_scaling_factor", "2", "is not a number that"),
    ("rms_norm_eps", True, "is not a number that"),
    ("rms_norm_eps", 10**400, "is not a number that"),
    ("n_shared_experts", 0.5, "must be an integer"),
    ("n_shared_experts", True, "must be an integer"),
    ("first_k_dense_replace", 1.0, "must be an integer"),
    ("moe_layer_freq", True, "must be an integer"),
    ("topk_group", "1", "must be an integer"),
    ("norm_topk_prob", 1, "must be true or false"),
    ("tie_word_embeddings", "false", "must be true or false"),
    ("attention_bias", 0, "must be true or false"),
    ("num_nextn_predict_layers", -1, "must be an integer"),
    ("num_nextn_predict_layers", "1", "must be an integer"),
    ("eos_token_id", "1", "must be a token id"),
    ("eos_token_id", [1, None], "must be a token id"),
    ("rope_theta", "1e4", "is not a number that"),
    ("quantization_config", [], "must be an object"),
  ],
)
def test_a_value_that_is_not_supported_is_named(tmp_path, name, value, reason):
  config_refused(tmp_path, kimi() | {name: value}, name, reason)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("attention_bias", True),
    ("hidden_act", "gelu"),
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
  config_refused(tmp_path, document, "norm_topk_prob", "only false is supported")
  document = hub_config(family("v2_lite")) | {"rope_interleave": False}
  config_refused(tmp_path, document, "rope_interleave", "knows only true")


@pytest.mark.parametrize(
  ("name", "changes", "field"),
  [
    ("v2_lite", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("v2_lite", {"topk_method": "noaux_tc"}, "topk_method"),
    ("kimi", {"scoring_func": "softmax"}, "scoring_func"),
    ("kimi", {"scoring_func": "softmax", "topk_method": "greedy"}, "scoring_func"),
    ("kimi", {"scoring_func": "tanh"}, "scoring_func"),
    ("kimi", {"topk_method": "noaux"}, "topk_method"),
    ("kimi", {"topk_method": ["noaux_tc"]}, "topk_method"),
  ],
)
def test_routing_that_no_code_has(tmp_path, name, changes, field):
  document = hub_config(family(name)) | changes
  config_refused(tmp_path, document, field, "is not supported with deepseek_v")
  kind = "deepseek_v2" if name == "v2_lite" else "kimi_k2"
  if name == "kimi":
    config_refused(tmp_path, document | {"model_type": kind}, field, f"with {kind}")


def test_a_router_without_a_bias_is_supported(tmp_path):
  document = kimi() | {"topk_method": "greedy"}
  assert read(tmp_path, document).model == family("kimi", topk_method="greedy")


def test_pairs_in_halves_are_supported(tmp_path):
  assert not read(tmp_path, kimi() | {"rope_interleave": False}).model.rope_interleave


@pytest.mark.parametrize(
  "name", ["rms_norm_eps", "rope_theta", "routed_scaling_factor"]
)
def test_numbers_that_are_not_finite(tmp_path, name):
  """JSON has no infinity, but numbers that become one."""
  text = json.dumps(kimi() | {name: "?"})
  for number in ("1e999", "-1e999"):
    (tmp_path / "config.json").write_text(text.replace('"?"', number))
    with pytest.raises(CheckpointError, match=f"{name}: .*inf is not a number"):
      read_config(tmp_path)
  for number in ("1e39", "0", "-3"):  # The first is none of float32.
    (tmp_path / "config.json").write_text(text.replace('"?"', number))
    with pytest.raises(CheckpointError, match=f"{name} = .*is not allowed"):
      read_config(tmp_path)


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


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stop_token_beyond_the_vocabulary_is_of_its_own_file(tmp_path, wrapped):
  document = kimi_wrapper(kimi()) if wrapped else kimi()
  size = kimi()["vocab_size"]
  read(tmp_path, document, {"eos_token_id": [1, size - 1]})
  write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, size]})
  message = f"generation_config.json: field eos_token_id: {size} is beyond vocab_size"
  with pytest.raises(CheckpointError, match=message):
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
  config_refused(tmp_path, kimi_wrapper(kimi()) | changes, field, reason)


def test_tied_embeddings_may_be_said_in_the_wrapper(tmp_path):
  text = kimi()
  del text["tie_word_embeddings"]
  assert read(tmp_path, kimi_wrapper(text)).model == family("kimi")
  tied = kimi_wrapper(text, tie_word_embeddings=True)
  assert read(tmp_path, tied).model.tie_word_embeddings
  document = kimi_wrapper(text)
  del document["tie_word_embeddings"]
  name = "text_config.tie_word_embeddings"
  config_refused(tmp_path, document, name, "is missing")


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
  config_refused(
    tmp_path, differing, "quantization_config", "differs from text_config's"
  )


def test_no_config(tmp_path):
  with pytest.raises(CheckpointError, match=r"config.json: file: is missing"):
    read_config(tmp_path)
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(CheckpointError, match="must be an object"):
    read_config(tmp_path)


def test_families_are_all_here():
  assert set(FAMILIES) == {"kimi", "deepseek_v3", "moonlight", "v2_lite", "other"}
