from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.checkpoint.hf import (
  CheckpointError,
  SafetensorsDirectory,
  read_hf_target,
)
from tests.checkpoint.hf.directories import (
  INT4,
  SINGLE,
  hub_config,
  write_json,
  write_tensors,
)
from tests.checkpoint.hf.models import (
  BF16,
  family,
  fp8_model,
  int4_model,
  refused,
  stored_weights,
  write,
)
from tests.model.families import family_weights


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("num_hidden_layers", 10**12),
    ("n_routed_experts", 10**12),
    ("max_position_embeddings", 2**21 + 1),
    ("max_position_embeddings", 10**12),
  ],
)
def test_sizes_that_no_file_bears_out(tmp_path, name, value):
  write(tmp_path, hub_config(family("kimi")) | {name: value}, stored_weights("kimi"))
  with pytest.raises(CheckpointError) as caught:
    read_hf_target(tmp_path)
  assert caught.value.file == str(tmp_path / "config.json")
  named = "num_hidden_layers" if name == "n_routed_experts" else name
  assert f"{named} = " in caught.value.reason


def test_a_missing_tensor(tmp_path):
  for name in family_weights("kimi"):
    weights = stored_weights("kimi")
    del weights[name]
    write(tmp_path, hub_config(family("kimi")), weights)
    refused(tmp_path, "", name, "is missing; the config needs it")


@pytest.mark.parametrize(
  "name",
  [
    "model.layers.2.input_layernorm.weight",
    "model.layers.1.mlp.experts.8.up_proj.weight",
    "model.layers.0.self_attn.o_proj.bias",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.rotary_emb.other",
    "vision_tower.proj.weight",
    "language_model.model.norm.weight",
    "lm_head.weight_scale",
    "x",
  ],
)
def test_an_unexpected_tensor(tmp_path, name):
  weights = stored_weights("kimi") | {name: np.ones((2, 2), BF16)}
  write(tmp_path, hub_config(family("kimi")), weights)
  refused(tmp_path, SINGLE, name, "is unexpected")


@pytest.mark.parametrize(
  "name",
  [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.1.mlp.experts.3.down_proj.weight",
    "model.layers.0.self_attn.kv_b_proj.weight",
  ],
)
def test_a_wrong_shape(tmp_path, name):
  weights = stored_weights("kimi")
  right = list(weights[name].shape)
  for wrong in (weights[name][:-1], weights[name][None], weights[name].reshape(-1)):
    if list(wrong.shape) == right:
      continue
    write(tmp_path, hub_config(family("kimi")), weights | {name: wrong})
    reason = f"has shape {list(wrong.shape)}; the config needs {right}"
    refused(tmp_path, SINGLE, name, reason)


def test_a_config_of_another_model(tmp_path):
  write(tmp_path, hub_config(family("deepseek_v3")), stored_weights("kimi"))
  with pytest.raises(CheckpointError, match="needs? more tensors than|is missing"):
    read_hf_target(tmp_path)
  document = hub_config(family("kimi")) | {"num_hidden_layers": 10**9}
  write_json(tmp_path / "config.json", document)
  with pytest.raises(
    CheckpointError, match="config.json: config: num_hidden_layers = "
  ):
    read_hf_target(tmp_path)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.bool_])
def test_a_weight_that_is_no_float(tmp_path, dtype):
  name = "model.layers.0.mlp.up_proj.weight"
  weights = stored_weights("kimi")
  weights[name] = np.ones(weights[name].shape, dtype)
  write(tmp_path, hub_config(family("kimi")), weights)
  refused(tmp_path, SINGLE, name, "has dtype")


UP = "model.layers.1.mlp.experts.0.up_proj"
FP8_UP = "model.layers.3.mlp.experts.0.up_proj"


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
  files = SafetensorsDirectory(directory)
  return {name: files.read(name) for name in files.entries}


def rewrite(directory: Path, changes: dict[str, np.ndarray | None]) -> Path:
  """One file with some tensors changed or, where None, left out."""
  tensors = read_tensors(directory) | changes
  tensors = {name: t for name, t in tensors.items() if t is not None}
  other = directory / "changed"
  shutil.rmtree(other, ignore_errors=True)
  other.mkdir()
  shutil.copy(directory / "config.json", other)
  write_tensors(other, tensors)
  return other


@pytest.mark.parametrize(
  ("changes", "tensor", "reason"),
  [
    (
      {f"{FP8_UP}.weight_scale_inv": None},
      f"{FP8_UP}.weight",
      "which belongs to it, is miss",
    ),
    (
      {f"{FP8_UP}.weight_scale_inv": np.ones((2, 1), np.float32)},
      f"{FP8_UP}.weight_scale_inv",
      "has shape [2, 1]; the config needs [1, 2]",
    ),
    (
      {f"{FP8_UP}.weight_scale_inv": np.ones((1, 2), np.int32)},
      f"{FP8_UP}.weight_scale_inv",
      "has dtype I32",
    ),
    (
      {f"{FP8_UP}.weight": np.ones((24, 136), BF16)},
      f"{FP8_UP}.weight_scale_inv",
      "is unexpected: ",
    ),
    (
      {"model.norm.weight": np.ones(136, ml_dtypes.float8_e4m3fn)},
      "model.norm.weight",
      "is FP8, which only linear weights may be",
    ),
  ],
)
def test_damaged_fp8(tmp_path, changes, tensor, reason):
  fp8_model(tmp_path)
  refused(rewrite(tmp_path, changes), SINGLE, tensor, reason)


