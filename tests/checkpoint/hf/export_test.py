"""KDTR files as Hugging Face directories: contents, round trips, refusals."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_jax.checkpoint import (
  KdtrError,
  expected_shapes,
  open_kdtr,
  read_target_as_stored,
  read_tokenizer_files,
  save_drafter,
  save_target,
)
from kdtree_jax.checkpoint.hf import SafetensorsDirectory, read_hf_target
from kdtree_jax.checkpoint.hf import export as export_module
from kdtree_jax.checkpoint.hf.convert import convert_hf
from kdtree_jax.checkpoint.hf.drafter import read_hf_drafter
from kdtree_jax.checkpoint.hf.export import export_hf
from kdtree_jax.checkpoint.int4 import unpack_int4
from kdtree_jax.config import ConfigError, ModelConfig
from tests.checkpoint.state_dict_test import DRAFTER, TARGET, changed, weights

TOKENIZER = json.dumps(
  {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<end>"}, {"id": 7, "content": "<start>"}],
  }
)

V2 = changed(
  scoring_func="softmax",
  topk_method="greedy",
  norm_topk_prob=False,
  q_lora_rank=None,
  rope_scaling=None,
  tie_word_embeddings=True,
  model_type="deepseek_v2",
)


def saved(path: Path, config: ModelConfig = TARGET, **options: Any) -> Path:
  save_target(path, config, weights(config), **options)
  return path


@pytest.mark.parametrize("expert_format", ["int4", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_there_and_back_gives_the_same_tensors(tmp_path, dtype, expert_format):
  path = saved(tmp_path / "x", dtype=dtype, expert_format=expert_format)
  export_hf(path, tmp_path / "hf")
  convert_hf(tmp_path / "hf", tmp_path / "y", dtype=dtype, expert_format=expert_format)
  x, y = open_kdtr(path), open_kdtr(tmp_path / "y")
  assert x.fingerprint == y.fingerprint
  assert x.names == y.names
  assert y.config["model"].pop("rope_angle_dtype") == "float32"
  assert x.config["model"].pop("rope_angle_dtype") == "float64"
  assert x.config == y.config


@pytest.mark.parametrize(
  "config",
  [
    V2,
    changed(q_lora_rank=None, rope_interleave=False, eos_token_id=(4,)),
    changed(eos_token_id=(), bos_token_id=7, tie_word_embeddings=True),
    changed(first_k_dense_replace=2, n_shared_experts=0),  # No expert at all.
    changed(n_shared_experts=0),
    changed(n_routed_experts=4, n_group=2, num_experts_per_tok=2, rope_scaling=None),
  ],
)
def test_other_configs_there_and_back(tmp_path, config):
  path = saved(tmp_path / "x", config)
  export_hf(path, tmp_path / "hf")
  found, _, _ = read_hf_target(tmp_path / "hf")
  assert found == dataclasses.replace(config, rope_angle_dtype="float32")
  convert_hf(tmp_path / "hf", tmp_path / "y")
  assert open_kdtr(path).fingerprint == open_kdtr(tmp_path / "y").fingerprint


def test_a_drafter_there_and_back(tmp_path):
  save_drafter(tmp_path / "x", DRAFTER, weights(DRAFTER))
  export_hf(tmp_path / "x", tmp_path / "hf")
  found, tensors, fingerprint = read_hf_drafter(tmp_path / "hf")
  assert found == dataclasses.replace(
    DRAFTER, rope_angle_dtype="float32", target_fingerprint=None
  )
  assert set(tensors) == set(expected_shapes(DRAFTER))
  assert fingerprint == open_kdtr(tmp_path / "x").fingerprint
  convert_hf(tmp_path / "hf", tmp_path / "y")
  assert open_kdtr(tmp_path / "y").fingerprint == fingerprint


def test_config_of_a_target(tmp_path):
  export_hf(saved(tmp_path / "x", changed(bos_token_id=7)), tmp_path / "hf")
  config = json.loads((tmp_path / "hf" / "config.json").read_text())
  quantization = config.pop("quantization_config")
  assert config == {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 40,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
      "type": "yarn",
      "factor": 64.0,
      "original_max_position_embeddings": 4096,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "mscale": 1.0,
      "mscale_all_dim": 1.0,
    },
    "rope_interleave": True,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 7,
    "eos_token_id": [3, 5],
  }
  weights_of = quantization["config_groups"]["group_0"]["weights"]
  assert quantization["quant_method"] == "compressed-tensors"
  assert quantization["format"] == "pack-quantized"
  assert (weights_of["num_bits"], weights_of["group_size"]) == (4, 32)
  generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
  assert generation == {"bos_token_id": 7, "eos_token_id": [3, 5], "do_sample": False}


def test_int4_words_by_hand(tmp_path):
  """Element k stands in bits 4 (k mod 8) of word k // 8, plus 8."""
  path = saved(tmp_path / "x")
  export_hf(path, tmp_path / "hf")
  files = SafetensorsDirectory(tmp_path / "hf")
  _, stored, _ = read_target_as_stored(path)
  for name, tensor in stored.items():
    if ".mlp.experts." not in name:
      continue
    stem = name.removesuffix(".weight")
    words = files.read(f"{stem}.weight_packed").astype(np.int64) & 0xFFFFFFFF
    nibbles = (words[..., None] >> (4 * np.arange(8))) & 0xF
    values = unpack_int4(tensor.packed)
    np.testing.assert_array_equal(nibbles.reshape(values.shape) - 8, values)
    assert files.entries[f"{stem}.weight_packed"].dtype == "I32"
    np.testing.assert_array_equal(
      files.read(f"{stem}.weight_scale").view(np.uint16),
      tensor.scales.view(np.uint16),
    )
    assert files.read(f"{stem}.weight_shape").tolist() == list(values.shape)


