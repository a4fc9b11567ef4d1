"""Stored formats against the packages that define them.

FP8 against torch's float8, packed int4 against compressed-tensors, and the container
against safetensors' own reader and writer.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kdtree_jax.checkpoint import dequantize
from kdtree_jax.checkpoint.hf import SafetensorsDirectory
from kdtree_jax.checkpoint.hf.formats import dequantize_fp8, int4_from_words
from kdtree_jax.checkpoint.int4 import pack_int4, unpack_int4

# [out, in] of Kimi K2's experts (gate and up, down), and smaller ones.
KIMI_SHAPES = [(2048, 7168), (7168, 2048)]
SHAPES = [*KIMI_SHAPES, (1, 32), (3, 96), (576, 512)]


def quantized(shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
  """Int8 values in [-8, 7] and bf16 scales of groups of 32."""
  generator = torch.Generator().manual_seed(seed)
  values = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
  scales = torch.rand(shape[0], shape[1] // 32, generator=generator) * 0.02
  return values, scales.to(torch.bfloat16)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
  if tensor.dtype == torch.bfloat16:
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_packed_as_compressed_tensors_packs(shape):
  helpers = pytest.importorskip(
    "compressed_tensors.compressors.pack_quantized.helpers",
    reason="needs compressed-tensors: pip install 'kdtree_jax[parity]'",
  )
  values, scales = quantized(shape, 0)
  words = helpers.pack_to_int32(values, 4)
  assert words.shape == (shape[0], shape[1] // 8) and words.dtype == torch.int32
  ours = int4_from_words(words.numpy(), to_numpy(scales))
  theirs = helpers.unpack_from_int32(words, 4, torch.Size(shape))
  np.testing.assert_array_equal(unpack_int4(ours.packed), theirs.numpy())
  np.testing.assert_array_equal(unpack_int4(ours.packed), values.numpy())
  # And back: our bytes are their words.
  np.testing.assert_array_equal(pack_int4(values.numpy()).view(np.int32), words.numpy())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int4_weights_are_those_of_compressed_tensors(shape, dtype):
  package = pytest.importorskip(
    "compressed_tensors", reason="needs compressed-tensors: see above"
  )
  from compressed_tensors.compressors.pack_quantized import (
    PackedQuantizationCompressor,
  )
  from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

  assert package.__version__
  scheme = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
      num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
    ),
  )
  values, scales = quantized(shape, 1)
  # What they divide by must give the values back: bf16 scales are exact in fp32.
  state = {
    "weight": values.float() * scales.float().repeat_interleave(32, 1),
    "weight_scale": scales.float(),
  }
  packed = PackedQuantizationCompressor.compress(state, scheme)
  assert set(packed) == {"weight_packed", "weight_scale", "weight_shape"}
  assert packed["weight_shape"].tolist() == list(shape)
  # In the dtype of the scales they compute, rounding the product once.
  packed["weight_scale"] = scales.to(getattr(torch, dtype))
  theirs = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
  ours = int4_from_words(packed["weight_packed"].numpy(), to_numpy(scales))
  got = dequantize(ours, dtype)
  assert got.tobytes() == to_numpy(theirs.contiguous()).tobytes()


@pytest.mark.parametrize(
  "shape",
  # Kimi K2's kv_a_proj has 4.5 blocks of rows, the others whole or odd ones.
  [(576, 7168), (2048, 7168), (7168, 2048), (128, 128), (129, 255), (1, 1)],
)
def test_fp8_is_torchs(shape):
  generator = torch.Generator().manual_seed(2)
  codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
  codes[codes & 0x7F == 0x7F] = 0x80  # NaN, of either sign.
  values = codes.view(torch.float8_e4m3fn)
  blocks = tuple(-(-size // 128) for size in shape)
  scales = torch.rand(blocks, generator=generator) * 1e-3
  # DeepSeek-V3's rule (inference/kernel.py, weight_dequant): value * its block's scale.
  spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
  theirs = values.float() * spread[: shape[0], : shape[1]]
  ours = dequantize_fp8(codes.numpy().view(ml_dtypes.float8_e4m3fn), scales.numpy())
  np.testing.assert_array_equal(ours.view(np.int32), theirs.numpy().view(np.int32))
  # Rounded to bfloat16 once, as the published conversion stores it.
  bf16 = to_numpy(theirs.to(torch.bfloat16))
  assert ours.astype(ml_dtypes.bfloat16).tobytes() == bf16.tobytes()


def test_fp8_rounds_as_torch_does():
  """So that what tests quantise is what others would store."""
  weights = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 100
  theirs = weights.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
  ours = weights.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
  np.testing.assert_array_equal(ours, theirs)


def test_files_of_safetensors(tmp_path):
  generator = torch.Generator().manual_seed(4)
  tensors = {
    "bf16": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
    "fp8": torch.randn(130, 7, generator=generator).to(torch.float8_e4m3fn),
    "f16": torch.randn(2, 3, 4, generator=generator).to(torch.float16),
    "f32": torch.randn(1, generator=generator),
    "f64": torch.randn(2, generator=generator, dtype=torch.float64),
    "i32": torch.randint(-9, 9, (4, 4), generator=generator, dtype=torch.int32),
    "i64": torch.tensor(7),
    "u8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
  }
  names = list(tensors)
  weight_map = {}
  for i, part in enumerate((names[::2], names[1::2])):
    file = f"model-{i + 1:05d}-of-00002.safetensors"
    save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map |= dict.fromkeys(part, file)
  index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  directory = SafetensorsDirectory(tmp_path)
  assert list(directory.entries) == sorted(names)
  for name, tensor in tensors.items():
    got = directory.read(name)
    assert got.shape == tuple(tensor.shape), name
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    assert got.tobytes() == raw.tobytes(), name
