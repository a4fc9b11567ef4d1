"""Checks and completes a DecodeConfig for given models and prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kdtree_jax.config import ConfigError, DecodeConfig
from kdtree_jax.decoding.rounds import OPS
from kdtree_jax.drafter.base import check_drafter
from kdtree_jax.model.cache import round_up
from kdtree_jax.model.target import Target
from kdtree_jax.ops import _implementation
from kdtree_jax.ops._tree_attention_cuda import MAX_NODES

DEFAULT_TREE_BUDGET = 16
MOST_SLOTS = 8
# Logits over a temperature below this may overflow, and leave no order to choose by.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class Settings:
  """A DecodeConfig with every choice made.

  Attributes: as in `DecodeConfig`, plus
    depth: deepest draft of a round.
    capacity: positions a sequence may fill.
    stop_tokens: tokens that end a sequence.
  """

  config: DecodeConfig
  method: str
  budget: int
  depth: int
  rows: int
  slots: int
  capacity: int
  stop_tokens: tuple[int, ...]


def complete(
  target: Target, drafter: Any, prompts: Sequence[np.ndarray], config: DecodeConfig
) -> Settings:
  """Fills in the defaults that depend on models and prompts.

  Raises:
    ConfigError: models and configuration do not fit together; the message names
      the field.
    NotImplementedError: an implementation that cannot run here.
  """
  check_implementation(config.implementation)
  if config.method == "plain":
    if drafter is not None:
      raise ConfigError('drafter must be None for method = "plain"')
    budget = max_depth = 0
  else:
    if drafter is None:
      raise ConfigError(
        f'method = "{config.method}" needs a drafter; got None (method = "plain" '
        "takes none)"
      )
    check_drafter(drafter, target.config, target.fingerprint)
    max_depth = drafter.max_depth
    budget = _budget(config, max_depth)
  lowest, highest = LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE
  if config.temperature and not lowest <= config.temperature <= highest:
    size = "small" if config.temperature < lowest else "large"
    raise ConfigError(
      f"temperature = {config.temperature} is too {size}: it must be 0 (greedy) or "
      f"lie between {lowest} and {highest}"
    )
  rows = config.rows
  if rows is None:
    rows = 1 if config.method == "plain" else round_up(1 + budget, 8)
  if budget > rows - 1:
    raise ConfigError(
      f"budget = {budget} needs {budget + 1} rows (the root is one); rows = {rows}"
    )
  if config.implementation == "cuda":
    _check_cuda_limits(rows, config.prefill_chunk)
  # The budget limits the tree at run time; only rows and depth make a new program.
  depth = min(max_depth, rows - 1)
  longest = max(len(p) for p in prompts)
  limit = target.config.max_position_embeddings
  capacity = config.cache_len
  if capacity is None:
    capacity = min(longest + config.max_new_tokens, limit)
  if capacity > limit:
    raise ConfigError(
      f"cache_len = {capacity} exceeds the target's max_position_embeddings = {limit}"
    )
  if longest > capacity:
    index = int(np.argmax([len(p) for p in prompts]))
    name = "cache_len" if config.cache_len else "max_position_embeddings"
    raise ConfigError(
      f"prompts[{index}] has {longest} tokens, which is longer than {name} = {capacity}"
    )
  slots = config.slots or min(len(prompts), MOST_SLOTS)
  stop = config.stop_token_ids
  if stop is None:
    stop = target.config.eos_token_id
  _check_stop_tokens(stop, target.config.vocab_size)
  return Settings(
    config, config.method, budget, depth, rows, slots, capacity, tuple(stop)
  )


def check_implementation(implementation: str) -> None:
  """Checks that rounds can run on JAX's default device, before any is compiled.

  Raises:
    ValueError: an unknown name.
    NotImplementedError: an op of a round cannot run so; the message says why.
  """
  for op in OPS:
    _implementation.check_runs(op, implementation)


def _check_cuda_limits(rows: int, prefill_chunk: int) -> None:
  for name, value in (("rows", rows), ("prefill_chunk", prefill_chunk)):
    if value > MAX_NODES:
      raise ConfigError(
        f"{name} = {value} is too large for implementation = 'cuda': its attention "
        f"takes at most {MAX_NODES} rows per sequence; implementation = 'auto' or "
        "'xla' has no such limit"
      )


def _budget(config: DecodeConfig, max_depth: int) -> int:
  if config.method == "ddtree":
    return DEFAULT_TREE_BUDGET if config.budget is None else config.budget
  budget = max_depth if config.budget is None else config.budget
  if budget > max_depth:
    raise ConfigError(
      f"budget = {budget} is longer than the drafter's block allows: a chain "
      f"has at most {max_depth} drafts"
    )
  return budget


def _check_stop_tokens(stop: Sequence[int], vocab_size: int) -> None:
  for token in stop:
    if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
      raise ConfigError(
        f"stop_token_ids holds {token!r}; token ids run from 0 to {vocab_size - 1}"
      )


def check_prompts(
  prompts: Sequence[Sequence[int]], vocab_size: int
) -> list[np.ndarray]:
  """Prompts as i32 arrays.

  Raises:
    ValueError: no prompts, an empty one, or a token id out of range.
  """
  if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
    raise ValueError("prompts must be a list of token lists")
  if len(prompts) == 0:
    raise ValueError("prompts is empty: give at least one list of token ids")
  checked = []
  for i, prompt in enumerate(prompts):
    try:
      array = np.asarray(prompt)
    except ValueError:  # lists of several lengths inside
      array = np.empty((1,), object)
    if array.size == 0:
      raise ValueError(
        f"prompts[{i}] is empty: give at least one token (a beginning-of-text "
        "token, for example)"
      )
    if array.ndim != 1 or array.dtype.kind not in "iu":
      raise ValueError(
        f"prompts[{i}] must be a flat list of integer token ids; it has shape "
        f"{array.shape} and type {array.dtype}"
      )
    bad = array[(array < 0) | (array >= vocab_size)]
    if bad.size:
      raise ValueError(
        f"prompts[{i}] holds token id {bad[0]}, out of range: token ids run from 0 "
        f"to {vocab_size - 1}"
      )
    checked.append(array.astype(np.int32))
  return checked
