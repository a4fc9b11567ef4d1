from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import logging

import kdtree_jax as kd
from kdtree_jax.checkpoint import (
  Int4Tensor,
  dequantize,
  load_drafter,
  load_target,
  quantize,
)
from kdtree_jax.checkpoint.hf import (
  CheckpointError,
  read_hf_target,
)
from kdtree_jax.model import Target, target_from_state_dict, target_to_state_dict
from kdtree_jax.model.placement import variables
from kdtree_jax.reference import random_weights
from tests.checkpoint.hf.directories import (
  INDEX,
  SINGLE,
  hub_config,
  packed_int4,
)
from tests.checkpoint.hf.models import (
  BF16,
  WIDE,
  family,
  fp8_model,
  int4_model,
  refused,
  stored_weights,
  transformers_5,
  write,
)
from tests.model.families import family_weights

WIDE_KIMI = family("kimi", **WIDE)


def assert_same_target(got: Target, want: Target) -> None:
  assert got.config == want.config and got.dtype == want.dtype
  assert got.int4_experts == want.int4_experts
  ours, theirs = variables(got), variables(want)
  assert set(ours) == set(theirs)
  for name, variable in ours.items():
    a, b = np.asarray(variable[...]), np.asarray(theirs[name][...])
    assert a.dtype == b.dtype and a.shape == b.shape, name
    assert a.tobytes() == b.tobytes(), name


# Whole models.


@pytest.mark.parametrize("name", ["kimi", "deepseek_v3", "moonlight", "v2_lite"])
@pytest.mark.parametrize("shards", [None, 3])
def test_a_directory_is_the_model(tmp_path, name, shards):
  weights = stored_weights(name)
  write(tmp_path, hub_config(family(name)), weights, shards)
  got = kd.load_checkpoint(tmp_path, "float32")
  as_float32 = {key: w.astype(np.float32) for key, w in weights.items()}
  assert_same_target(got, target_from_state_dict(family(name), as_float32))
  assert isinstance(got, Target) and got.fingerprint is not None


@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64, BF16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_rounded_once(tmp_path, stored, dtype):
  weights = stored_weights("kimi", stored)
  write(tmp_path, hub_config(family("kimi")), weights)
  got = target_to_state_dict(kd.load_checkpoint(tmp_path, dtype))
  for name, array in got.items():
    want = weights[name].astype(np.float32)
    if ".mlp.gate." not in name:
      want = want.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(array, want, err_msg=name)


@pytest.mark.parametrize(
  "name", ["lm_head.weight", "model.layers.0.self_attn.kv_b_proj.weight"]
)
def test_float64_is_rounded_once(tmp_path, name):
  """By way of float32 the value would be a tie, and then 1."""
  weights = stored_weights("kimi", np.float64)
  weights[name] = np.full_like(weights[name], 1 + 2.0**-8 + 2.0**-40)
  write(tmp_path, hub_config(family("kimi")), weights)
  target = kd.load_checkpoint(tmp_path, "bfloat16")
  assert isinstance(target, Target)
  assert np.all(target_to_state_dict(target)[name] == 1.0078125)


@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64, BF16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "name",
  [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.kv_b_proj.weight",
    "model.layers.1.mlp.experts.7.down_proj.weight",
    "model.layers.1.mlp.gate.weight",
  ],
)
def test_weights_that_are_not_finite(tmp_path, stored, dtype, name):
  weights = stored_weights("kimi", stored)
  weights[name] = weights[name].copy()
  weights[name][-1, -1] = -np.inf if stored is BF16 else np.nan
  write(tmp_path, hub_config(family("kimi")), weights, 2)
  with pytest.raises(CheckpointError, match="holds NaN or infinite") as caught:
    kd.load_checkpoint(tmp_path, dtype)
  assert caught.value.what == f"tensor {name!r}"
  assert "-of-00002.safetensors" in caught.value.file


def test_experts_that_int4_cannot_hold(tmp_path):
  weights = {k: w.astype(BF16) for k, w in random_weights(WIDE_KIMI, 0).items()}
  name = "model.layers.1.mlp.experts.7.down_proj.weight"
  weights[name][0, 0] = np.nan
  write(tmp_path, hub_config(WIDE_KIMI), weights)
  with pytest.raises(CheckpointError, match="NaN or infinite") as caught:
    kd.load_checkpoint(tmp_path, expert_dtype="int4")
  assert caught.value.what == f"tensor {name!r}"


