"""Are two results the same, bit for bit?"""

from __future__ import annotations

import numpy as np

from kdtree_jax.decoding.result import DecodeResult


def first_difference(expected: DecodeResult, actual: DecodeResult) -> str | None:
  """The first token or logit bit in which two results differ.

  Args:
    expected, actual: results of the same prompts, both with logits.

  Returns:
    None if all tokens and all bits of their logits are equal, else a sentence
    that names sequence, position and values.

  Raises:
    ValueError: the results have no logits, or another number of sequences.
  """
  if len(expected) != len(actual):
    raise ValueError(f"{len(expected)} sequences cannot be compared to {len(actual)}")
  for i, (want, have) in enumerate(zip(expected, actual, strict=True)):
    if want.logits is None or have.logits is None:
      raise ValueError("both results need return_logits=True")
    shared = min(len(want.tokens), len(have.tokens))
    for t in range(shared):
      differs = want.logits[t].view(np.uint32) != have.logits[t].view(np.uint32)
      if want.tokens[t] != have.tokens[t] or differs.any():
        v = int(np.argmax(differs))
        return (
          f"sequence {i}, token {t}: expected id {want.tokens[t]}, got "
          f"{have.tokens[t]}; {int(differs.sum())} logits differ, the first at id {v}: "
          f"{want.logits[t][v]!r} and {have.logits[t][v]!r}"
        )
    if len(want.tokens) != len(have.tokens):
      return (
        f"sequence {i}: expected {len(want.tokens)} tokens "
        f"({want.finish_reason}), got {len(have.tokens)} ({have.finish_reason})"
      )
    if want.finish_reason != have.finish_reason:
      return (
        f"sequence {i}: expected finish reason {want.finish_reason!r}, got "
        f"{have.finish_reason!r}"
      )
  return None
