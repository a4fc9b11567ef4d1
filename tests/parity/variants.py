"""Checkpoints of every kind: tiny, random, in the files that the hub would hold.

Each variant changes what changes the numbers, from Kimi K2.6 outwards. Sizes are all
different, so that none can stand for another.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.oracle import Oracle

VOCAB = 97


def yarn(factor: float = 64.0, theta: float = 50000.0, **changes: Any) -> dict:
  """Rope parameters as `transformers` spells them; Kimi K2.6's unless changed."""
  return {
    "rope_type": "yarn",
    "rope_theta": theta,
    "factor": factor,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
  } | changes


def plain(theta: float) -> dict:
  """Rope parameters without context extension."""
  return {"rope_type": "default", "rope_theta": theta}


KIMI: dict[str, Any] = {
  "vocab_size": VOCAB,
  "hidden_size": 64,
  "intermediate_size": 88,
  "moe_intermediate_size": 44,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "q_lora_rank": 40,
  "kv_lora_rank": 32,
  "qk_nope_head_dim": 20,
  "qk_rope_head_dim": 16,
  "v_head_dim": 24,
  "n_routed_experts": 12,
  "num_experts_per_tok": 3,
  "n_shared_experts": 1,
  "n_group": 1,
  "topk_group": 1,
  "norm_topk_prob": True,
  "routed_scaling_factor": 2.827,
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
  "first_k_dense_replace": 1,
  "moe_layer_freq": 1,
  "hidden_act": "silu",
  "attention_bias": False,
  "rms_norm_eps": 1e-5,
  "rope_parameters": yarn(),
  "max_position_embeddings": 256,
  "tie_word_embeddings": False,
  "num_nextn_predict_layers": 0,
  "bos_token_id": 90,
  "eos_token_id": 91,
}

