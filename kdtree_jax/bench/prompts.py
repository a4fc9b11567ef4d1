"""Held-out prompts as token lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SETS = ("humaneval", "gsm_symbolic")


def held_out(
  tokenizer: Any, name: str, bos: int | None, count: int | None = None
) -> list[list[int]]:
  """The first prompts of a set that the demo pair was never trained on.

  Args:
    tokenizer: of the target.
    name: one of `SETS`.
    bos: token that texts begin with, or None.
    count: how many; None means all.

  Raises:
    ValueError: the set holds fewer.
  """
  from kdtree_jax.demo import load_prompts

  if name not in SETS:
    raise ValueError(f"prompt_set = {name!r} is not allowed: it must be one of {SETS}")
  records = load_prompts(name)  # type: ignore[arg-type]
  count = len(records) if count is None else count
  if not 1 <= count <= len(records):
    raise ValueError(
      f"num_prompts = {count} is not allowed: {name} holds {len(records)} prompts"
    )
  start = [] if bos is None else [bos]
  return [start + tokenizer.encode(r["prompt"]).ids for r in records[:count]]


def interleave(sets: Sequence[Sequence[list[int]]]) -> list[list[int]]:
  """One list that takes from each set in turn until the shortest ends."""
  return [prompt for group in zip(*sets, strict=False) for prompt in group]


def of_lengths(
  pool: Sequence[Sequence[int]], lengths: Sequence[int], first: int = 0
) -> list[list[int]]:
  """Prompts of given lengths, cut from the prompts of a pool.

  Args:
    pool: prompts; taken one after the other, from the start again at the end.
    lengths: tokens of each prompt wanted. Where one of the pool is shorter, the
      next follows it as a further text.
    first: index in the pool of the first prompt to use.
  """
  out, index = [], first
  for length in lengths:
    tokens: list[int] = []
    while len(tokens) < length:
      tokens += pool[index % len(pool)]
      index += 1
    out.append(tokens[:length])
  return out
