"""Tokens come as chunks of rounds end, and add up to what `decode` returns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.config import DecodeConfig
from tests.decoding.models import (
  NEW,
  PROMPTS,
  SETTINGS,
  Mixed,
  decode,
  plain,
  prompt,
  target,
  true_script,
  watch_calls,
)

SAMPLING = {"temperature": 1.0}
CHUNK = 3


def events_of(prompts=PROMPTS, budget=1, **changes):
  config = DecodeConfig(
    **(SETTINGS | SAMPLING | changes), chunk_rounds=CHUNK, budget=budget
  )
  drafter = Mixed.create("1.0", continuations=true_script(**SAMPLING))
  return kd.stream(target(), drafter, prompts, config)


def test_events_add_up_to_the_result():
  expected = plain(**SAMPLING)
  parts = {i: [] for i in range(3)}
  ended = {}
  for event in events_of():
    assert event.index not in ended
    assert len(event.logprobs) == len(event.tokens)
    parts[event.index].append(event)
    assert (event.finish_reason is None) == (event.result is None)
    if event.result is not None:
      ended[event.index] = event
  for i, events in parts.items():
    tokens = np.concatenate([e.tokens for e in events])
    logprobs = np.concatenate([e.logprobs for e in events])
    assert tokens.tolist() == expected[i].tokens.tolist()
    result = ended[i].result
    assert result.tokens.tolist() == tokens.tolist()
    assert result.logprobs.tobytes() == logprobs.tobytes()
    assert result.logits.tobytes() == expected[i].logits.tobytes()
    assert ended[i].finish_reason == result.finish_reason == "length"
    # The first token, then what each chunk of rounds of two tokens committed.
    sizes = [len(e.tokens) for e in events]
    assert sizes == [1, *[2 * CHUNK] * 3, NEW - 1 - 3 * 2 * CHUNK]


def test_tokens_arrive_before_the_end(monkeypatch):
  """The first token is there before any round, the next after one chunk."""
  stream = events_of()
  names = []

  def call(name, run, args, donate):
    del donate
    names.append(name)
    return run(*args)

  watch_calls(monkeypatch, call)
  first = list(itertools.islice(stream, 3))
  assert [len(e.tokens) for e in first] == [1, 1, 1]
  assert "ddtree rounds" not in names
  second = next(stream)
  assert len(second.tokens) == 2 * CHUNK and second.finish_reason is None
  assert names.count("ddtree rounds") == 1
  stream.close()


def test_a_sequence_that_ends_frees_its_slot_for_the_next():
  prompts = [*PROMPTS, prompt(9, 30), prompt(40, 31)]
  order = [e.index for e in events_of(prompts) if e.finish_reason is not None]
  assert sorted(order) == [0, 1, 2, 3, 4]
  assert set(order[:3]) == {0, 1, 2}
  expected = decode(None, prompts, **SAMPLING)
  texts = {e.index: e.result.tokens.tolist() for e in events_of(prompts) if e.result}
  assert texts == {i: s.tokens.tolist() for i, s in enumerate(expected)}


def test_events_of_a_stopped_text_hold_nothing_beyond_it():
  stop = int(plain(**SAMPLING)[1].tokens[7])
  expected = decode(stop_token_ids=(stop,), **SAMPLING)
  got = {i: [] for i in range(3)}
  for event in events_of(stop_token_ids=(stop,)):
    got[event.index].extend(event.tokens.tolist())
  assert list(got.values()) == [s.tokens.tolist() for s in expected]
  assert len(got[1]) <= 8


def test_events_keep_their_values():
  """They are copies, not views of a buffer that the next chunk overwrites."""
  kept = list(events_of())
  texts = [[t for e in kept if e.index == i for t in e.tokens] for i in range(3)]
  assert texts == [s.tokens.tolist() for s in plain(**SAMPLING)]


@pytest.mark.parametrize("prompts", [[], [[]], [[97]], [prompt(300, 1)]])
def test_errors_are_raised_by_the_call_itself(prompts):
  with pytest.raises(ValueError, match="prompts"):
    events_of(prompts)
