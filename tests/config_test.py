from __future__ import annotations

import dataclasses
import json
import math

import pytest

from kdtree_jax.config import (
  ConfigError,
  DecodeConfig,
  DrafterConfig,
  ModelConfig,
  TreeConfig,
  YarnConfig,
)
from kdtree_jax.training.config import Experiment, GenerateConfig, TrainConfig

YARN = {
  "factor": 64.0,
  "original_max_position_embeddings": 4096,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
}
# Head dimensions and rope of Kimi K2.6.
MODEL = {
  "vocab_size": 100,
  "hidden_size": 64,
  "intermediate_size": 96,
  "moe_intermediate_size": 32,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "q_lora_rank": 24,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "n_routed_experts": 16,
  "num_experts_per_tok": 4,
  "n_shared_experts": 1,
  "n_group": 4,
  "topk_group": 2,
  "norm_topk_prob": True,
  "routed_scaling_factor": 2.827,
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
  "first_k_dense_replace": 1,
  "rms_norm_eps": 1e-5,
  "latent_norm_eps": 1e-6,
  "rope_theta": 50000.0,
  "rope_scaling": YARN,
  "rope_interleave": True,
  "max_position_embeddings": 262144,
  "tie_word_embeddings": False,
  "eos_token_id": [98, 99],
}
DRAFTER = {
  "vocab_size": 100,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "rope_scaling": None,
  "max_position_embeddings": 4096,
  "block_size": 8,
  "mask_token_id": 99,
  "target_layer_ids": [0, 2],
  "num_target_layers": 3,
  "target_hidden_size": 64,
  "layer_types": ["sliding_attention", "full_attention"],
  "sliding_window": 128,
}
TRAIN = {
  "steps": 10,
  "batch_size": 2,
  "sequence_length": 8,
  "learning_rate": 1e-3,
  "warmup_steps": 1,
}
GENERATE = {
  "sequences": 8,
  "prompt_length": 2,
  "sequence_length": 6,
  "temperatures": [0.0, 1.0],
  "batch_size": 4,
}
VALID = {
  ModelConfig: MODEL,
  DrafterConfig: DRAFTER,
  YarnConfig: YARN,
  TreeConfig: {"budget": 16, "max_depth": None},
  DecodeConfig: {"budget": 16, "stop_token_ids": [1, 2]},
  TrainConfig: TRAIN,
  GenerateConfig: GENERATE,
}
CLASSES = pytest.mark.parametrize("cls", VALID, ids=lambda cls: cls.__name__)


@CLASSES
def test_round_trip_through_json(cls):
  config = cls.from_dict(VALID[cls])
  again = cls.from_dict(json.loads(json.dumps(config.to_dict())))
  assert again == config
  # All of it: a field that the round trip lost would be back at its default.
  assert dataclasses.asdict(again) == dataclasses.asdict(config)


@CLASSES
def test_equal_configurations_are_one_static_argument(cls):
  one, two = cls.from_dict(VALID[cls]), cls.from_dict(VALID[cls])
  assert hash(one) == hash(two) and len({one, two}) == 1
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(one, dataclasses.fields(cls)[0].name, 1)


def test_a_different_value_is_another_configuration():
  one = ModelConfig.from_dict(MODEL)
  scaling = {**YARN, "beta_fast": 1.0}
  assert one != ModelConfig.from_dict(MODEL | {"rope_scaling": scaling})


@pytest.mark.parametrize(
  ("cls", "field"),
  [
    (cls, field.name)
    for cls in (ModelConfig, DrafterConfig, YarnConfig)
    for field in dataclasses.fields(cls)
    if field.default is dataclasses.MISSING
  ],
)
def test_a_missing_field_is_named(cls, field):
  data = {name: value for name, value in VALID[cls].items() if name != field}
  with pytest.raises(ConfigError, match=rf"{cls.__name__} needs the field '{field}'"):
    cls.from_dict(data)


def test_what_circulates_in_wrong_copies_has_no_default():
  required = {
    f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING
  }
  assert required >= {
    "rope_theta",
    "rope_scaling",
    "rms_norm_eps",
    "latent_norm_eps",
    "routed_scaling_factor",
  }
  assert all(f.default is dataclasses.MISSING for f in dataclasses.fields(YarnConfig))


def test_a_missing_field_of_the_nested_configuration_is_named():
  scaling = {name: value for name, value in YARN.items() if name != "beta_fast"}
  with pytest.raises(ConfigError, match="YarnConfig needs the field 'beta_fast'"):
    ModelConfig.from_dict(MODEL | {"rope_scaling": scaling})


@CLASSES
def test_an_unknown_field_is_named(cls):
  with pytest.raises(ConfigError, match=r"no field 'rope_tehta'"):
    cls.from_dict(VALID[cls] | {"rope_tehta": 1.0})


