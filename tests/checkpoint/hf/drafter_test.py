"""DFlash drafters in the published layout: what is read, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.checkpoint import load_drafter, save_drafter
from kdtree_jax.checkpoint.hf.drafter import drafter_config, is_drafter, read_hf_drafter
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.export import export_hf
from kdtree_jax.checkpoint.hf.safetensors import SafetensorsDirectory
from kdtree_jax.checkpoint.hf.safetensors_writer import Tensor, write_safetensors
from kdtree_jax.config import ConfigError, DrafterConfig, ModelConfig, YarnConfig
from kdtree_jax.drafter import check_drafter
from kdtree_jax.reference.weights import random_drafter_weights

YARN = {
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "factor": 64.0,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
  "original_max_position_embeddings": 4096,
  "type": "yarn",
}
CONFIG: dict[str, Any] = {
  "architectures": ["DFlashDraftModel"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
  "block_size": 8,
  "bos_token_id": 0,
  "dflash_config": {"mask_token_id": 30, "target_layer_ids": [1, 3]},
  "dtype": "bfloat16",
  "eos_token_id": 1,
  "head_dim": 8,
  "hidden_act": "silu",
  "hidden_size": 16,
  "initializer_range": 0.02,
  "intermediate_size": 24,
  "layer_types": ["sliding_attention", "full_attention"],
  "max_position_embeddings": 512,
  "max_window_layers": 2,
  "model_type": "qwen3",
  "num_attention_heads": 4,
  "num_hidden_layers": 2,
  "num_key_value_heads": 2,
  "num_target_layers": 6,
  "rms_norm_eps": 1e-5,
  "rope_scaling": YARN,
  "rope_theta": 50000.0,
  "sliding_window": 5,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.57.3",
  "use_cache": True,
  "use_sliding_window": True,
  "vocab_size": 32,
}
EXPECTED = DrafterConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  rms_norm_eps=1e-5,
  rope_theta=50000.0,
  rope_scaling=YarnConfig(**{k: v for k, v in YARN.items() if k != "type"}),
  rope_amplitude=1.0,
  rope_angle_dtype="float32",
  max_position_embeddings=512,
  block_size=8,
  mask_token_id=30,
  target_layer_ids=(1, 3),
  num_target_layers=6,
  target_hidden_size=16,
  layer_types=("sliding_attention", "full_attention"),
  sliding_window=5,
)


def changed(path: str, value: Any = ...) -> dict[str, Any]:
  """CONFIG with one field, "a.b" for an inner one, set or (...) taken out."""
  config = copy.deepcopy(CONFIG)
  *parents, name = path.split(".")
  fields = config
  for parent in parents:
    fields = fields[parent]
  if value is ...:
    del fields[name]
  else:
    fields[name] = value
  return config


def tensors(dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
  weights = random_drafter_weights(EXPECTED, 0)
  return {name: value.astype(dtype) for name, value in weights.items()}


def write(folder: Path, weights: dict[str, np.ndarray], config=CONFIG) -> Path:
  codes = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  rows = [
    Tensor(name, codes[value.dtype.name], value.shape, lambda value=value: value)
    for name, value in weights.items()
  ]
  write_safetensors(folder / "model.safetensors", rows)
  return folder


def test_fields_and_values(tmp_path):
  weights = tensors()
  config, read, fingerprint = read_hf_drafter(write(tmp_path / "d", weights))
  assert config == EXPECTED
  assert sorted(read) == sorted(weights) and len(read) == 25
  for name, value in weights.items():
    assert read[name].dtype == value.dtype
    np.testing.assert_array_equal(read[name], value)
    assert not read[name].flags.writeable
  with pytest.raises(KeyError):
    read["lm_head.weight"]
  # The same weights in a KDTR file have the same fingerprint, others another.
  assert fingerprint == save_drafter(tmp_path / "d.kdtr", config, weights)
  weights["norm.weight"] = weights["norm.weight"] * 2
  assert fingerprint != read_hf_drafter(write(tmp_path / "e", weights))[2]


def test_load_checkpoint_takes_a_directory(tmp_path):
  write(tmp_path / "d", tensors())
  drafter = kd.load_checkpoint(tmp_path / "d", "float32")
  assert isinstance(drafter, kd.drafter.DFlash) and drafter.config == EXPECTED
  fc = tensors()["fc.weight"].astype(np.float32)
  np.testing.assert_array_equal(drafter.fc.kernel[...], fc.T)
  # Back in a directory, it is the same drafter.
  save_drafter(tmp_path / "d.kdtr", EXPECTED, tensors())
  export_hf(tmp_path / "d.kdtr", tmp_path / "e")
  config, read, _ = read_hf_drafter(tmp_path / "e")
  assert config == EXPECTED
  np.testing.assert_array_equal(read["fc.weight"], tensors()["fc.weight"])


def test_amplitude_is_a_flag(tmp_path):
  write(tmp_path / "d", tensors())
  assert read_hf_drafter(tmp_path / "d", 1.416)[0].rope_amplitude == 1.416
  drafter = load_drafter(tmp_path / "d", rope_amplitude=1.416)
  assert drafter.config.rope_amplitude == 1.416
  save_drafter(tmp_path / "d.kdtr", EXPECTED, tensors())
  drafter = load_drafter(tmp_path / "d.kdtr", rope_amplitude=1.416)
  assert drafter.config.rope_amplitude == 1.416
  # Without the flag it is Hugging Face's formula, (0.1 m ln 64 + 1) of both mscales.
  config = drafter_config(changed("rope_scaling.mscale_all_dim", 0.5))
  assert config.rope_amplitude == pytest.approx(1.4158883 / 1.2079442, rel=1e-6)
  for bad in (0, -1.0, "1", True):
    with pytest.raises(ValueError, match="rope_amplitude"):
      read_hf_drafter(tmp_path / "d", bad)
    with pytest.raises(ConfigError, match="rope_amplitude"):
      load_drafter(tmp_path / "d.kdtr", rope_amplitude=bad)


@pytest.mark.parametrize(
  "config",
  [
    # transformers 5 writes RoPE like this.
    {k: v for k, v in CONFIG.items() if k not in ("rope_theta", "rope_scaling")}
    | {"rope_parameters": YARN | {"rope_theta": 50000.0, "rope_type": "yarn"}},
    # z-lab's code looks for its fields inside first, then outside.
    {k: v for k, v in CONFIG.items() if k not in ("block_size", "num_target_layers")}
    | {
      "dflash_config": CONFIG["dflash_config"]
      | {"block_size": 8, "num_target_layers": 6, "mask_token": "<|MASK|>"}
    },
    CONFIG | CONFIG["dflash_config"],
    # What other drafters have, saying that this is none of them.
    CONFIG
    | {"is_causal": False, "draft_vocab_size": 32, "target_hidden_size": 16}
    | {"dflash_config": CONFIG["dflash_config"] | {"projector_type": "dflash"}},
  ],
  ids=["rope_parameters", "inside", "outside", "neutral"],
)
def test_other_spellings_mean_the_same(config):
  assert drafter_config(config) == EXPECTED


@pytest.mark.parametrize(
  ("fields", "inner", "causal"),
  [
    ({"is_causal": False}, {}, "none"),
    ({"is_causal": True}, {}, "all"),
    ({}, {"causal": True}, "all"),
    ({"is_causal": False}, {"causal": False, "is_causal": None}, "none"),
    ({}, {}, "none"),
  ],
)
def test_causal_layers(caplog, fields, inner, causal):
  config = CONFIG | fields | {"dflash_config": CONFIG["dflash_config"] | inner}
  assert drafter_config(config).causal == causal
  # Trainers do not agree on what no word means, so it is said.
  assert ("both sides" in caplog.text) == (not fields and not inner)
  caplog.clear()
  for flag in ("none", "sliding", "all"):
    assert drafter_config(config, causal=flag).causal == flag
  assert caplog.text == ""


def test_causal_fields_must_agree():
  config = changed("dflash_config.causal", True) | {"is_causal": False}
  with pytest.raises(CheckpointError, match="dflash_config.causal"):
    drafter_config(config)


def test_causal_flag_and_export(tmp_path):
  write(tmp_path / "d", tensors())
  save_drafter(tmp_path / "d.kdtr", EXPECTED, tensors())
  for path in (tmp_path / "d", tmp_path / "d.kdtr"):
    assert load_drafter(path, causal="sliding").config.causal == "sliding"
    assert load_drafter(path).config.causal == "none"
    with pytest.raises(ValueError, match="causal = 'some'"):
      load_drafter(path, causal="some")  # type: ignore[arg-type]
  # What is exported leaves nothing open.
  for causal in ("none", "all"):
    config = dataclasses.replace(EXPECTED, causal=causal)
    save_drafter(tmp_path / "d.kdtr", config, tensors())
    export_hf(tmp_path / "d.kdtr", tmp_path / causal)
    assert read_hf_drafter(tmp_path / causal)[0] == config
  config = dataclasses.replace(EXPECTED, causal="sliding")
  save_drafter(tmp_path / "d.kdtr", config, tensors())
  with pytest.raises(ConfigError, match="causal"):
    export_hf(tmp_path / "d.kdtr", tmp_path / "sliding")


@pytest.mark.parametrize(
  ("fields", "kinds", "window"),
  [
    ({"use_sliding_window": False}, "ff", None),
    ({"use_sliding_window": True, "max_window_layers": 2}, "ff", None),
    ({"use_sliding_window": True, "max_window_layers": 1}, "fs", 5),
    ({"use_sliding_window": True, "max_window_layers": 0}, "ss", 5),
    ({"use_sliding_window": True, "max_window_layers": -1}, "ss", 5),
    ({"use_sliding_window": True, "max_window_layers": 10**30}, "ff", None),
  ],
)
def test_layers_without_layer_types_are_those_of_qwen3(fields, kinds, window):
  config = drafter_config(changed("layer_types") | fields)
  assert "".join(kind[0] for kind in config.layer_types) == kinds
  assert config.sliding_window == window


def test_what_is_a_drafter():
  assert is_drafter(CONFIG)
  for name in ("DFlash2DraftModel", "DominoDraftModel", "DSparkDraftModel"):
    assert is_drafter({"architectures": [name]})
  assert not is_drafter({"architectures": ["DeepseekV3ForCausalLM"]})
  assert not is_drafter({}) and not is_drafter({"architectures": None})


REQUIRED = [
  "architectures",
  "dflash_config",
  "model_type",
  "hidden_act",
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "max_position_embeddings",
  "rms_norm_eps",
  "rope_theta",
  "block_size",
  "num_target_layers",
  "sliding_window",
  "use_sliding_window",
  "dflash_config.mask_token_id",
  "dflash_config.target_layer_ids",
  "rope_scaling.factor",
  "rope_scaling.beta_fast",
  "rope_scaling.beta_slow",
  "rope_scaling.mscale",
  "rope_scaling.mscale_all_dim",
  "rope_scaling.original_max_position_embeddings",
  "rope_scaling.type",
]


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_field_is_named(path):
  with pytest.raises(CheckpointError) as caught:
    drafter_config(changed(path), "here/config.json")
  name = "rope_type" if path.endswith(".type") else path.split(".")[-1]
  assert caught.value.file == "here/config.json"
  assert name in caught.value.what


def test_layer_types_are_needed_where_nothing_else_says_them():
  config = changed("layer_types")
  del config["use_sliding_window"]
  with pytest.raises(CheckpointError, match="layer_types: is missing"):
    drafter_config(config)


@pytest.mark.parametrize(
  ("path", "value", "says"),
  [
    ("architectures", ["DFlash2DraftModel"], "DFlash2DraftModel"),
    ("architectures", ["DominoDraftModel"], "DominoDraftModel"),
    ("model_type", "llama", "llama"),
    ("hidden_act", "gelu", "gelu"),
    ("attention_bias", True, "attention_bias"),
    ("is_causal", 1, "is_causal"),
    ("dflash_config.causal", "no", "dflash_config.causal"),
    ("dflash_config.selector_rank", 256, "dflash_config.selector_rank"),
    ("dflash_config.conv_kernel_size", 2, "dflash_config.conv_kernel_size"),
    ("dflash_config.projector_type", "dspark", "dspark"),
    ("dflash_config.attention_mode", "mla", "mla"),
    ("dflash_config.markov_rank", 256, "markov_rank"),
    ("dflash_config.shift_label", True, "shift_label"),
    ("dflash_config.output_multiplier", 0.2, "output_multiplier"),
    ("dflash_config.final_logit_softcapping", 20.0, "final_logit_softcapping"),
    ("dflash_config.block_size", 7, "7, but 8 beside"),
    ("dflash_config.mask_token_id", 32, "mask_token_id = 32"),
    ("dflash_config.mask_token_id", "30", "mask_token_id"),
    ("dflash_config.target_layer_ids", [1, 6], "target_layer_ids = 6"),
    ("dflash_config.target_layer_ids", 3, "target_layer_ids"),
    ("dflash_config.target_layer_ids", [], "target_layer_ids"),
    ("draft_vocab_size", 16, "draft_vocab_size"),
    ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
    ("num_experts", 8, "num_experts"),
    ("block_size", 1, "block_size = 1"),
    ("block_size", 8.0, "block_size"),
    ("hidden_size", "16", "hidden_size"),
    ("hidden_size", 0, "hidden_size"),
    ("num_key_value_heads", 3, "num_key_value_heads"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps"),
    ("rms_norm_eps", 10**400, "rms_norm_eps"),
    ("rope_theta", 1e39, "rope_theta"),
    ("rope_theta", None, "rope_theta"),
    ("rope_scaling.type", "linear", "linear"),
    ("rope_scaling.rope_type", "default", "rope_type"),
    ("rope_scaling.attention_factor", 1.416, "attention_factor"),
    ("rope_parameters", YARN, "rope_parameters"),
    ("layer_types", ["sliding_attention"], "layer_types"),
    ("layer_types", ["chunked_attention"] * 2, "chunked_attention"),
    ("use_sliding_window", False, "use_sliding_window"),
    ("sliding_window", None, "sliding_window"),
    ("sliding_window", 0, "sliding_window"),
  ],
)
def test_a_value_that_is_not_supported_is_named(path, value, says):
  with pytest.raises(CheckpointError, match=says):
    drafter_config(changed(path, value))


def test_tensors_of_another_drafter_are_refused(tmp_path):
  more = {"layers.0.attention_conv.base_kernel": np.zeros((2, 2, 16), np.float32)}
  write(tmp_path / "d", tensors() | more)
  with pytest.raises(CheckpointError, match="unexpected.*another kind") as caught:
    read_hf_drafter(tmp_path / "d")
  assert caught.value.file == str(tmp_path / "d" / "model.safetensors")
  assert "layers.0.attention_conv.base_kernel" in caught.value.what


@pytest.mark.parametrize(
  ("name", "value", "says"),
  [
    ("fc.weight", None, "is missing"),
    ("layers.1.self_attn.q_norm.weight", None, "is missing"),
    ("fc.weight", np.zeros((16, 48), np.float32), r"shape \[16, 48\].*\[16, 32\]"),
    ("norm.weight", np.zeros(15, np.float32), r"shape \[15\].*\[16\]"),
    ("norm.weight", np.zeros(16, np.int32), "dtype I32"),
    ("layers.2.mlp.up_proj.weight", np.zeros((24, 16), np.float32), "unexpected"),
    ("model.norm.weight", np.zeros(16, np.float32), "unexpected"),
    ("lm_head.weight", np.zeros((32, 16), np.float32), "unexpected"),
    ("layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32), "unexpected"),
  ],
)
def test_tensors_that_the_config_does_not_mean(tmp_path, name, value, says):
  weights = tensors() | {name: value}
  write(tmp_path / "d", {k: v for k, v in weights.items() if v is not None})
  with pytest.raises(CheckpointError, match=says) as caught:
    read_hf_drafter(tmp_path / "d")
  assert repr(name) in caught.value.what
  assert "model.safetensors" in caught.value.file


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight"])
def test_weights_that_are_not_finite(tmp_path, name, value):
  weights = tensors()
  weights[name] = weights[name].copy()
  weights[name][..., -1] = value
  write(tmp_path / "d", weights)
  with pytest.raises(CheckpointError, match="holds NaN or infinite") as caught:
    kd.load_checkpoint(tmp_path / "d")
  assert caught.value.file == str(tmp_path / "d" / "model.safetensors")
  assert caught.value.what == f"tensor {name!r}"
  with pytest.raises(ConfigError, match=f"'{name}' holds NaN or infinite"):
    kd.drafter.DFlash.from_state_dict(EXPECTED, weights, finite=True)


def test_files_bound_the_layers(tmp_path):
  """Or 50 bytes of a config would have lists of any length made."""
  config = changed("layer_types") | {"num_hidden_layers": 10**12}
  write(tmp_path / "d", tensors(), config | {"use_sliding_window": False})
  with pytest.raises(CheckpointError, match="more tensors than the 25 there are") as e:
    read_hf_drafter(tmp_path / "d")
  assert e.value.what == "field num_hidden_layers"


def test_loading_reads_every_tensor_once(tmp_path, monkeypatch):
  """And computes no fingerprint, which nobody would look at."""
  write(tmp_path / "d", tensors())
  read, released = [], []
  for name, names in (("read", read), ("release", released)):
    own = getattr(SafetensorsDirectory, name)
    monkeypatch.setattr(
      SafetensorsDirectory,
      name,
      lambda self, name, own=own, names=names: (names.append(name), own(self, name))[1],
    )
  monkeypatch.setattr(SafetensorsDirectory, "bytes_of", None)
  kd.load_checkpoint(tmp_path / "d")
  assert sorted(read) == sorted(tensors()) and released == read[:-1]


def test_missing_files(tmp_path):
  with pytest.raises(FileNotFoundError, match="nowhere"):
    read_hf_drafter(tmp_path / "nowhere")
  with pytest.raises(CheckpointError, match="config.json"):
    read_hf_drafter(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  with pytest.raises(CheckpointError, match="no weights here"):
    read_hf_drafter(tmp_path)


@pytest.mark.parametrize(
  ("field", "value", "says"),
  [
    ("hidden_size", 32, "hidden_size = 16"),
    ("num_hidden_layers", 7, "num_target_layers = 6"),
    ("vocab_size", 64, "vocab_size = 32"),
  ],
)
def test_it_must_belong_to_the_target(tmp_path, field, value, says):
  write(tmp_path / "d", tensors())
  drafter = kd.load_checkpoint(tmp_path / "d", "float32")
  fields: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
    "latent_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_interleave": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
  }
  check_drafter(drafter, ModelConfig(**fields))
  with pytest.raises(ConfigError, match=says):
    check_drafter(drafter, ModelConfig(**(fields | {field: value})))