VISION = {
  "patch_size": 2,
  "hidden_size": 16,
  "num_attention_heads": 2,
  "num_hidden_layers": 1,
  "intermediate_size": 32,
  "pos_emb_height": 4,
  "pos_emb_width": 4,
  "pos_emb_time": 2,
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """A checkpoint and how it is published.

  Attributes:
    changes: of the fields of `KIMI`.
    model_type: that config.json names. `transformers` 5.24 does not know "kimi_k2", and
      would leave its experts apart: it runs the same model as "deepseek_v3".
    hub_spelling: whether config.json has `rope_theta` and `rope_scaling`, as published
      files have, and not the `rope_parameters` of `transformers` 5.
    greedy: whether experts are chosen by their scores alone, without a bias.
    stored: dtype of the files.
    shard_size: of the files, as `save_pretrained` reads it.
  """

  changes: dict[str, Any] = dataclasses.field(default_factory=dict)
  model_type: str = "kimi_k2"
  hub_spelling: bool = True
  greedy: bool = False
  stored: torch.dtype = torch.float32
  shard_size: str = "5GB"

  def oracle(self, seed: int) -> Oracle:
    """The model with random weights."""
    fields = KIMI | self.changes
    if self.model_type == "deepseek_v2":
      config = transformers.DeepseekV2Config(**fields)
    else:
      config = transformers.DeepseekV3Config(**fields)
    if self.model_type == "kimi_k25":
      config = transformers.Kimi_K25Config(
        text_config=config, vision_config=VISION, tie_word_embeddings=False
      )
    oracle = Oracle.random(config, seed, self.stored)
    if self.greedy:
      for name, buffer in oracle.model.named_buffers():
        if name.endswith("e_score_correction_bias"):
          buffer.zero_()
    return oracle

  def save(self, oracle: Oracle, directory: Path) -> None:
    """Writes the checkpoint as it would lie on the hub."""
    oracle.save(directory, self.stored, self.shard_size)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    config["model_type"] = self.model_type
    if self.model_type == "kimi_k25":
      text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
      config["architectures"] = ["KimiK25ForConditionalGeneration"]
    if self.greedy:
      text["topk_method"] = "greedy"
    if self.hub_spelling:
      rope = text.pop("rope_parameters")
      text["rope_theta"] = rope.pop("rope_theta")
      kind = rope.pop("rope_type")
      text["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(config, indent=2))
    for file in directory.glob("*.safetensors"):
      _publish(file, drop_bias=self.greedy)


def _publish(file: Path, drop_bias: bool) -> None:
  """Gives a file the tensors that published ones have.

  `save_pretrained` writes empty shared experts where there are none; in the multimodal
  wrapper it takes the text's layers for the vision tower's blocks and leaves a prefix.
  """
  tensors = load_file(file)
  kept = {
    name.replace(
      "language_model.model.blocks.", "language_model.model.layers."
    ).replace("model.mm_projector.", "mm_projector."): value
    for name, value in tensors.items()
    if value.numel() and not (drop_bias and name.endswith("e_score_correction_bias"))
  }
  if list(kept) != list(tensors):
    save_file(kept, file, metadata={"format": "pt"})


# `transformers` scores with the sigmoid in V3 and the softmax in V2, whatever the
# config says; V2's router has no bias, and the package ignores its `norm_topk_prob`.
V2 = {
  "scoring_func": "softmax",
  "topk_method": "greedy",
  "norm_topk_prob": False,
}

PUBLISHED = {
  "kimi_k2_6": Variant(),
  "kimi_k2_5_wrapper": Variant(model_type="kimi_k25"),
  "kimi_k2_instruct": Variant(
    {"rms_norm_eps": 1e-6, "rope_parameters": yarn(32.0, beta_fast=1.0)}
  ),
  "kimi_k2_0905": Variant(
    {"rms_norm_eps": 1e-6, "rope_parameters": yarn(64.0, beta_fast=1.0)}
  ),
  "deepseek_v3": Variant(
    {
      "num_hidden_layers": 3,
      "first_k_dense_replace": 2,
      "n_routed_experts": 24,
      "num_experts_per_tok": 5,
      "n_group": 8,
      "topk_group": 4,
      "routed_scaling_factor": 2.5,
      "rms_norm_eps": 1e-6,
      "rope_parameters": yarn(40.0, 10000.0),
    },
    "deepseek_v3",
  ),
  "moonlight": Variant(
    {
      "q_lora_rank": None,
      "n_shared_experts": 2,
      "num_experts_per_tok": 2,
      "routed_scaling_factor": 2.446,
      "rope_parameters": plain(50000.0),
    },
    "deepseek_v3",
  ),
  "deepseek_v2_lite": Variant(
    V2
    | {
      "q_lora_rank": None,
      "n_shared_experts": 2,
      "routed_scaling_factor": 1.0,
      "rms_norm_eps": 1e-6,
      "rope_parameters": yarn(40.0, 10000.0, mscale=0.707, mscale_all_dim=0.707),
    },
    "deepseek_v2",
  ),
}

# One field at a time, from Kimi K2.6 or DeepSeek-V2.
SINGLE = {
  "v2_with_q_lora": Variant(V2, "deepseek_v2"),
  "v2_without_yarn": Variant(V2 | {"rope_parameters": plain(1e6)}, "deepseek_v2"),
  "v2_one_expert": Variant(V2 | {"num_experts_per_tok": 1}, "deepseek_v2"),
  "without_q_lora": Variant({"q_lora_rank": None}),
  "kv_lora_rank": Variant({"kv_lora_rank": 56}),
  "head_dims": Variant(
    {"qk_nope_head_dim": 8, "qk_rope_head_dim": 32, "v_head_dim": 12}
  ),
  "two_rope_features": Variant({"qk_rope_head_dim": 2}),
  "seven_heads": Variant({"num_attention_heads": 7, "num_key_value_heads": 7}),
  "one_head": Variant({"num_attention_heads": 1, "num_key_value_heads": 1}),
  "best_group": Variant({"n_group": 4}),
  "two_of_three_groups": Variant({"n_group": 3, "topk_group": 2}),
  "all_groups": Variant({"n_group": 2, "topk_group": 2}),
  "one_expert": Variant({"num_experts_per_tok": 1}),
  "all_experts": Variant({"num_experts_per_tok": 12}),
  "many_experts": Variant({"n_routed_experts": 40, "num_experts_per_tok": 6}),
  "chosen_by_score": Variant(greedy=True),
  "weights_not_normalised": Variant({"norm_topk_prob": False}),
  "scaling_factor": Variant({"routed_scaling_factor": 0.6}),
  "no_shared_expert": Variant({"n_shared_experts": 0}),
  "two_shared_experts": Variant({"n_shared_experts": 2}),
  "no_dense_layer": Variant({"first_k_dense_replace": 0}),
  "only_dense_layers": Variant({"first_k_dense_replace": 2}),
  # Far from the 1e-6 of the norms of latents, so that one for the other shows.
  "large_norm_eps": Variant({"rms_norm_eps": 0.05}),
  "rope_theta": Variant({"rope_parameters": yarn(theta=500.0)}),
  "without_yarn": Variant({"rope_parameters": plain(10000.0)}),
  "yarn_factor": Variant({"rope_parameters": yarn(4.0)}),
  "yarn_factor_one": Variant({"rope_parameters": yarn(1.0)}),
  "yarn_betas": Variant({"rope_parameters": yarn(beta_fast=300.0, beta_slow=40.0)}),
  "original_context": Variant(
    {"rope_parameters": yarn(original_max_position_embeddings=64)}
  ),
  # All pairs beyond the band: its upper edge lies below its lower one.
  "tiny_original_context": Variant(
    {"rope_parameters": yarn(original_max_position_embeddings=4)}
  ),
  # Amplitudes of cos and sin other than 1.
  "mscale_above": Variant({"rope_parameters": yarn(mscale_all_dim=0.5)}),
  "mscale_below": Variant({"rope_parameters": yarn(mscale=0.25)}),
  "mscale_all_dim_zero": Variant({"rope_parameters": yarn(mscale_all_dim=0.0)}),
  "halves_rotated": Variant({"rope_interleave": False}),
  "tied_embeddings": Variant({"tie_word_embeddings": True}),
  "rope_parameters": Variant(hub_spelling=False),
  "rope_parameters_plain": Variant(
    {"rope_parameters": plain(50000.0)}, "deepseek_v3", hub_spelling=False
  ),
  "bfloat16_shards": Variant(stored=torch.bfloat16, shard_size="60KB"),
  "float16": Variant(stored=torch.float16),
  "no_groups_named": Variant(V2 | {"n_group": None, "topk_group": None}, "deepseek_v2"),
}

VARIANTS = PUBLISHED | SINGLE
