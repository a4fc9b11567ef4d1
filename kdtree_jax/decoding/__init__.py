"""Decoding: plain, by a chain, or by draft trees, with the same result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding.engine import Engine
from kdtree_jax.decoding.modules import OnCompile
from kdtree_jax.decoding.result import (
  DecodeResult,
  Round,
  SequenceResult,
  Stats,
  StreamEvent,
)
from kdtree_jax.decoding.settings import check_prompts, complete
from kdtree_jax.model.target import Target

__all__ = [
  "DecodeResult",
  "Round",
  "SequenceResult",
  "Stats",
  "StreamEvent",
  "decode",
  "stream",
]


def stream(
  target: Target,
  drafter: Any,
  prompts: Sequence[Sequence[int]],
  config: DecodeConfig | None = None,
  *,
  sequence_ids: Sequence[int] | None = None,
  on_compile: OnCompile | None = None,
) -> Iterator[StreamEvent]:
  """Decodes prompts and yields committed tokens as chunks of rounds end.

  Arguments are those of `decode`, and are checked before the first token is
  asked for.

  Yields:
    `StreamEvent`s; the last one of each prompt carries its finish reason and
    its whole result.
  """
  config = DecodeConfig() if config is None else config
  if not isinstance(config, DecodeConfig):
    raise ValueError(f"config must be a DecodeConfig, not {type(config).__name__}")
  if not isinstance(target, Target):
    raise ValueError(f"target must be a Target, not {type(target).__name__}")
  checked = check_prompts(prompts, target.config.vocab_size)
  ids = _check_ids(sequence_ids, len(checked))
  settings = complete(target, drafter, checked, config)
  return Engine(target, drafter, settings, on_compile).run(checked, ids)


def decode(
  target: Target,
  drafter: Any,
  prompts: Sequence[Sequence[int]],
  config: DecodeConfig | None = None,
  *,
  sequence_ids: Sequence[int] | None = None,
  on_compile: OnCompile | None = None,
) -> DecodeResult:
  """Continues prompts.

  Tokens and the logits they were chosen from do not depend on how they were
  speculated: with equal `rows` and `slots`, every method, budget and drafter
  gives the bits of plain decoding.

  Args:
    target: the language model.
    drafter: follows `kdtree_jax.drafter.Drafter`; None for method "plain".
    prompts: token lists of any lengths, each at least one token.
    config: see `DecodeConfig`.
    sequence_ids: name of each prompt for the sampling noise, 0 .. 2**31 - 1;
      the default is its index. The same id, seed and prompt give the same text
      in any batch and slot.
    on_compile: called with the name of each program that had to be compiled and
      the seconds it took.

  Returns:
    A `DecodeResult` in the order of the prompts.

  Raises:
    ConfigError: configuration and models do not fit together.
    ValueError: a prompt is empty, too long, or holds an unknown token id.
  """
  results: dict[int, SequenceResult] = {}
  events = stream(
    target, drafter, prompts, config, sequence_ids=sequence_ids, on_compile=on_compile
  )
  for event in events:
    if event.result is not None:
      results[event.index] = event.result
  return DecodeResult(tuple(results[i] for i in range(len(results))))


def _check_ids(ids: Sequence[int] | None, count: int) -> list[int]:
  if ids is None:
    return list(range(count))
  if not isinstance(ids, Sequence | np.ndarray):
    raise ValueError(f"sequence_ids must be a list of integers, not {ids!r}")
  if len(ids) != count:
    raise ValueError(f"sequence_ids has {len(ids)} entries for {count} prompts")
  for value in ids:
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or not 0 <= value < 2**31:
      raise ValueError(f"sequence_ids holds {value!r}; ids run from 0 to 2**31 - 1")
  return [int(value) for value in ids]
