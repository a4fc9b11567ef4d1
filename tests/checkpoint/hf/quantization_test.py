from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kdtree_jax.checkpoint.hf.quantization import Quantization
from tests.checkpoint.hf.directories import (
  FP8,
  INT4,
)
from tests.checkpoint.hf.models import (
  config_refused,
  kimi,
  read,
)


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


@pytest.mark.parametrize(
  "rule",
  [
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*(self_attn|shared_experts)\.[a-z_*+{]*proj$",
    r"re:model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13)\..*",
    r"re:^(?!.*experts\.\d+).*\(\)\*",
  ],
)
def test_rules_that_are_taken(tmp_path, rule):
  got = quantized(tmp_path, INT4 | {"ignore": [rule]})
  assert got is not None and got.ignore == (rule,)


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
    (INT4 | {"ignore": ["re:("]}, "ignore", "'re:(' is not a regular expression: "),
    (
      FP8 | {"modules_to_not_convert": ["re:a{9,1}"]},
      "modules_to_not_convert",
      "'re:a{9,1}' is not a regular expression: ",
    ),
    (INT4 | {"ignore": ["re:" + "(" * 9000]}, "ignore", "is not a regular expression"),
    (INT4 | {"ignore": ["re:([a-z]|.)+!"]}, "ignore", "it repeats a group"),
    (INT4 | {"ignore": ["re:(?x)(a|b) *"]}, "ignore", "it repeats a group, or has fl"),
    (INT4 | {"ignore": ["re:" + ".*" * 9 + "!"]}, "ignore", "it is too complicated"),
    (INT4 | {"ignore": ["re:" + "(.|.)" * 40]}, "ignore", "it is too complicated"),
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
  config_refused(tmp_path, document, f"quantization_config.{field}", reason)