def test_bytes_of_a_single_file(tmp_path):
  path = saved(tmp_path / "x", dtype="float32")
  export_hf(path, tmp_path / "hf", expert_format="float32")
  assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()
  raw = (tmp_path / "hf" / "model.safetensors").read_bytes()
  (length,) = struct.unpack_from("<Q", raw)
  assert length % 8 == 0
  header = json.loads(raw[8 : 8 + length])
  assert header.pop("__metadata__") == {"format": "pt"}
  assert list(header) == list(expected_shapes(TARGET))
  end = 0
  for name, row in header.items():
    start, stop = row["data_offsets"]
    assert start == end
    end = stop
    array = np.frombuffer(raw[8 + length :][start:stop], "<f4").reshape(row["shape"])
    if ".experts." not in name:
      np.testing.assert_array_equal(array, weights(TARGET)[name])
  assert end == len(raw) - 8 - length


def test_shards_and_their_index(tmp_path):
  path = saved(tmp_path / "x")
  export_hf(path, tmp_path / "one")
  export_hf(path, tmp_path / "many", max_shard_bytes=5000)
  index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
  names = sorted(set(index["weight_map"].values()))
  assert len(names) > 3
  assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
  one, many = (SafetensorsDirectory(tmp_path / d) for d in ("one", "many"))
  assert one.entries.keys() == many.entries.keys() == index["weight_map"].keys()
  for name in one.entries:
    assert bytes(one.bytes_of(name)) == bytes(many.bytes_of(name))
  sizes = [len(one.bytes_of(name)) for name in one.entries]
  assert index["metadata"]["total_size"] == sum(sizes)
  for name in names:
    inside = [
      len(many.bytes_of(t)) for t, f in index["weight_map"].items() if f == name
    ]
    assert sum(inside) <= 5000 or len(inside) == 1
  assert read_hf_target(tmp_path / "one")[2] == read_hf_target(tmp_path / "many")[2]


def test_tokenizer_and_its_special_tokens(tmp_path):
  path = saved(tmp_path / "x", changed(bos_token_id=7), tokenizer_json=TOKENIZER)
  export_hf(path, tmp_path / "hf")
  assert (tmp_path / "hf" / "tokenizer.json").read_text() == TOKENIZER
  config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
  assert (config["bos_token"], config["eos_token"]) == ("<start>", "<end>")


