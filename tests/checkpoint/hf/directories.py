"""Hugging Face directories for tests, written from the published formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kdtree_jax.checkpoint import Int4Tensor
from kdtree_jax.config import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODES = {
  np.dtype(np.bool_): "BOOL",
  np.dtype(np.uint8): "U8",
  np.dtype(np.int32): "I32",
  np.dtype(np.int64): "I64",
  np.dtype(np.float16): "F16",
  np.dtype(ml_dtypes.bfloat16): "BF16",
  np.dtype(np.float32): "F32",
  np.dtype(np.float64): "F64",
  np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
  np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}

FP8 = {
  "activation_scheme": "dynamic",
  "fmt": "e4m3",
  "quant_method": "fp8",
  "weight_block_size": [128, 128],
}
# Kimi K2.6's.
INT4 = {
  "config_groups": {
    "group_0": {
      "input_activations": None,
      "output_activations": None,
      "targets": ["Linear"],
      "weights": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
      },
    }
  },
  "format": "pack-quantized",
  "ignore": [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:vision_tower.*",
    "re:mm_projector.*",
  ],
  "kv_cache_scheme": None,
  "quant_method": "compressed-tensors",
  "quantization_status": "compressed",
}


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
  """A safetensors file's contents."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  data = b""
  for name, array in tensors.items():
    start = len(data)
    data += np.ascontiguousarray(array).tobytes()
    header[name] = {
      "dtype": CODES[array.dtype],
      "shape": list(array.shape),
      "data_offsets": [start, len(data)],
    }
  return with_header(header, data)


def with_header(header: Any, data: bytes) -> bytes:
  text = header if isinstance(header, str) else json.dumps(header)
  encoded = text.encode()
  return struct.pack("<Q", len(encoded)) + encoded + data


def shard_name(i: int, shards: int) -> str:
  return f"model-{i + 1:05d}-of-{shards:05d}.safetensors"


def write_tensors(
  directory: Path, tensors: Mapping[str, np.ndarray], shards: int | None = None
) -> None:
  """Writes one file, or so many and their index; neighbours go to different ones."""
  directory.mkdir(parents=True, exist_ok=True)
  if shards is None:
    (directory / SINGLE).write_bytes(safetensors_bytes(tensors))
    return
  weight_map = {}
  for i in range(shards):
    part = {name: tensors[name] for name in list(tensors)[i::shards]}
    (directory / shard_name(i, shards)).write_bytes(safetensors_bytes(part))
    weight_map |= dict.fromkeys(part, shard_name(i, shards))
  write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, document: Any) -> None:
  path.write_text(json.dumps(document, indent=1))


def hub_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
  """The `config.json` that a model of this kind is published with."""
  values = config.to_dict()
  for name in ("latent_norm_eps", "rope_interleave", "rope_angle_dtype"):
    del values[name]  # The published ones do not have them.
  yarn = values.pop("rope_scaling")
  if yarn is not None:
    values["rope_scaling"] = yarn | {"type": "yarn"}
  version = 2 if config.model_type == "deepseek_v2" else 3
  eos = list(config.eos_token_id)
  return (
    values
    | {
      "architectures": [f"DeepseekV{version}ForCausalLM"],
      "auto_map": {"AutoConfig": f"configuration_deepseek.DeepseekV{version}Config"},
      "attention_dropout": 0.0,
      "aux_loss_alpha": 0.001,
      "eos_token_id": eos[0] if len(eos) == 1 else eos,
      "ep_size": 1,
      "initializer_range": 0.02,
      "num_key_value_heads": config.num_attention_heads,
      "num_nextn_predict_layers": 0,
      "pretraining_tp": 1,
      "seq_aux": True,
      "torch_dtype": "bfloat16",
      "transformers_version": "4.46.3",
      "use_cache": True,
    }
    | changes
  )


def kimi_wrapper(text: dict[str, Any], **changes: Any) -> dict[str, Any]:
  """The `config.json` of Kimi K2.5 and K2.6 around a text model's."""
  return {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": text["bos_token_id"],
    "dtype": "bfloat16",
    "eos_token_id": text["eos_token_id"],
    "ignore_index": -100,
    "media_placeholder_token_id": 1,
    "model_type": "kimi_k25",
    "pad_token_id": 2,
    "text_config": text,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"patch_size": 14, "vt_hidden_size": 8},
  } | changes


def packed_int4(name: str, tensor: Int4Tensor) -> dict[str, np.ndarray]:
  """A weight as compressed-tensors packs it."""
  stem = name.removesuffix(".weight")
  return {
    f"{stem}.weight_packed": tensor.packed.view("<i4"),
    f"{stem}.weight_scale": tensor.scales,
    f"{stem}.weight_shape": np.array(tensor.shape, np.int32),
  }


def fp8_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(e4m3 [N, K], f32 scales per 128x128 block), by DeepSeek-V3's own rule."""
  rows, columns = (-(-size // 128) for size in weight.shape)
  scales = np.empty((rows, columns), np.float32)
  values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
  for r in range(rows):
    for c in range(columns):
      block = np.s_[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)]
      scales[r, c] = np.abs(weight[block]).max() / 448
      values[block] = (weight[block] / scales[r, c]).astype(values.dtype)
  return values, scales
