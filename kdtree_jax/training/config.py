"""Settings of training: one stage, and a whole experiment."""

from __future__ import annotations

import dataclasses
import math

from kdtree_jax.config import (
  ConfigError,
  DecodeConfig,
  DictMixin,
  DrafterConfig,
  ModelConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(DictMixin):
  """Optimiser, schedule and bookkeeping of one stage.

  Attributes:
    steps: optimiser steps.
    batch_size: sequences per step.
    sequence_length: tokens per sequence.
    learning_rate: peak of the schedule: linear warm-up, then cosine to zero.
    warmup_steps: steps of the warm-up.
    weight_decay: of AdamW, on matrices only.
    clip_norm: gradients are scaled down to this global norm.
    seed: of initial values and batches.
    log_every: steps between lines of the metrics file.
    eval_every: steps between evaluations on held-out text.
    checkpoint_every: steps between checkpoints.
    bias_update_rate: target only; step of the router's correction bias
      (DeepSeek-V3, arXiv 2412.19437, section 4.2).
    quantize_from: target only; share of the steps after which routed experts
      train under fake int4 (1 for never).
    anchors: drafter only; blocks per sequence.
    loss_gamma: drafter only; position k weighs exp(-(k - 1) / gamma).
    dpace_smoothing: drafter only; weigh positions by the chance that they are
      reached instead (see `dpace_weights`); None keeps the decay.
  """

  steps: int
  batch_size: int
  sequence_length: int
  learning_rate: float
  warmup_steps: int = 200
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  seed: int = 0
  log_every: int = 50
  eval_every: int = 500
  checkpoint_every: int = 1000
  bias_update_rate: float = 1e-3
  quantize_from: float = 0.7
  anchors: int = 64
  loss_gamma: float = 7.0
  dpace_smoothing: float | None = None

  def __post_init__(self) -> None:
    for field in (
      "steps",
      "batch_size",
      "sequence_length",
      "log_every",
      "eval_every",
      "checkpoint_every",
      "anchors",
    ):
      if getattr(self, field) < 1:
        raise ConfigError(f"{field} = {getattr(self, field)} must be 1 or more")
    if not 0 <= self.warmup_steps < self.steps:
      raise ConfigError(
        f"warmup_steps = {self.warmup_steps} must lie below steps = {self.steps}"
      )
    if not self.learning_rate > 0:
      raise ConfigError(f"learning_rate = {self.learning_rate} must be positive")
    if self.dpace_smoothing is not None and not 0 <= self.dpace_smoothing <= 1:
      raise ConfigError(
        f"dpace_smoothing = {self.dpace_smoothing} must lie in 0 .. 1, or be None"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(DictMixin):
  """Text that the target writes for its drafter.

  Attributes:
    sequences: how many, rounded down to whole batches.
    prompt_length: tokens of corpus text that each starts from.
    sequence_length: tokens per sequence, prompt included.
    temperatures: sequence i is sampled at `temperatures[i % len]`.
    batch_size: sequences per compiled call.
    seed: of prompts and sampling.
  """

  sequences: int
  prompt_length: int
  sequence_length: int
  temperatures: tuple[float, ...]
  batch_size: int
  seed: int = 0

  def __post_init__(self) -> None:
    if not 0 < self.prompt_length < self.sequence_length:
      raise ConfigError(
        f"prompt_length = {self.prompt_length} must lie between 1 and "
        f"sequence_length = {self.sequence_length} (exclusive)"
      )
    if not 0 < self.batch_size <= self.sequences:
      raise ConfigError(
        f"batch_size = {self.batch_size} must lie between 1 and "
        f"sequences = {self.sequences}"
      )
    if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
      raise ConfigError(
        f"temperatures = {self.temperatures} must be one or more finite numbers, "
        "each 0 or more"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """What a file in `configs/` returns from `get_config()`.

  Attributes:
    model: the target.
    drafter: its drafter, or None.
    decode: defaults of decoding.
    target_train, generate, drafter_train: the training stages, or None where
      the configuration is not trained here.
  """

  model: ModelConfig
  drafter: DrafterConfig | None = None
  decode: DecodeConfig = DecodeConfig()
  target_train: TrainConfig | None = None
  generate: GenerateConfig | None = None
  drafter_train: TrainConfig | None = None
