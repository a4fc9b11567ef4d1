"""Configurations of the tree and of the decoding loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from kdtree_jax._config_base import DictMixin
from kdtree_jax._validation import check, is_integer, is_number, one_of, positive

# Slots that a tree may have, the root included: their number squared must fit 32 bits,
# also where it is rounded up to a multiple of 8.
MAX_ROWS = 46_336


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig(DictMixin):
  """Size of a draft tree.

  Attributes:
    budget: nodes without the root, 0 or more, fewer than `MAX_ROWS`.
    max_depth: deepest node, in tokens after the root; None for as deep as the
      drafter proposes.
  """

  budget: int
  max_depth: int | None = None

  def __post_init__(self) -> None:
    check(
      is_integer(self.budget) and 0 <= self.budget < MAX_ROWS,
      "budget",
      self.budget,
      f"it counts tree nodes without the root and must lie in 0 .. {MAX_ROWS - 1}",
    )
    if self.max_depth is not None:
      check(self.max_depth >= 0, "max_depth", self.max_depth, "it must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(DictMixin):
  """How prompts are decoded.

  Attributes:
    method: "plain" (one token a round), "chain" (the drafter's top-1 path) or
      "ddtree" (the best draft tree under the budget).
    budget: tree nodes without the root. For "chain" the longest chain; None
      means as long as the drafter proposes ("chain") or 16 ("ddtree").
    rows: static number of rows per sequence of the verify step. Level 1 of
      the exactness contract holds for equal `rows` and `slots`. None means
      1 + budget rounded up to a multiple of 8 (1 for "plain"). The CUDA form of
      attention takes at most 128; with more, "auto" runs attention's XLA form, which
      is slower, and "cuda" is an error.
    slots: sequences decoded at once; None means all prompts, at most 8.
    max_new_tokens: tokens generated per prompt at most, the first included.
    temperature: 0 decodes greedily.
    top_p: nucleus mass in (0, 1]; 1 keeps all tokens. No effect when greedy.
    seed: seed of the sampling noise, 0 .. 2**32 - 1.
    stop_token_ids: tokens that end a sequence; None takes the target's
      `eos_token_id`, () stops at none.
    chunk_rounds: rounds per compiled call; committed tokens reach the host
      after each call.
    cache_len: positions of the cache per slot; None means just enough.
    prefill_chunk: prompt tokens per forward pass of the prefill. More than 128 are
      beyond the CUDA form of attention, as with `rows`.
    return_logits: also return the raw logits of every committed token.
    return_trees: also return each round's tree, drafter logits and path.
    implementation: "auto", "xla" or "cuda" form of the ops.
    capture_loop: on a GPU, record the whole loop of rounds as one CUDA graph; else
      each round is started by the host, which looks whether to go on. The results
      are the same. While it is on, the loop's part of XLA's own setting
      (`--xla_gpu_enable_command_buffer`) is replaced.
  """

  method: Literal["plain", "chain", "ddtree"] = "ddtree"
  budget: int | None = None
  rows: int | None = None
  slots: int | None = None
  max_new_tokens: int = 128
  temperature: float = 0.0
  top_p: float = 1.0
  seed: int = 0
  stop_token_ids: tuple[int, ...] | None = None
  chunk_rounds: int = 16
  cache_len: int | None = None
  prefill_chunk: int = 64
  return_logits: bool = False
  return_trees: bool = False
  implementation: Literal["auto", "xla", "cuda"] = "auto"
  capture_loop: bool = True

  def __post_init__(self) -> None:
    one_of(self, "method", ("plain", "chain", "ddtree"))
    one_of(self, "implementation", ("auto", "xla", "cuda"))
    if self.budget is not None:
      TreeConfig(budget=self.budget)
    for field in ("rows", "slots", "cache_len"):
      if getattr(self, field) is not None:
        positive(self, field)
    positive(self, "max_new_tokens", "chunk_rounds", "prefill_chunk")
    check(
      self.rows is None or self.rows <= MAX_ROWS,
      "rows",
      self.rows,
      f"it must lie in 1 .. {MAX_ROWS}",
    )
    for field in ("return_logits", "return_trees", "capture_loop"):
      one_of(self, field, (True, False))
    check(
      self.stop_token_ids is None or isinstance(self.stop_token_ids, tuple),
      "stop_token_ids",
      self.stop_token_ids,
      "it must be a tuple of token ids, or None",
    )
    check(
      is_number(self.temperature)
      and math.isfinite(self.temperature)
      and self.temperature >= 0,
      "temperature",
      self.temperature,
      "it must be 0 (greedy) or a positive finite number",
    )
    check(
      is_number(self.top_p) and 0 < self.top_p <= 1,
      "top_p",
      self.top_p,
      "it is a probability mass in (0, 1]",
    )
    check(
      is_integer(self.seed) and 0 <= self.seed < 2**32,
      "seed",
      self.seed,
      "it must be an integer from 0 to 2**32 - 1",
    )
