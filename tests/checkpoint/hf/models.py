"""Small models as Hugging Face directories, and how those are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.checkpoint import (
  Int4Tensor,
  quantize,
)
from kdtree_jax.checkpoint.hf import (
  CheckpointError,
  read_hf_target,
)
from kdtree_jax.checkpoint.hf.config import HfConfig, read_config
from kdtree_jax.config import ModelConfig
from kdtree_jax.reference import random_weights
from kdtree_jax.reference.weights import weight_shapes
from tests.checkpoint.hf.directories import (
  FP8,
  INT4,
  fp8_blocks,
  hub_config,
  kimi_wrapper,
  packed_int4,
  write_json,
  write_tensors,
)
from tests.model.families import family_config, family_weights

BF16 = ml_dtypes.bfloat16
# Sizes of which int4 groups are multiples.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}


def family(name: str, **changes: Any) -> ModelConfig:
  model_type = "deepseek_v2" if name == "v2_lite" else "deepseek_v3"
  ours = {"rope_angle_dtype": "float32", "model_type": model_type, "bos_token_id": 0}
  return family_config(name, **(ours | changes))


def kimi() -> dict[str, Any]:
  return hub_config(family("kimi"))


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


def stored_weights(name: str, dtype=BF16) -> dict[str, np.ndarray]:
  """Random weights as they are published: the correction bias is always float32."""
  return {
    key: w if "e_score" in key else w.astype(dtype)
    for key, w in family_weights(name).items()
  }


def write(
  directory: Path,
  document: dict[str, Any],
  tensors: dict[str, np.ndarray],
  shards: int | None = None,
) -> Path:
  write_tensors(directory, tensors, shards)
  write_json(directory / "config.json", document)
  return directory


def fp8_model(directory: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
  """A DeepSeek-V3 with partial blocks; returns what its weights are in float32."""
  config = family("deepseek_v3", hidden_size=136, intermediate_size=260)
  rng = np.random.default_rng(3)
  tensors, want = {}, {}
  for name, shape in weight_shapes(config).items():
    weight = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    if name.endswith("proj.weight") or "with_mqa" in name:
      values, scales = fp8_blocks(weight)
      tensors |= {name: values, f"{name}_scale_inv": scales}
      spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
      want[name] = values.astype(np.float32) * spread
    else:
      tensors[name] = weight.astype(np.float32 if "e_score" in name else BF16)
      want[name] = tensors[name].astype(np.float32)
  write(directory, hub_config(config, quantization_config=FP8), tensors, 2)
  return config, want


def int4_model(
  directory: Path, wrapped: bool = True, **changes: Any
) -> tuple[ModelConfig, dict[str, np.ndarray | Int4Tensor]]:
  """A Kimi K2.6: int4 experts, bf16 else, a vision tower around."""
  config = family("kimi", model_type="kimi_k2", **WIDE)
  prefix = "language_model." if wrapped else ""
  tensors: dict[str, np.ndarray] = {}
  want: dict[str, np.ndarray | Int4Tensor] = {}
  for name, weight in random_weights(config, 5).items():
    if ".mlp.experts." in name:
      want[name] = int4 = quantize(weight)
      tensors |= packed_int4(prefix + name, int4)
    else:
      tensors[prefix + name] = weight if "e_score" in name else weight.astype(BF16)
      want[name] = tensors[prefix + name]
  if wrapped:
    tensors["vision_tower.patch_embed.proj.weight"] = np.ones((2, 2), BF16)
    tensors["mm_projector.linear.bias"] = np.ones(2, BF16)
  document = hub_config(config, quantization_config=INT4 | changes)
  write(directory, kimi_wrapper(document) if wrapped else document, tensors, 3)
  return config, want


def read(directory: Path, document: Any, generation: Any = None) -> HfConfig:
  write_json(directory / "config.json", document)
  if generation is not None:
    write_json(directory / "generation_config.json", generation)
  return read_config(directory)


def config_refused(
  directory: Path, document: Any, field: str, reason: str, file: str = "config.json"
) -> None:
  write_json(directory / "config.json", document)
  with pytest.raises(CheckpointError) as caught:
    read_config(directory)
  error = caught.value
  assert error.file == str(directory / file)
  assert error.what == (field if field == "config" else f"field {field}")
  assert reason in error.reason, error.reason


def refused(directory: Path, file: str, tensor: str, reason: str) -> None:
  """Before any value is read; nothing is built."""
  with pytest.raises(CheckpointError) as caught:
    read_hf_target(directory)
  error = caught.value
  assert error.file == str(directory / file)
  assert error.what == f"tensor {tensor!r}", error
  assert reason in error.reason, error.reason
  with pytest.raises(CheckpointError):
    kd.load_checkpoint(directory)