def test_a_missing_argument_of_the_constructor_is_an_error():
  arguments = {k: v for k, v in TRAIN.items() if k != "learning_rate"}
  with pytest.raises(TypeError, match="learning_rate"):
    TrainConfig(**arguments)


@pytest.mark.parametrize(
  ("cls", "changes", "named"),
  [
    (YarnConfig, {"factor": 0.5}, "factor"),
    (YarnConfig, {"original_max_position_embeddings": 0}, "original_max"),
    *(
      (ModelConfig, {field: value}, field)
      for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "max_position_embeddings",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
      )
      for value in (0, -1, 2.0, True)
    ),
    (ModelConfig, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    (ModelConfig, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    (ModelConfig, {"num_experts_per_tok": 17}, "num_experts_per_tok"),
    (ModelConfig, {"n_group": 3}, "n_group"),
    (ModelConfig, {"topk_group": 5}, "topk_group"),
    (ModelConfig, {"num_experts_per_tok": 9}, "topk_group"),
    (ModelConfig, {"n_shared_experts": -1}, "n_shared_experts"),
    (ModelConfig, {"scoring_func": "tanh"}, "scoring_func"),
    (ModelConfig, {"topk_method": "group_limited_greedy"}, "topk_method"),
    (ModelConfig, {"rope_angle_dtype": "bfloat16"}, "rope_angle_dtype"),
    (ModelConfig, {"hidden_act": "gelu"}, "hidden_act"),
    (ModelConfig, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (ModelConfig, {"attention_bias": True}, "attention_bias"),
    (ModelConfig, {"rms_norm_eps": 0.0}, "rms_norm_eps"),
    (ModelConfig, {"latent_norm_eps": math.nan}, "latent_norm_eps"),
    (ModelConfig, {"rope_theta": 1.0}, "rope_theta"),
    (ModelConfig, {"eos_token_id": [100]}, "eos_token_id"),
    (ModelConfig, {"eos_token_id": [5, -1]}, "eos_token_id"),
    *(
      (DrafterConfig, {field: 0}, field)
      for field in (
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
    ),
    (DrafterConfig, {"block_size": 1}, "block_size"),
    (DrafterConfig, {"mask_token_id": 100}, "mask_token_id"),
    (DrafterConfig, {"mask_token_id": -1}, "mask_token_id"),
    (DrafterConfig, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (DrafterConfig, {"head_dim": 15}, "head_dim"),
    (DrafterConfig, {"target_layer_ids": []}, "target_layer_ids"),
    (DrafterConfig, {"target_layer_ids": [0, 3]}, "target_layer_ids"),
    (DrafterConfig, {"layer_types": ["full_attention"]}, "layer_types"),
    (DrafterConfig, {"layer_types": ["full_attention", "full"]}, "layer_types"),
    (DrafterConfig, {"sliding_window": None}, "sliding_window"),
    (DrafterConfig, {"sliding_window": 0}, "sliding_window"),
    (TreeConfig, {"budget": -1}, "budget"),
    (TreeConfig, {"budget": 46_336}, "budget"),
    (DecodeConfig, {"rows": 46_337}, "rows"),
    (TreeConfig, {"budget": 1.5}, "budget"),
    (TreeConfig, {"max_depth": -1}, "max_depth"),
    (DecodeConfig, {"method": "tree"}, "method"),
    (DecodeConfig, {"budget": -1}, "budget"),
    (DecodeConfig, {"rows": 0}, "rows"),
    (DecodeConfig, {"slots": 0}, "slots"),
    (DecodeConfig, {"cache_len": 0}, "cache_len"),
    (DecodeConfig, {"max_new_tokens": 0}, "max_new_tokens"),
    (DecodeConfig, {"chunk_rounds": 0}, "chunk_rounds"),
    (DecodeConfig, {"prefill_chunk": 0}, "prefill_chunk"),
    (DecodeConfig, {"temperature": -0.5}, "temperature"),
    (DecodeConfig, {"temperature": math.nan}, "temperature"),
    (DecodeConfig, {"temperature": math.inf}, "temperature"),
    (DecodeConfig, {"top_p": 0.0}, "top_p"),
    (DecodeConfig, {"top_p": 1.5}, "top_p"),
    (DecodeConfig, {"top_p": math.nan}, "top_p"),
    (DecodeConfig, {"seed": -1}, "seed"),
    (DecodeConfig, {"seed": 2**32}, "seed"),
    (DecodeConfig, {"seed": 0.5}, "seed"),
    (DecodeConfig, {"implementation": "triton"}, "implementation"),
    (DecodeConfig, {"capture_loop": 1.5}, "capture_loop"),
    (TrainConfig, {"steps": 0}, "steps"),
    (TrainConfig, {"batch_size": 0}, "batch_size"),
    (TrainConfig, {"checkpoint_every": 0}, "checkpoint_every"),
    (TrainConfig, {"warmup_steps": 10}, "warmup_steps"),
    (TrainConfig, {"warmup_steps": -1}, "warmup_steps"),
    (TrainConfig, {"learning_rate": 0.0}, "learning_rate"),
    (TrainConfig, {"learning_rate": math.nan}, "learning_rate"),
    (TrainConfig, {"dpace_smoothing": 1.5}, "dpace_smoothing"),
    (GenerateConfig, {"prompt_length": 0}, "prompt_length"),
    (GenerateConfig, {"prompt_length": 6}, "prompt_length"),
    (GenerateConfig, {"batch_size": 9}, "batch_size"),
    (GenerateConfig, {"batch_size": 0}, "batch_size"),
    (GenerateConfig, {"temperatures": []}, "temperatures"),
    (GenerateConfig, {"temperatures": [0.5, -1.0]}, "temperatures"),
    (GenerateConfig, {"temperatures": [math.nan]}, "temperatures"),
  ],
)
def test_a_value_that_is_not_allowed_is_named(cls, changes, named):
  with pytest.raises(ConfigError, match=rf"\b{named}\w* = "):
    cls.from_dict(VALID[cls] | changes)


@pytest.mark.parametrize(
  ("cls", "changes"),
  [
    (ModelConfig, {"rope_scaling": None}),
    (ModelConfig, {"q_lora_rank": None}),
    # No layer has experts, so nothing about them is asked for.
    (ModelConfig, {"first_k_dense_replace": 3, "n_routed_experts": 0, "n_group": 0}),
    (ModelConfig, {"n_shared_experts": 0, "eos_token_id": [0, 99]}),
    (DrafterConfig, {"layer_types": ["full_attention"] * 2, "sliding_window": None}),
    (TreeConfig, {"budget": 0, "max_depth": 0}),
    (DecodeConfig, {"temperature": 0.0, "top_p": 1.0, "seed": 2**32 - 1, "budget": 0}),
    (TrainConfig, {"warmup_steps": 0}),
    (GenerateConfig, {"batch_size": 8, "prompt_length": 5}),
  ],
)
def test_edges_that_are_allowed(cls, changes):
  config = cls.from_dict(VALID[cls] | changes)
  for field, value in changes.items():
    stored = getattr(config, field)
    assert stored == (tuple(value) if isinstance(value, list) else value)


def scale(**changes) -> float:
  return ModelConfig.from_dict(MODEL | changes).softmax_scale


def test_softmax_scale_of_the_published_models():
  # 192^-0.5 * (0.1 * mscale_all_dim * ln(factor) + 1)^2, by hand.
  assert scale() == pytest.approx(0.1446796, abs=5e-8)
  v3 = YARN | {"factor": 40.0}
  assert scale(rope_scaling=v3) == pytest.approx(0.1352338, abs=5e-8)
  v2_lite = v3 | {"mscale": 0.707, "mscale_all_dim": 0.707}
  assert scale(rope_scaling=v2_lite) == pytest.approx(0.1147214, abs=5e-8)
  # No YaRN, no mscale_all_dim, or no extension: the plain scale.
  for scaling in (None, YARN | {"mscale_all_dim": 0.0}, YARN | {"factor": 1.0}):
    assert scale(rope_scaling=scaling) == 192**-0.5


def test_rope_amplitude_is_a_ratio():
  def amplitude(scaling):
    return ModelConfig.from_dict(MODEL | {"rope_scaling": scaling}).rope_amplitude

  assert amplitude(None) == amplitude(YARN) == 1.0
  grown = 0.1 * math.log(64) + 1
  assert amplitude(YARN | {"mscale_all_dim": 0.0}) == pytest.approx(grown, rel=1e-15)
  half = amplitude(YARN | {"mscale_all_dim": 0.5})
  assert half == pytest.approx(grown / (0.05 * math.log(64) + 1), rel=1e-15)


def test_derived_sizes():
  config = ModelConfig.from_dict(MODEL)
  assert (config.qk_head_dim, config.cache_width) == (192, 576)
  assert [config.is_moe_layer(i) for i in range(3)] == [False, True, True]
  assert DrafterConfig.from_dict(DRAFTER).max_depth == 7


def test_an_experiment_needs_a_model_only():
  experiment = Experiment(model=ModelConfig.from_dict(MODEL))
  assert experiment.decode == DecodeConfig()
  assert experiment.drafter is experiment.target_train is experiment.generate is None
