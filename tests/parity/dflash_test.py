"""Published DFlash drafters against a forward pass in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from kdtree_jax.checkpoint.hf.drafter import read_hf_drafter
from kdtree_jax.drafter.dflash import DFlash
from tests.drafter.fake_target import FakeTarget
from tests.parity.dflash_torch import block_logits

# Kimi-K2.6-DFlash: YaRN of factor 64, all but the last layer slide, block of 8, eight
# query heads per key head, heads wider than their share of the hidden size.
KIMI = {
  "architectures": ["DFlashDraftModel"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
  "block_size": 8,
  "bos_token_id": 1,
  "dflash_config": {"mask_token_id": 94, "target_layer_ids": [1, 3, 6, 8]},
  "dtype": "bfloat16",
  "eos_token_id": 2,
  "head_dim": 16,
  "hidden_act": "silu",
  "hidden_size": 64,
  "initializer_range": 0.02,
  "is_causal": False,
  "intermediate_size": 96,
  "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
  "max_position_embeddings": 262144,
  "max_window_layers": 3,
  "model_type": "qwen3",
  "num_attention_heads": 8,
  "num_hidden_layers": 3,
  "num_key_value_heads": 1,
  "num_target_layers": 10,
  "pad_token_id": 95,
  "rms_norm_eps": 1e-5,
  "rope_scaling": {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "type": "yarn",
  },
  "rope_theta": 50000.0,
  "sliding_window": 20,
  "tie_word_embeddings": False,
  "transformers_version": "4.57.3",
  "use_cache": True,
  "use_sliding_window": True,
  "vocab_size": 96,
}
# Qwen3-8B-DFlash-b16: plain RoPE, all layers see everything.
QWEN = KIMI | {
  "block_size": 16,
  "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 9]},
  "head_dim": 8,
  "layer_types": ["full_attention"] * 3,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-6,
  "rope_scaling": None,
  "rope_theta": 1000000.0,
  "sliding_window": None,
  "use_sliding_window": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
  "kimi": KIMI,
  "qwen": QWEN,
  # The spelling of transformers 5; DFlash's values inside dflash_config.
  "new_spelling": {
    k: v for k, v in QWEN.items() if k not in ("block_size", "rope_theta")
  }
  | {
    "dflash_config": QWEN["dflash_config"] | {"block_size": 5, "num_target_layers": 10},
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
  },
  # A window narrower than the block hides the block's far ends from each other.
  "narrow_window": QWEN
  | {
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": 6,
    "use_sliding_window": True,
  },
  # Every layer causal, in so many words; and, where there are none, those that slide.
  "causal": KIMI | {"is_causal": True},
  "causal_slide": {k: v for k, v in KIMI.items() if k != "is_causal"},
  # One layer, one tap, the smallest block.
  "smallest": QWEN
  | {
    "block_size": 2,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
  },
  # Amplitude other than 1: what Hugging Face's formula makes of unequal mscales.
  "amplitude": KIMI | {"rope_scaling": KIMI["rope_scaling"] | {"mscale_all_dim": 0.5}},
}

# Both sides round in float32, in another order. The residual stream is rounded some 20
# times per layer, and its sums of at most 400 terms err like random walks: 3 * 20 *
# sqrt(400) * 2**-24 = 7e-5 of the logits' spread, at most; 6e-6 is what one sees.
TOLERANCE = 1e-4


def write(
  directory: Path, config: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
  """A drafter with lively random weights, as its trainer would publish it."""
  torch.manual_seed(seed)
  width, inner = config["hidden_size"], config["intermediate_size"]
  heads, kv_heads, head = (
    config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
  )
  taps = len(config["dflash_config"]["target_layer_ids"])
  shapes = {"fc": (width, taps * width), "hidden_norm": (width,), "norm": (width,)}
  for i in range(config["num_hidden_layers"]):
    shapes |= {
      f"layers.{i}.input_layernorm": (width,),
      f"layers.{i}.post_attention_layernorm": (width,),
      f"layers.{i}.self_attn.q_proj": (heads * head, width),
      f"layers.{i}.self_attn.k_proj": (kv_heads * head, width),
      f"layers.{i}.self_attn.v_proj": (kv_heads * head, width),
      f"layers.{i}.self_attn.o_proj": (width, heads * head),
      f"layers.{i}.self_attn.q_norm": (head,),
      f"layers.{i}.self_attn.k_norm": (head,),
      f"layers.{i}.mlp.gate_proj": (inner, width),
      f"layers.{i}.mlp.up_proj": (inner, width),
      f"layers.{i}.mlp.down_proj": (width, inner),
    }
  tensors = {}
  for name, shape in shapes.items():
    value = torch.randn(shape)
    value = 1 + 0.3 * value if len(shape) == 1 else value * shape[-1] ** -0.5
    tensors[f"{name}.weight"] = value.to(dtype)
  directory.mkdir()
  (directory / "config.json").write_text(json.dumps(config))
  safetensors.torch.save_file(tensors, directory / "model.safetensors")


def both(directory, features, roots, lengths, amplitude=None):
  """Logits [B, block - 1, V] of the library and of torch."""
  config = json.loads((directory / "config.json").read_text())
  rng = np.random.default_rng(7)
  vocab, width = config["vocab_size"], config["hidden_size"]
  table = rng.standard_normal((vocab, width), np.float32)
  head = rng.standard_normal((vocab, width), np.float32) * np.float32(2 * width**-0.5)

  causal = None if "is_causal" in config else "sliding"
  drafter_config, weights, _ = read_hf_drafter(directory, amplitude, causal)
  drafter = DFlash.from_state_dict(drafter_config, weights, jnp.float32)
  target = FakeTarget(jnp.asarray(table), jnp.asarray(head.T))
  B, T = features.shape[:2]

  @jax.jit
  def draft(drafter, target, features, roots, lengths):
    state = drafter.init_state(B, T)
    start, tokens = jnp.zeros(B, int), jnp.zeros((B, T), int)
    state = drafter.observe(target, state, tokens, features, start, jnp.full(B, T))
    return drafter.draft(target, state, roots, lengths)

  ours = draft(drafter, target, features, roots, lengths)

  tensors = safetensors.torch.load_file(directory / "model.safetensors")
  tensors = {name: value.float() for name, value in tensors.items()}
  theirs = [
    block_logits(
      config,
      tensors,
      torch.from_numpy(table),
      torch.from_numpy(head),
      torch.from_numpy(features[b, :length]).unflatten(-1, (-1, width)),
      int(roots[b]),
      amplitude,
    )
    for b, length in enumerate(lengths)
  ]
  return np.asarray(ours), torch.stack(theirs).numpy()


def text(config: dict[str, Any], lengths: list[int]):
  rng = np.random.default_rng(3)
  width = len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]
  features = rng.standard_normal((len(lengths), max(lengths), width), np.float32)
  roots = rng.integers(0, config["vocab_size"], len(lengths)).astype(np.int32)
  return features, roots, np.array(lengths, np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_block_logits(tmp_path, name, dtype):
  config = CONFIGS[name]
  write(tmp_path / "d", config, dtype, seed=len(name))
  # No context, one token, less than a window, more than one, more than a chunk.
  ours, theirs = both(tmp_path / "d", *text(config, [0, 1, 11, 40, 300]))
  assert np.abs(theirs).max() < 12 and theirs.std() > 1
  error = np.abs(ours - theirs).max(axis=(1, 2))
  assert error.max() < TOLERANCE, error


@pytest.mark.parametrize("name", ["kimi", "qwen", "new_spelling", "amplitude"])
def test_rope_table_is_that_of_transformers(tmp_path, name):
  """At late positions too, where angles of float64 differ by 1e-3."""
  config = CONFIGS[name]
  write(tmp_path / "d", config, torch.float32, seed=0)
  drafter_config, weights, _ = read_hf_drafter(tmp_path / "d")
  drafter = DFlash.from_state_dict(drafter_config, weights, jnp.float32)
  state = drafter.init_state(1, 40_000)
  # By the library class that z-lab's drafters take their RoPE from.
  rope = Qwen3RotaryEmbedding(transformers.Qwen3Config(**config))
  cos, sin = rope(torch.zeros(1), torch.arange(len(state.cos))[None])
  half = config["head_dim"] // 2
  # Angles are the same; one rounding of torch's float32 cosine, values up to 1.2.
  for ours, theirs in ((state.cos, cos), (state.sin, sin)):
    np.testing.assert_allclose(ours, theirs[0, :, :half].numpy(), rtol=0, atol=2e-7)


def test_amplitude_flag(tmp_path):
  write(tmp_path / "d", KIMI, torch.float32, seed=1)
  case = text(KIMI, [5, 60])
  legacy = 1 + 0.1 * np.log(64)
  ours, theirs = both(tmp_path / "d", *case, amplitude=legacy)
  assert np.abs(ours - theirs).max() < TOLERANCE
  published, _ = both(tmp_path / "d", *case)
  assert np.abs(ours - published).max() > 0.1


def test_a_sliding_layer_is_not_a_full_one(tmp_path):
  """The comparison would notice a window that is ignored, or off by one."""
  config = CONFIGS["narrow_window"]
  write(tmp_path / "a", config, torch.float32, seed=2)
  write(tmp_path / "b", config | {"sliding_window": 7}, torch.float32, seed=2)
  case = text(config, [40])
  ours, _ = both(tmp_path / "a", *case)
  _, other = both(tmp_path / "b", *case)
  assert np.abs(ours - other).max() > 0.01