@pytest.mark.parametrize(
  "name",
  [
    *("config.json", "generation_config.json", "model.safetensors", "evil.py", ".."),
    *("", ".", "/tmp/x", "a/tokenizer.json", "additional_chat_templates"),
    *("additional_chat_templates/../x.jinja", "additional_chat_templates/a.py"),
    *("additional_chat_templates/a\\b.jinja", "additional_chat_templates/c:d.jinja"),
    *("additional_chat_templates//a.jinja", "additional_chat_templates/a\0.jinja"),
    "tokenizer.json",
  ],
)
def test_only_files_of_a_tokenizer_are_written(tmp_path, name):
  """What a KDTR file holds beside it may be anybody's."""
  metadata = {"tokenizer_files": {name: "{}"}}
  path = saved(tmp_path / "x", tokenizer_json=TOKENIZER, metadata=metadata)
  with pytest.raises(KdtrError, match="metadata.tokenizer_files"):
    read_tokenizer_files(path)
  with pytest.raises(KdtrError, match="metadata.tokenizer_files"):
    export_hf(path, tmp_path / "hf")
  assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (changed(latent_norm_eps=1e-5), "latent_norm_eps = 1e-05"),
    (changed(topk_method="greedy"), "topk_method = 'greedy'"),
    (changed(n_group=2, topk_group=2), "n_group = 2"),
    (
      dataclasses.replace(V2, norm_topk_prob=True),
      "norm_topk_prob = True",
    ),
    (dataclasses.replace(V2, rope_interleave=False), "rope_interleave = False"),
    (
      changed(rope_scaling=dataclasses.replace(TARGET.rope_scaling, mscale=0.0)),
      "rope_scaling.mscale = 0.0",
    ),
  ],
)
def test_what_transformers_computes_otherwise_is_refused(tmp_path, config, message):
  path = saved(tmp_path / "x", config)
  with pytest.raises(ConfigError, match=message):
    export_hf(path, tmp_path / "hf")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


def test_a_drafter_of_another_amplitude_is_refused(tmp_path):
  config = dataclasses.replace(DRAFTER, rope_amplitude=1.4)
  save_drafter(tmp_path / "x", config, weights(config))
  with pytest.raises(ConfigError, match="rope_amplitude = 1.4"):
    export_hf(tmp_path / "x", tmp_path / "hf")


def test_nothing_is_left_by_a_failed_export(tmp_path):
  path = saved(tmp_path / "x")
  raw = bytearray(path.read_bytes())
  raw[-100] ^= 1
  path.write_bytes(raw)
  with pytest.raises(KdtrError, match=r"tensor 'lm_head.weight'.crc32"):
    export_hf(path, tmp_path / "hf")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
  path = saved(tmp_path / "x")

  def fail(*args: Any) -> None:
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(export_module, "write_safetensors", fail)
  with pytest.raises(OSError, match="No space"):
    export_hf(path, tmp_path / "hf")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


def test_directories_that_exist(tmp_path):
  path = saved(tmp_path / "x")
  (tmp_path / "empty").mkdir()
  export_hf(path, tmp_path / "empty")
  assert (tmp_path / "empty" / "config.json").exists()
  with pytest.raises(FileExistsError, match="not empty"):
    export_hf(path, tmp_path / "empty")
  with pytest.raises(FileExistsError, match="is a file"):
    export_hf(path, path)


@pytest.mark.parametrize("name", [".", "/", "new/.."])
def test_directories_without_a_name_of_their_own(tmp_path, monkeypatch, name):
  path = saved(tmp_path / "x")
  here = tmp_path / "here"
  here.mkdir()
  monkeypatch.chdir(here)
  with pytest.raises((FileExistsError, ValueError), match=f"directory = {name} ") as e:
    export_hf(path, name)
  assert isinstance(e.value, FileExistsError) == (name == "/")
  assert list(here.iterdir()) == []


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"dtype": "float16"}, "dtype = 'float16'"),
    ({"expert_format": "fp8"}, "expert_format = 'fp8'"),
    ({"max_shard_bytes": 0}, "max_shard_bytes = 0"),
  ],
)
def test_arguments(tmp_path, arguments, message):
  with pytest.raises(ValueError, match=message):
    export_hf(saved(tmp_path / "x"), tmp_path / "hf", **arguments)


def test_progress(tmp_path):
  steps: list[tuple[int, int]] = []
  export_hf(
    saved(tmp_path / "x"),
    tmp_path / "hf",
    max_shard_bytes=5000,
    progress=lambda done, total: steps.append((done, total)),
  )
  assert steps == sorted(steps)
  assert steps[-1][0] == steps[-1][1] > 0
