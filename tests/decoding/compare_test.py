from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdtree_jax.decoding import DecodeResult, SequenceResult, Stats
from kdtree_jax.decoding.compare import first_difference


def sequence(tokens=(3, 1), reason="length", logits=True):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(len(tokens), 5)).astype(np.float32)
  return SequenceResult(
    tokens=np.array(tokens, np.int32),
    finish_reason=reason,
    logprobs=np.zeros(len(tokens), np.float32),
    stats=Stats(0, (), 0.0, 0.0, 0.0),
    logits=rows if logits else None,
  )


def pair(first, second):
  return DecodeResult((sequence(), first)), DecodeResult((sequence(), second))


def test_equal_results_have_no_difference():
  assert first_difference(*pair(sequence(), sequence())) is None


def test_one_bit_of_one_logit_is_found():
  changed = sequence()
  changed.logits.view(np.uint32)[1, 3] ^= 1
  message = first_difference(*pair(sequence(), changed))
  assert "sequence 1, token 1" in message and "at id 3" in message


def test_zeros_of_either_sign_differ_and_equal_nans_do_not():
  one, other = sequence(), sequence()
  one.logits[0, 0], other.logits[0, 0] = 0.0, -0.0
  assert "at id 0" in first_difference(*pair(one, other))
  one.logits[0, 0] = other.logits[0, 0] = np.nan
  assert first_difference(*pair(one, other)) is None


@pytest.mark.parametrize(
  ("other", "message"),
  [
    (sequence((3, 2)), "sequence 1, token 1: expected id 1, got 2"),
    (sequence((3,)), r"expected 2 tokens \(length\), got 1"),
    (sequence(reason="stop"), "expected finish reason 'length', got 'stop'"),
  ],
)
def test_tokens_counts_and_reasons_are_compared(other, message):
  import re

  expected, actual = pair(sequence(), other)
  rows = actual[1].logits
  rows[:] = expected[1].logits[: len(rows)]
  assert re.search(message, first_difference(expected, actual))


def test_what_cannot_be_compared():
  with pytest.raises(ValueError, match="return_logits"):
    first_difference(*pair(sequence(logits=False), sequence()))
  with pytest.raises(ValueError, match="2 sequences cannot be compared to 1"):
    first_difference(
      DecodeResult((sequence(), sequence())), DecodeResult((sequence(),))
    )


def test_results_are_sequences_with_columns():
  result = DecodeResult((sequence((1, 2)), sequence((4,), "stop")))
  assert len(result) == 2 and [len(s.tokens) for s in result] == [2, 1]
  assert result.finish_reason == ["length", "stop"]
  assert [t.tolist() for t in result.tokens] == [[1, 2], [4]]
  rounds = (
    dataclasses.replace(result[0].stats, rounds=2, accepted_lengths=(1, 4)),
    dataclasses.replace(result[1].stats, rounds=1, accepted_lengths=(1,)),
  )
  pooled = DecodeResult(
    tuple(dataclasses.replace(s, stats=r) for s, r in zip(result, rounds, strict=True))
  )
  # The mean over rounds, not over sequences.
  assert pooled.tokens_per_round == 2.0
  assert pooled.stats[0].tokens_per_round == 2.5
