"""Targets and drafters as KDTR files: contents, comparison with the config, errors."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import (
  Int4Tensor,
  KdtrError,
  dequantize,
  expected_shapes,
  open_kdtr,
  quantize,
  read_drafter,
  read_kind,
  read_target,
  read_tokenizer_json,
  save_drafter,
  save_target,
  write,
)
from kdtree_jax.config import DrafterConfig, ModelConfig, YarnConfig

BF16 = ml_dtypes.bfloat16

TARGET = ModelConfig(
  vocab_size=48,
  hidden_size=64,
  intermediate_size=40,
  moe_intermediate_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  q_lora_rank=24,
  kv_lora_rank=16,
  qk_nope_head_dim=12,
  qk_rope_head_dim=8,
  v_head_dim=10,
  n_routed_experts=2,
  num_experts_per_tok=1,
  n_shared_experts=2,
  n_group=1,
  topk_group=1,
  norm_topk_prob=True,
  routed_scaling_factor=2.5,
  scoring_func="sigmoid",
  topk_method="noaux_tc",
  first_k_dense_replace=1,
  rms_norm_eps=1e-5,
  latent_norm_eps=1e-6,
  rope_theta=50000.0,
  rope_scaling=YarnConfig(
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
  ),
  rope_interleave=True,
  max_position_embeddings=262144,
  tie_word_embeddings=False,
  eos_token_id=(3, 5),
)

DRAFTER = DrafterConfig(
  vocab_size=48,
  hidden_size=32,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  rms_norm_eps=1e-6,
  rope_theta=10000.0,
  rope_scaling=None,
  max_position_embeddings=4096,
  block_size=8,
  mask_token_id=47,
  target_layer_ids=(0, 1),
  num_target_layers=2,
  target_hidden_size=64,
  layer_types=("sliding_attention", "full_attention"),
  sliding_window=16,
  target_fingerprint="ab" * 32,
)


def weights(config: ModelConfig | DrafterConfig, seed: int = 0) -> dict[str, Any]:
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in expected_shapes(config).items()
  }


def changed(**fields: Any) -> ModelConfig:
  return dataclasses.replace(TARGET, **fields)


def test_shapes_of_a_target_by_hand():
  assert expected_shapes(TARGET) == {
    "model.embed_tokens.weight": (48, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_a_proj.weight": (24, 64),
    "model.layers.0.self_attn.q_a_layernorm.weight": (24,),
    "model.layers.0.self_attn.q_b_proj.weight": (40, 24),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (24, 64),
    "model.layers.0.self_attn.kv_a_layernorm.weight": (16,),
    "model.layers.0.self_attn.kv_b_proj.weight": (44, 16),
    "model.layers.0.self_attn.o_proj.weight": (64, 20),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.layers.0.mlp.gate_proj.weight": (40, 64),
    "model.layers.0.mlp.up_proj.weight": (40, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 40),
    "model.layers.1.input_layernorm.weight": (64,),
    "model.layers.1.self_attn.q_a_proj.weight": (24, 64),
    "model.layers.1.self_attn.q_a_layernorm.weight": (24,),
    "model.layers.1.self_attn.q_b_proj.weight": (40, 24),
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": (24, 64),
    "model.layers.1.self_attn.kv_a_layernorm.weight": (16,),
    "model.layers.1.self_attn.kv_b_proj.weight": (44, 16),
    "model.layers.1.self_attn.o_proj.weight": (64, 20),
    "model.layers.1.post_attention_layernorm.weight": (64,),
    "model.layers.1.mlp.gate.weight": (2, 64),
    "model.layers.1.mlp.gate.e_score_correction_bias": (2,),
    "model.layers.1.mlp.experts.0.gate_proj.weight": (32, 64),
    "model.layers.1.mlp.experts.0.up_proj.weight": (32, 64),
    "model.layers.1.mlp.experts.0.down_proj.weight": (64, 32),
    "model.layers.1.mlp.experts.1.gate_proj.weight": (32, 64),
    "model.layers.1.mlp.experts.1.up_proj.weight": (32, 64),
    "model.layers.1.mlp.experts.1.down_proj.weight": (64, 32),
    "model.layers.1.mlp.shared_experts.gate_proj.weight": (64, 64),
    "model.layers.1.mlp.shared_experts.up_proj.weight": (64, 64),
    "model.layers.1.mlp.shared_experts.down_proj.weight": (64, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (48, 64),
  }


@pytest.mark.parametrize(
  ("fields", "gone", "added"),
  [
    ({"tie_word_embeddings": True}, 1, {}),
    ({"topk_method": "greedy"}, 1, {}),
    ({"n_shared_experts": 0}, 3, {}),
    ({"first_k_dense_replace": 2}, 11, {"model.layers.1.mlp.up_proj.weight": (40, 64)}),
    ({"q_lora_rank": None}, 6, {"model.layers.1.self_attn.q_proj.weight": (40, 64)}),
  ],
)
def test_shapes_follow_the_config(fields: dict[str, Any], gone: int, added):
  before, after = expected_shapes(TARGET), expected_shapes(changed(**fields))
  assert len(set(before) - set(after)) == gone
  assert added.items() <= after.items()
  assert bool(set(after) - set(before)) == bool(added)


def test_shapes_of_a_drafter_by_hand():
  layers = {}
  for i in range(2):
    layers |= {
      f"layers.{i}.input_layernorm.weight": (32,),
      f"layers.{i}.self_attn.q_proj.weight": (32, 32),
      f"layers.{i}.self_attn.k_proj.weight": (16, 32),
      f"layers.{i}.self_attn.v_proj.weight": (16, 32),
      f"layers.{i}.self_attn.o_proj.weight": (32, 32),
      f"layers.{i}.self_attn.q_norm.weight": (8,),
      f"layers.{i}.self_attn.k_norm.weight": (8,),
      f"layers.{i}.post_attention_layernorm.weight": (32,),
      f"layers.{i}.mlp.gate_proj.weight": (40, 32),
      f"layers.{i}.mlp.up_proj.weight": (40, 32),
      f"layers.{i}.mlp.down_proj.weight": (32, 40),
    }
  assert expected_shapes(DRAFTER) == {
    "fc.weight": (32, 128),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    **layers,
  }


def stored_value(name: str, value: np.ndarray, dtype: str, experts: str) -> np.ndarray:
  """What a file of these formats must give back for a weight."""
  if ".mlp.gate." in name:
    return value
  if ".mlp.experts." in name:
    if experts == "int4":
      return dequantize(quantize(value))
    dtype = experts
  return value.astype(dtype).astype(np.float32)


@pytest.mark.parametrize("experts", ["int4", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_target_round_trip(tmp_path: Path, dtype: str, experts: str):
  path = tmp_path / "target.kdtr"
  state = weights(TARGET)
  fingerprint = save_target(path, TARGET, state, expert_format=experts, dtype=dtype)
  config, found, read_fingerprint = read_target(path)
  assert config == TARGET
  assert fingerprint == read_fingerprint
  assert list(found) == list(state)
  for name, value in found.items():
    assert value.dtype == np.float32
    assert not value.flags.writeable
    want = stored_value(name, state[name], dtype, experts)
    np.testing.assert_array_equal(value, want)
  assert read_kind(path) == "target"
  assert read_tokenizer_json(path) is None


@pytest.mark.parametrize(
  "fields",
  [
    {"tie_word_embeddings": True},
    {"topk_method": "greedy", "scoring_func": "softmax"},
    {"n_shared_experts": 0},
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": 2},
    {"q_lora_rank": None, "rope_scaling": None},
  ],
)
def test_target_round_trip_of_the_family(tmp_path: Path, fields: dict[str, Any]):
  config = changed(**fields)
  save_target(tmp_path / "x", config, weights(config))
  found, state, _ = read_target(tmp_path / "x")
  assert found == config
  assert {k: v.shape for k, v in state.items()} == expected_shapes(config)


def test_what_the_file_holds(tmp_path: Path):
  path = tmp_path / "target.kdtr"
  state = weights(TARGET)
  tokenizer = json.dumps({"model": {"type": "BPE", "vocab": {"é": 0}}})
  save_target(path, TARGET, state, tokenizer_json=tokenizer, metadata={"steps": 7})
  assert read_tokenizer_json(path) == tokenizer
  with open_kdtr(path) as file:
    assert file.metadata == {"steps": 7, "tokenizer_json": tokenizer}
    assert file.config["kind"] == "target"
    assert file.config["format_version"] == 1
    assert file.config["dtype"] == "bfloat16"
    assert file.config["expert_format"] == "int4"
    assert ModelConfig.from_dict(file.config["model"]) == TARGET
    dtypes = {name: file.info(name).dtype for name in file.names}
    expert = "model.layers.1.mlp.experts.1.down_proj.weight"
    tensor = quantize(state[expert])
    np.testing.assert_array_equal(file.read_packed(expert), tensor.packed)
    np.testing.assert_array_equal(file.read(f"{expert}_scale"), tensor.scales)
    assert file.info(f"{expert}_scale").shape == (64, 1)
  assert dtypes[expert] == "int4"
  assert dtypes[f"{expert}_scale"] == "bf16"
  assert dtypes["model.layers.1.mlp.gate.weight"] == "f32"
  assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == "f32"
  others = {
    k: v for k, v in dtypes.items() if ".experts." not in k and ".gate." not in k
  }
  assert set(others.values()) == {"bf16"}
  assert "model.layers.1.mlp.shared_experts.up_proj.weight" in others


def test_int4_experts_pass_through_unchanged(tmp_path: Path):
  # A published int4 checkpoint need not be what our quantiser would make of it.
  name = "model.layers.1.mlp.experts.0.up_proj.weight"
  rng = np.random.default_rng(1)
  packed = rng.integers(0, 256, (32, 32), dtype=np.uint8)
  scales = rng.uniform(0.01, 0.1, (32, 2)).astype(BF16)
  tensor = Int4Tensor(packed, scales)
  state = weights(TARGET) | {name: tensor}
  save_target(tmp_path / "int4", TARGET, state)
  with open_kdtr(tmp_path / "int4") as file:
    np.testing.assert_array_equal(file.read_packed(name), packed)
    np.testing.assert_array_equal(file.read(f"{name}_scale"), scales)
  np.testing.assert_array_equal(
    read_target(tmp_path / "int4")[1][name], dequantize(tensor)
  )
  save_target(tmp_path / "f32", TARGET, state, expert_format="float32")
  np.testing.assert_array_equal(
    read_target(tmp_path / "f32")[1][name], dequantize(tensor)
  )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafter_round_trip(tmp_path: Path, dtype):
  path = tmp_path / "drafter.kdtr"
  state = weights(DRAFTER)
  fingerprint = save_drafter(path, DRAFTER, state, dtype)
  config, found, read_fingerprint = read_drafter(path)
  assert config == DRAFTER
  assert fingerprint == read_fingerprint
  assert list(found) == list(state)
  for name, value in found.items():
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, state[name].astype(dtype).astype(np.float32))
  assert read_kind(path) == "drafter"


def test_float64_is_rounded_once(tmp_path: Path):
  """By way of float32 the value would be a tie, and then 1."""
  weights = {name: np.ones(s) for name, s in expected_shapes(TARGET).items()}
  weights["model.norm.weight"][:] = 1 + 2.0**-8 + 2.0**-40
  save_target(tmp_path / "x", TARGET, weights, dtype="bfloat16")
  assert np.all(read_target(tmp_path / "x")[1]["model.norm.weight"] == 1.0078125)


def test_fingerprint_tells_weights_apart(tmp_path: Path):
  prints = {
    save_target(tmp_path / "x", TARGET, weights(TARGET, seed)) for seed in range(3)
  }
  prints.add(save_target(tmp_path / "x", TARGET, weights(TARGET), dtype="float32"))
  assert len(prints) == 4
  again = save_target(tmp_path / "x", TARGET, weights(TARGET), metadata={"a": 1})
  assert again in prints


NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize(
  ("name", "value", "reason"),
  [
    (NORM, None, "is missing"),
    (EXPERT, None, "is missing"),
    ("visual.weight", np.ones(3, np.float32), "is unexpected"),
    (NORM, np.ones(63, np.float32), "is [63], the config needs [64]"),
    (EXPERT, np.ones((64, 32), np.float32), "is [64, 32], the config needs [32, 64]"),
    (NORM, np.ones(64, np.int32), "must be floating point"),
    (NORM, np.full(64, np.nan, np.float32), "NaN"),
    (NORM, np.full(64, 3.4e38, np.float32), "overflows"),
    (EXPERT, np.full((32, 64), np.inf, np.float32), "infinite"),
    (EXPERT, quantize(np.ones((32, 64)), group_size=16), "groups of 16"),
    (
      EXPERT,
      Int4Tensor(np.zeros((32, 32), np.uint8), np.full((32, 2), np.nan, BF16)),
      "scales",
    ),
  ],
)
def test_save_target_refuses_tensors(tmp_path: Path, name: str, value, reason: str):
  state = weights(TARGET)
  if value is None:
    del state[name]
  else:
    state[name] = value
  with pytest.raises(KdtrError) as error:
    save_target(tmp_path / "x", TARGET, state)
  assert name in error.value.field
  assert reason in error.value.reason
  assert os.listdir(tmp_path) == []


def test_save_refuses_arguments(tmp_path: Path):
  state = weights(TARGET)
  with pytest.raises(ValueError, match="expert_format = 'int8'"):
    save_target(tmp_path / "x", TARGET, state, expert_format="int8")  # type: ignore
  with pytest.raises(ValueError, match="dtype = 'float16'"):
    save_target(tmp_path / "x", TARGET, state, dtype="float16")  # type: ignore
  with pytest.raises(ValueError, match="dtype = 'int4'"):
    save_drafter(tmp_path / "x", DRAFTER, weights(DRAFTER), "int4")  # type: ignore
  with pytest.raises(ValueError, match="not JSON"):
    save_target(tmp_path / "x", TARGET, state, tokenizer_json="tokenizer.json")
  with pytest.raises(ValueError, match="reserved"):
    save_target(tmp_path / "x", TARGET, state, metadata={"tokenizer_json": ""})
  odd = changed(moe_intermediate_size=40)
  with pytest.raises(KdtrError, match=r"experts\.0\.down_proj.*multiples of 32"):
    save_target(tmp_path / "x", odd, weights(odd))
  save_target(tmp_path / "y", odd, weights(odd), expert_format="bfloat16")
  assert os.listdir(tmp_path) == ["y"]


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]):
  """Replaces a file by one with other tensors or another config."""
  with open_kdtr(path) as file:
    tensors: dict[str, Any] = {}
    for name in file.names:
      value = file.read(name)
      is_int4 = file.info(name).dtype == "int4"
      tensors[name] = value.astype(ml_dtypes.int4) if is_int4 else value
    config = file.config
  change(config, tensors)
  write(path, tensors, config)


def _drop_field(field: str):
  return lambda c, t: c["model"].pop(field)


def _set_field(field: str, value: Any):
  return lambda c, t: c["model"].update({field: value})


def _set(key: str, value: Any):
  return lambda c, t: c.update({key: value})


def _set_tensor(name: str, value: np.ndarray):
  return lambda c, t: t.update({name: value})


@pytest.mark.parametrize(
  ("change", "field", "reason"),
  [
    (lambda c, t: c.pop("kind"), "config.kind", "is missing"),
    (_set("kind", "encoder"), "config.kind", "'encoder' is not one of"),
    (_set("kind", "drafter"), "config.kind", "holds a drafter, not a target"),
    (_set("format_version", 2), "config.format_version", "is 2"),
    (lambda c, t: c.pop("format_version"), "config.format_version", "is None"),
    (_set("dtype", "float16"), "config.dtype", "'float16' is not one of"),
    (lambda c, t: c.pop("expert_format"), "config.expert_format", "is missing"),
    (_set("model", [1]), "config.model", "must be a JSON object"),
    (_drop_field("rope_theta"), "config.model", "'rope_theta'"),
    (_drop_field("latent_norm_eps"), "config.model", "'latent_norm_eps'"),
    (_set_field("hidden_dim", 1), "config.model", "'hidden_dim'"),
    (_set_field("kv_lora_rank", -1), "config.model", "kv_lora_rank = -1"),
    (_set_field("rms_norm_eps", "1e-5"), "config.model", "must be a number"),
    (_set_field("num_hidden_layers", 2**50), "config.model", "num_hidden_layers"),
    (_set_field("n_routed_experts", 2**50), "config.model", "num_hidden_layers"),
    (_set_field("max_position_embeddings", 2**50), "config.model", "at most 2097152"),
    (_set_field("num_hidden_layers", 3), "tensor 'model.layers.2", "is missing"),
    (_set_field("tie_word_embeddings", True), "tensor 'lm_head", "is unexpected"),
    (_set_field("hidden_size", 96), "tensor 'model.embed", "is [48, 64], the config"),
    (_set_field("moe_intermediate_size", 33), "down_proj", "multiples of 32"),
    (_set("expert_format", "bfloat16"), "_scale'", "is unexpected"),
    (_set("dtype", "float32"), ".dtype", "is bf16, the config says f32"),
    (lambda c, t: t.pop(f"{EXPERT}_scale"), f"{EXPERT}_scale", "is missing"),
    (_set_tensor(NORM, np.ones(64, np.int16)), f"{NORM}'.dtype", "is i16"),
    (
      _set_tensor(f"{EXPERT}_scale", np.ones((32, 1), BF16)),
      f"{EXPERT}_scale'.shape",
      "is [32, 1], the config needs [32, 2]",
    ),
    (
      _set_tensor(f"{EXPERT}_scale", np.full((32, 2), np.nan, BF16)),
      EXPERT,
      "scales hold NaN",
    ),
  ],
)
def test_read_target_refuses(tmp_path: Path, change, field: str, reason: str):
  path = tmp_path / "x.kdtr"
  save_target(path, TARGET, weights(TARGET))
  rewrite(path, change)
  with pytest.raises(KdtrError) as error:
    read_target(path)
  assert field in error.value.field
  assert reason in error.value.reason


@pytest.mark.parametrize(
  ("change", "field", "reason"),
  [
    (_drop_field("mask_token_id"), "config.model", "'mask_token_id'"),
    (_set_field("block_size", 1), "config.model", "block_size = 1"),
    (_set_field("layer_types", ["full_attention"]), "config.model", "layer_types"),
    (_set_field("target_layer_ids", [0]), "fc.weight'.shape", "needs [32, 64]"),
    (_set_field("num_key_value_heads", 4), "k_proj.weight'.shape", "needs [32, 32]"),
    (_set_tensor("selector.weight", np.ones(3)), "selector", "is unexpected"),
  ],
)
def test_read_drafter_refuses(tmp_path: Path, change, field: str, reason: str):
  path = tmp_path / "x.kdtr"
  save_drafter(path, DRAFTER, weights(DRAFTER))
  rewrite(path, change)
  with pytest.raises(KdtrError) as error:
    read_drafter(path)
  assert field in error.value.field
  assert reason in error.value.reason


def test_kinds_are_not_mixed_up(tmp_path: Path):
  save_target(tmp_path / "t", TARGET, weights(TARGET))
  save_drafter(tmp_path / "d", DRAFTER, weights(DRAFTER))
  with pytest.raises(KdtrError, match="holds a target, not a drafter"):
    read_drafter(tmp_path / "t")
  with pytest.raises(KdtrError, match="holds a drafter, not a target"):
    read_target(tmp_path / "d")
  write(tmp_path / "g", {"x": np.ones(3)}, {})
  with pytest.raises(KdtrError, match=r"config\.kind: is missing"):
    read_kind(tmp_path / "g")


def test_tokenizer_must_be_text(tmp_path: Path):
  write(tmp_path / "x", {}, {}, {"tokenizer_json": {"model": 1}})
  with pytest.raises(KdtrError, match=r"metadata\.tokenizer_json"):
    read_tokenizer_json(tmp_path / "x")


def test_damage_is_an_error_and_not_another_model(tmp_path: Path):
  path = tmp_path / "x.kdtr"
  save_target(path, TARGET, weights(TARGET))
  contents = bytearray(path.read_bytes())
  for at in np.random.default_rng(0).integers(0, len(contents), 100):
    contents[at] ^= 4
    path.write_bytes(contents)
    with pytest.raises(KdtrError):
      read_target(path)
    contents[at] ^= 4