def test_fp8_that_the_config_does_not_say(tmp_path):
  fp8_model(tmp_path)
  document = json.loads((tmp_path / "config.json").read_text())
  document["quantization_config"] = None
  write_json(tmp_path / "config.json", document)
  with pytest.raises(CheckpointError, match="is FP8, which the quantization_config"):
    read_hf_target(tmp_path)


def test_fp8_that_is_not_a_number_is_found_when_it_is_read(tmp_path):
  fp8_model(tmp_path)
  scales = np.full((1, 2), np.nan, np.float32)
  other = rewrite(tmp_path, {f"{FP8_UP}.weight_scale_inv": scales})
  _, lazy, _ = read_hf_target(other)
  with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor '{FP8_UP}.*NaN"):
    lazy[f"{FP8_UP}.weight"]
  with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor '{FP8_UP}.*NaN"):
    kd.load_checkpoint(other)


@pytest.mark.parametrize(
  ("changes", "tensor", "reason"),
  [
    ({f"{UP}.weight_scale": None}, f"{UP}.weight_packed", "is missing"),
    ({f"{UP}.weight_shape": None}, f"{UP}.weight_packed", "is missing"),
    (
      {f"{UP}.weight_packed": None},
      f"{UP}.weight",
      "is missing; the config needs it",
    ),
    (
      {f"{UP}.weight_packed": np.zeros((32, 4), np.int32)},
      f"{UP}.weight_packed",
      "has shape [32, 4]; the config needs [32, 8]",
    ),
    (
      {f"{UP}.weight_packed": np.zeros((32, 8), np.float32)},
      f"{UP}.weight_packed",
      "has dtype F32",
    ),
    (
      {f"{UP}.weight_scale": np.zeros((32, 2), np.float16)},
      f"{UP}.weight_scale",
      "has dtype F16",
    ),
    (
      {f"{UP}.weight_scale": np.zeros((32, 1), BF16)},
      f"{UP}.weight_scale",
      "has shape [32, 1]; the config needs [32, 2]",
    ),
    (
      {f"{UP}.weight_shape": np.array([32, 128], np.int32)},
      f"{UP}.weight_shape",
      "says [32, 128]; the config needs [32, 64]",
    ),
    (
      {f"{UP}.weight": np.zeros((32, 64), BF16)},
      f"{UP}.weight_packed",
      "is a duplicate",
    ),
    (
      {f"{UP}.weight_zero_point": np.zeros((32, 2), np.int32)},
      f"{UP}.weight_zero_point",
      "is unexpected",
    ),
    (
      {f"{UP}.weight_g_idx": np.zeros(64, np.int32)},
      f"{UP}.weight_g_idx",
      "is unexpected",
    ),
  ],
)
def test_damaged_int4(tmp_path, changes, tensor, reason):
  int4_model(tmp_path, wrapped=False)
  other = rewrite(tmp_path, changes)
  file = "" if tensor == f"{UP}.weight" else SINGLE
  refused(other, file, tensor, reason)


def test_int4_where_the_config_says_floats_and_the_other_way(tmp_path):
  int4_model(tmp_path, wrapped=False)
  stem = UP.removesuffix(".0.up_proj")
  ignoring = {"ignore": [*INT4["ignore"], f"re:{stem}.*"]}
  document = json.loads((tmp_path / "config.json").read_text())
  write_json(
    tmp_path / "config.json",
    document | {"quantization_config": INT4 | ignoring},
  )
  with pytest.raises(CheckpointError, match="is packed int4, but the quant"):
    read_hf_target(tmp_path)
  write_json(tmp_path / "config.json", document | {"quantization_config": None})
  with pytest.raises(CheckpointError, match="makes it a plain tensor"):
    read_hf_target(tmp_path)
  document = hub_config(family("kimi"), quantization_config=INT4)
  write(tmp_path / "plain", document, stored_weights("kimi"))
  with pytest.raises(CheckpointError, match="is not packed, but the quant"):
    read_hf_target(tmp_path / "plain")


def test_int4_of_a_size_that_groups_do_not_fit(tmp_path):
  """A dense layer's down projection has 48 input features."""
  others = ["lm_head", "re:.*self_attn", "re:.*shared_experts", "re:.*mlp.(gate|up)_"]
  int4_model(tmp_path, wrapped=False, ignore=others)
  stem = "model.layers.0.mlp.down_proj"
  words = np.zeros((64, 6), np.int32)
  packed = {f"{stem}.weight": None, f"{stem}.weight_packed": words}
  reason = "has 48 input features, which 32 does not divide"
  refused(rewrite(tmp_path, packed), SINGLE, f"{stem}.weight_packed", reason)


def test_int4_scales_that_are_not_numbers(tmp_path):
  int4_model(tmp_path, wrapped=False)
  scales = np.full((32, 2), np.inf, BF16)
  other = rewrite(tmp_path, {f"{UP}.weight_scale": scales})
  with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor '{UP}.*scales hold NaN"):
    kd.load_checkpoint(other)
