"""The forward pass of a DFlash drafter in plain torch, from its published description.

Sources: arXiv 2602.06036, section 4; the README and `dflash/model.py` of z-lab/dflash;
the YaRN formula of Hugging Face's configuration docs; the two-sided window of
Kimi-K2.6-DFlash as in mirage-project/mirage's reference of one layer. It reads the
`config.json` and the published tensors, shares no code with the library, keeps no cache
and looks at one sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


def block_logits(
  config: dict[str, Any],
  weights: Weights,
  embedding: torch.Tensor,
  head: torch.Tensor,
  streams: torch.Tensor,
  anchor: int,
  amplitude: float | None = None,
) -> torch.Tensor:
  """Logits of the tokens that follow the anchor.

  Args:
    config: the contents of `config.json`.
    weights: float32, by their published names.
    embedding: [V, D], the target's.
    head: [V, D], the target's `lm_head.weight`.
    streams: [T, taps, D], outputs of the tapped layers for T committed tokens.
    anchor: the token at position T.
    amplitude: factor on cosines and sines in place of the formula's.

  Returns:
    [block - 1, V]; row k is for position T + 1 + k.
  """
  own = config["dflash_config"]
  block = config.get("block_size", own.get("block_size"))
  eps = config["rms_norm_eps"]
  context = F.linear(streams.flatten(1), weights["fc.weight"])
  context = _rms_norm(context, weights["hidden_norm.weight"], eps)
  ids = torch.tensor([anchor] + [own["mask_token_id"]] * (block - 1))
  x = embedding[ids]
  places = torch.arange(len(streams) + block)
  cos, sin = _rope(config, places, amplitude)
  for i, kind in enumerate(config["layer_types"]):
    # z-lab's rule: a field for all layers, or else the layers that slide.
    causal = config.get("is_causal", kind == "sliding_attention")
    layer = {
      name.removeprefix(f"layers.{i}."): value
      for name, value in weights.items()
      if name.startswith(f"layers.{i}.")
    }
    distance = places[-block:, None] - places[None, :]
    visible = torch.ones(block, len(places), dtype=torch.bool)
    if kind == "sliding_attention":
      visible &= distance.abs() < config["sliding_window"]
    if causal:
      visible &= distance >= 0
    y = _rms_norm(x, layer["input_layernorm.weight"], eps)
    x = x + _attention(config, layer, y, context, cos, sin, visible)
    y = _rms_norm(x, layer["post_attention_layernorm.weight"], eps)
    gate = F.silu(F.linear(y, layer["mlp.gate_proj.weight"]))
    up = F.linear(y, layer["mlp.up_proj.weight"])
    x = x + F.linear(gate * up, layer["mlp.down_proj.weight"])
  x = _rms_norm(x, weights["norm.weight"], eps)
  return F.linear(x, head)[1:]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
  return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def _attention(config, layer, y, context, cos, sin, visible) -> torch.Tensor:
  """The context is not normed by the layer; queries are the block's alone."""
  eps, width = config["rms_norm_eps"], config["head_dim"]

  def heads(name: str, rows: torch.Tensor) -> torch.Tensor:
    out = F.linear(rows, layer[f"self_attn.{name}_proj.weight"])
    return out.unflatten(-1, (-1, width)).transpose(0, 1)  # [heads, rows, width]

  rows = torch.cat([context, y])
  q = _rms_norm(heads("q", y), layer["self_attn.q_norm.weight"], eps)
  k = _rms_norm(heads("k", rows), layer["self_attn.k_norm.weight"], eps)
  q = _rotate(q, cos[-len(y) :], sin[-len(y) :])
  k = _rotate(k, cos, sin)
  groups = config["num_attention_heads"] // config["num_key_value_heads"]
  out = F.scaled_dot_product_attention(
    q,
    k.repeat_interleave(groups, 0),
    heads("v", rows).repeat_interleave(groups, 0),
    attn_mask=visible,
  )
  return F.linear(out.transpose(0, 1).flatten(1), layer["self_attn.o_proj.weight"])


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
  """Features (i, i + width / 2) form a pair."""
  a, b = x.chunk(2, dim=-1)
  return x * cos + torch.cat([-b, a], dim=-1) * sin


def _rope(config, places: torch.Tensor, amplitude: float | None):
  """Cosines and sines [T, width], angles formed in float32."""
  scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
  theta = config.get("rope_theta", scaling.get("rope_theta"))
  width = config["head_dim"]
  exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
  frequencies = 1.0 / theta**exponents
  factor = 1.0
  if "yarn" in (scaling.get("rope_type"), scaling.get("type")):
    s, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def edge(turns: float) -> float:
      return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(edge(scaling["beta_fast"])), 0)
    high = min(math.ceil(edge(scaling["beta_slow"])), width - 1)
    ramp = (torch.arange(width // 2) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    frequencies = frequencies * (1 - ramp) + frequencies / s * ramp
    factor = (0.1 * scaling["mscale"] * math.log(s) + 1) / (
      0.1 * scaling["mscale_all_dim"] * math.log(s) + 1
    )
  factor = factor if amplitude is None else amplitude
  angles = places[:, None].float() * frequencies
  angles = torch.cat([angles, angles], dim=-1)
  return angles.cos() * factor, angles.sin() * factor
