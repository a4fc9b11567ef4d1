"""Tiny models of the `transformers` package: random, saved as on the hub, and run.

The package is the oracle: eager attention, eager experts, float32, on the CPU.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

CLASSES = {
  "deepseek_v2": "DeepseekV2ForCausalLM",
  "deepseek_v3": "DeepseekV3ForCausalLM",
  "kimi_k25": "Kimi_K25ForConditionalGeneration",
}


class CorrectlyRounded(TorchFunctionMode):
  """Torch's float32 functions behind RoPE, computed in float64 and rounded once."""

  FUNCTIONS = (torch.Tensor.__rpow__, torch.Tensor.cos, torch.Tensor.sin, torch.polar)

  def __torch_function__(
    self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
  ) -> Any:
    if func not in self.FUNCTIONS:
      return func(*args, **(kwargs or {}))
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
    out = func(*wide)
    return out.to(torch.complex64 if out.is_complex() else torch.float32)


@dataclasses.dataclass(frozen=True)
class TreeOutput:
  """What a pass over the N nodes of a tree gives."""

  logits: np.ndarray  # f32 [N, V]
  rows: np.ndarray  # f32 [layers, N, R + P], as `Oracle.rows`


class Oracle:
  """A model of `transformers`, and how near its choices of experts came to a tie.

  Args:
    model: one of its models for causal text.
  """

  def __init__(self, model: transformers.PreTrainedModel):
    # Both, or torch's fused attention and grouped products would run.
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    self.model = model.eval()
    self.choice_gap = np.inf
    for module in model.modules():
      if type(module).__name__.endswith("TopkRouter"):
        module.register_forward_hook(self._see_choice)

  @classmethod
  def random(
    cls,
    config: transformers.PreTrainedConfig,
    seed: int,
    stored: torch.dtype = torch.float32,
  ) -> Oracle:
    """A model with random weights.

    Args:
      config: of the package.
      seed: of the weights.
      stored: dtype of the checkpoint; weights are rounded to it.
    """
    model = getattr(transformers, CLASSES[config.model_type])(config)
    randomize(model, seed, stored)
    return cls(model)

  def logits(self, tokens: np.ndarray) -> np.ndarray:
    """f32 [T, V] of a text [T], causal, without a cache."""
    return self._run(tokens, None)

  def start(self) -> transformers.DynamicCache:
    """An empty cache."""
    return transformers.DynamicCache(config=self.model.config.get_text_config())

  def append(self, cache: transformers.DynamicCache, tokens: np.ndarray) -> np.ndarray:
    """Appends tokens [T] to a cache: f32 [T, V]."""
    return self._run(tokens, cache)

  def tree(
    self,
    cache: transformers.DynamicCache,
    tokens: np.ndarray,
    depths: np.ndarray,
    visible: np.ndarray,
  ) -> TreeOutput:
    """All nodes of a tree at once, by a mask; the cache is left as it is.

    Args:
      cache: of the S committed tokens.
      tokens, depths: i32 [N]; a node sits at position S + depth.
      visible: bool [N, N], whether row i sees node j.
    """
    N, S = len(tokens), cache.get_seq_length()
    seen = np.concatenate([np.ones((N, S), bool), visible], axis=1)
    lowest = torch.finfo(torch.float32).min
    mask = torch.where(torch.from_numpy(seen), 0.0, lowest)[None, None]
    positions = torch.from_numpy(S + depths.astype(np.int64))[None]
    longer = copy.deepcopy(cache)
    logits = self._run(tokens, longer, attention_mask=mask, position_ids=positions)
    return TreeOutput(logits, self.rows(longer)[:, S:])

  def rows(self, cache: transformers.DynamicCache) -> np.ndarray:
    """What a cache holds, as f32 [layers, S, R + P]: normed latent, rotated key.

    DeepSeek-V2's keys lie there with pair i at 2i and 2i + 1; here they are in the
    order of the others, first members before second ones.
    """
    latents = np.stack([layer.keys[0, 0].numpy() for layer in cache.layers])
    keys = np.stack([layer.values[0, 0].numpy() for layer in cache.layers])
    if self.model.config.model_type == "deepseek_v2":
      keys = np.concatenate([keys[..., 0::2], keys[..., 1::2]], axis=-1)
    return np.concatenate([latents, keys], axis=-1)

  @torch.no_grad()
  def rope_table(self, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) f32 [length, P/2], torch's functions rounded correctly."""
    module = next(
      m
      for m in self.model.modules()
      if type(m).__name__ in ("DeepseekV2RotaryEmbedding", "DeepseekV3RotaryEmbedding")
    )
    with CorrectlyRounded():  # The frequencies too.
      out = type(module)(module.config)(torch.zeros(1), torch.arange(length)[None])
    if isinstance(out, torch.Tensor):  # DeepSeek-V2's is complex.
      return out[0].real.numpy(), out[0].imag.numpy()
    cos, sin = (x[0, :, : x.shape[-1] // 2].numpy() for x in out)
    return cos, sin

  def save(self, directory: Path, stored: torch.dtype, shard_size: str) -> None:
    """Writes config.json and safetensors files with the hub's tensor names."""
    model = copy.deepcopy(self.model).to(stored)
    for name, exact in self.model.named_buffers():
      if name.endswith("e_score_correction_bias"):  # fp32 in every checkpoint.
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = exact
    model.save_pretrained(directory, max_shard_size=shard_size)

  @torch.no_grad()
  def _run(self, tokens: np.ndarray, cache: Any, **inputs: Any) -> np.ndarray:
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    out = self.model(input_ids=ids, cache=cache, use_cache=cache is not None, **inputs)
    assert out.logits.dtype == torch.float32
    return out.logits[0].numpy()

  def _see_choice(self, router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
    self.choice_gap = min(self.choice_gap, _choice_gap(router, output[0]))


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int, stored: torch.dtype) -> None:
  """Weights under which nothing is degenerate.

  As the package initialises them, logits are near zero, routing near uniform, and the
  correction bias exactly zero, so that a bias in a wrong place could not be told.
  """
  generator = torch.Generator().manual_seed(seed)
  tied = model.config.get_text_config().tie_word_embeddings
  for name, value in [*model.named_parameters(), *model.named_buffers()]:
    noise = torch.randn(value.shape, generator=generator)
    if name.endswith("inv_freq"):
      continue
    if name.endswith("e_score_correction_bias"):
      value.copy_(0.2 * noise)
    elif name.endswith("norm.weight"):
      value.copy_((1 + 0.3 * noise).to(stored))
    elif name.endswith("embed_tokens.weight") and not tied:
      value.copy_(noise.to(stored))
    else:
      lively = ("q_proj.weight", "q_b_proj.weight", "gate.weight", "lm_head.weight")
      gain = 2.0 if name.endswith((*lively, "embed_tokens.weight")) else 1.0
      value.copy_((gain * max(value.shape[-1], 1) ** -0.5 * noise).to(stored))


def _choice_gap(router: Any, logits: torch.Tensor) -> float:
  """How near the tokens of router logits [T, E] come to another choice.

  Between equals, two programs that round differently may choose differently. The gap is
  that between the last chosen and the first left out, of experts or of groups.
  """
  logits, gaps = logits.double(), [np.inf]
  if hasattr(router, "e_score_correction_bias"):
    choice = logits.sigmoid() + router.e_score_correction_bias.double()
    groups = choice.unflatten(-1, (router.num_group, -1))
    sums, order = groups.topk(2).values.sum(-1).sort(descending=True)
    kept = router.topk_group
    if kept < router.num_group:
      gaps.append(float((sums[:, kept - 1] - sums[:, kept]).min()))
      out = torch.zeros_like(sums, dtype=torch.bool)
      out.scatter_(1, order[:, kept:], True)
      choice = groups.masked_fill(out[..., None], -torch.inf).flatten(1)
  else:
    choice = logits.softmax(-1)
  k = router.top_k
  if k < choice.shape[-1]:
    best = choice.sort(descending=True).values
    gaps.append(float((best[:, k - 1] - best[:, k]).min()))
  return min(gaps)