def test_the_spelling_of_transformers_5(tmp_path):
  """Tied, no shared experts, pairs of RoPE in halves."""
  config = family("other")
  write(tmp_path, transformers_5(config), dict(family_weights("other")))
  want = target_from_state_dict(config, family_weights("other"))
  assert_same_target(kd.load_checkpoint(tmp_path, "float32"), want)


def test_weights_are_read_when_asked_for(tmp_path):
  weights = stored_weights("kimi")
  write(tmp_path, hub_config(family("kimi")), weights, 2)
  config, lazy, _ = read_hf_target(tmp_path)
  assert list(lazy) == list(weights) and len(lazy) == len(weights)
  assert "x" not in lazy and "lm_head.weight" in lazy
  with pytest.raises(KeyError):
    lazy["x"]
  for name, array in weights.items():
    assert lazy.describe(name) == (array.shape, False)
    got = lazy[name]
    assert got.dtype == array.dtype and got.tobytes() == array.tobytes()
    assert np.shares_memory(got, lazy[name])  # Views of the file.


# FP8.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8(tmp_path, dtype):
  config, want = fp8_model(tmp_path)
  expected = target_from_state_dict(config, want, dtype=jax.numpy.dtype(dtype))
  assert_same_target(kd.load_checkpoint(tmp_path, dtype), expected)


# Int4.


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("expert_dtype", ["as_stored", "int4", "dequantized"])
def test_int4(tmp_path, wrapped, expert_dtype):
  config, want = int4_model(tmp_path, wrapped)
  expected = target_from_state_dict(
    config, want, dtype=jax.numpy.bfloat16, expert_dtype=expert_dtype
  )
  got = kd.load_checkpoint(tmp_path, expert_dtype=expert_dtype)
  assert_same_target(got, expected)
  assert got.int4_experts == (expert_dtype != "dequantized")


def test_int4_experts_are_views(tmp_path):
  _, want = int4_model(tmp_path)
  _, lazy, _ = read_hf_target(tmp_path)
  for name, weight in want.items():
    got = lazy[name]
    int4 = isinstance(weight, Int4Tensor)
    assert lazy.describe(name) == (tuple(weight.shape), int4)
    assert isinstance(got, Int4Tensor) == int4
    if isinstance(got, Int4Tensor) and isinstance(weight, Int4Tensor):
      assert got.packed.tobytes() == weight.packed.tobytes()
      assert got.scales.tobytes() == weight.scales.tobytes()
      assert not got.packed.flags.owndata and not got.packed.flags.writeable


def test_int4_outside_of_experts_becomes_floats(tmp_path):
  """Where nothing but the attention is ignored, dense layers are packed too."""
  config, want = int4_model(tmp_path, wrapped=False)
  document = json.loads((tmp_path / "config.json").read_text())
  ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
  document["quantization_config"]["ignore"] = ignore
  tensors = {}
  for name, weight in want.items():
    if "layers.0.mlp." in name and name.endswith(
      ("gate_proj.weight", "up_proj.weight")
    ):
      want[name] = weight = quantize(np.asarray(weight, np.float32))
    if "layers.0.mlp.down" in name:  # 48 input features are not a multiple of 32.
      document["quantization_config"]["ignore"].append(name.removesuffix(".weight"))
    if isinstance(weight, Int4Tensor):
      tensors |= packed_int4(name, weight)
    else:
      tensors[name] = weight
  write(tmp_path / "other", document, tensors)
  _, lazy, _ = read_hf_target(tmp_path / "other")
  name = "model.layers.0.mlp.up_proj.weight"
  assert isinstance(want[name], Int4Tensor)
  np.testing.assert_array_equal(lazy[name], dequantize(want[name]))
  assert lazy.describe(name) == ((48, 64), False)
  kd.load_checkpoint(tmp_path / "other")


# What is skipped, and said.


def warnings_of(monkeypatch, directory: Path) -> str:
  said = []
  monkeypatch.setattr(logging, "warning", lambda text, *args: said.append(text % args))
  kd.load_checkpoint(directory, "float32")
  return "\n".join(said)


def test_nothing_to_say(tmp_path, monkeypatch):
  write(tmp_path, hub_config(family("kimi")), stored_weights("kimi"))
  assert warnings_of(monkeypatch, tmp_path) == ""


def test_the_vision_tower_is_skipped(tmp_path, monkeypatch):
  int4_model(tmp_path)
  assert "skipped 2 tensors: the vision tower" in warnings_of(monkeypatch, tmp_path)


def test_mtp_layers_are_skipped(tmp_path, monkeypatch):
  weights = stored_weights("deepseek_v3")
  for name in ("enorm.weight", "eh_proj.weight", "shared_head.head.weight"):
    weights[f"model.layers.4.{name}"] = np.ones((2, 2), BF16)
  document = hub_config(family("deepseek_v3"), num_nextn_predict_layers=1)
  write(tmp_path, document, weights)
  said = warnings_of(monkeypatch, tmp_path)
  assert "skipped 3 tensors: layers for multi-token prediction" in said
  document["num_nextn_predict_layers"] = 0
  write(tmp_path, document, weights)
  refused(tmp_path, SINGLE, "model.layers.4.eh_proj.weight", "is unexpected")


def test_rope_buffers_are_skipped(tmp_path, monkeypatch):
  weights = stored_weights("kimi")
  for layer in range(2):
    name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
    weights[name] = np.ones(4, np.float32)
  write(tmp_path, hub_config(family("kimi")), weights)
  said = warnings_of(monkeypatch, tmp_path)
  assert "skipped 2 tensors: frequencies of RoPE" in said


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path, monkeypatch):
  weights = dict(family_weights("other"))
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  document = transformers_5(family("other"))
  write(tmp_path, document, weights)
  assert "the embedding again" in warnings_of(monkeypatch, tmp_path)
  for changed in (
    weights["lm_head.weight"] + 1,
    weights["lm_head.weight"].astype(BF16),
  ):
    write(tmp_path, document, weights | {"lm_head.weight": changed})
    refused(tmp_path, SINGLE, "lm_head.weight", "tie_word_embeddings is true")


# The directory as an argument.


def test_no_such_directory(tmp_path):
  with pytest.raises(FileNotFoundError, match="does not exist"):
    kd.load_checkpoint(tmp_path / "no")
  with pytest.raises(FileNotFoundError, match="does not exist"):
    read_hf_target(tmp_path / "no")
  with pytest.raises(CheckpointError, match=r"config.json: file: is missing"):
    kd.load_checkpoint(tmp_path)


def test_a_drafter_is_told_by_its_config(tmp_path):
  document = {"architectures": ["DFlashDraftModel"]}
  write(tmp_path, document, stored_weights("kimi"))
  with pytest.raises(CheckpointError, match=r"config.json: field dflash_config"):
    kd.load_checkpoint(tmp_path)
  with pytest.raises(CheckpointError, match="model_type"):
    load_target(tmp_path)
  write(tmp_path, hub_config(family("kimi")), stored_weights("kimi"))
  with pytest.raises(CheckpointError):
    load_drafter(tmp_path)


# The fingerprint.


def fingerprint(directory: Path) -> str:
  return read_hf_target(directory)[2]


def test_the_fingerprint_does_not_depend_on_the_files(tmp_path):
  weights = stored_weights("kimi")
  document = hub_config(family("kimi"))
  first = fingerprint(write(tmp_path / "a", document, weights))
  assert first == fingerprint(write(tmp_path / "b", document, weights, 4))
  assert len(first) == 64 and (tmp_path / "b" / INDEX).exists()
  document["initializer_range"] = 1.0
  assert first == fingerprint(write(tmp_path / "c", document, weights))
  assert kd.load_checkpoint(tmp_path / "c").fingerprint == first


def test_the_fingerprint_tells_models_apart(tmp_path):
  weights = stored_weights("kimi")
  document = hub_config(family("kimi"))
  head = weights["lm_head.weight"]
  first, last = head.copy(), head.copy()
  first[0, 0] += 1
  last[-1, -1] += 1
  seen = set()
  for changed in (head, first, last, head.astype(np.float32)):
    write(tmp_path, document, weights | {"lm_head.weight": changed})
    seen.add(fingerprint(tmp_path))
  document["rope_theta"] = 50001.0
  seen.add(fingerprint(write(tmp_path, document, weights)))
  assert len(seen) == 5
