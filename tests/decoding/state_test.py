"""What the loop's state holds between and after its compiled calls."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kdtree_jax.decoding.state import DecodeState
from tests.decoding.models import (
  CACHE,
  NEW,
  PROMPTS,
  SLOTS,
  Mixed,
  decode,
  plain,
  prompt,
  true_script,
  watch_calls,
)

SAMPLING = {"temperature": 1.0}


@pytest.fixture
def states(monkeypatch):
  """(name, state) after each call that returns a whole state, as numpy arrays."""
  seen = []
  true_script(**SAMPLING)  # Decoded before anyone watches.

  def call(name, run, args, donate):
    del donate
    out = run(*args)
    state = out[0] if name.endswith("rounds") else out
    if isinstance(state, DecodeState):
      seen.append((name, jax.tree.map(np.array, state)))
    return out

  watch_calls(monkeypatch, call)
  return seen


def half_right() -> Mixed:
  return Mixed.create("0.5", continuations=true_script(**SAMPLING))


def test_cache_and_drafter_are_left_as_by_plain_decoding(states):
  """Keys, features and tokens of the accepted paths, not of the slots in their way."""
  ends = []
  for budget in (0, 7):
    result = decode(half_right(), budget=budget, **SAMPLING)
    ends.append(states[-1][1])
  assert max(max(s.accepted_lengths) for s in result.stats) > 3
  one, other = ends
  for slot, text in enumerate(PROMPTS):
    count = len(text) + NEW - 1
    assert one.cache.lengths[slot] == count <= other.cache.lengths[slot]
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    checked = 0
    for want, have in pairs:
      assert want.shape == have.shape
      if CACHE in want.shape:  # [.., slots, positions, ..]
        at = want.shape.index(CACHE)
        index = (*[slice(None)] * (at - 1), slot, slice(count))
        assert want[index].tobytes() == have[index].tobytes()
        checked += 1
    assert checked == 4  # latent rows, DFlash's keys and values, n-gram's history


def test_ended_slots_stay_as_they_are(states):
  """Neither their neighbours' rounds nor the admission of others touches them."""
  stop = int(plain(**SAMPLING)[1].tokens[4])
  assert stop not in plain(**SAMPLING)[0].tokens[:9]
  queue = [*PROMPTS, prompt(9, 30)]
  for drafter in (None, half_right()):
    states.clear()
    decode(drafter, queue, stop_token_ids=(stop,), chunk_rounds=1, **SAMPLING)
    ended = {}
    admissions = 0
    for name, state in states:
      admissions += name == "first token"
      for slot in range(SLOTS):
        if slot in ended and state.finish[slot] != DecodeState.RUNNING:
          for field in ("finish", "generated", "rounds", "root", "tokens"):
            want, have = (getattr(s, field)[slot] for s in (ended[slot], state))
            assert np.array_equal(want, have), field
          assert state.cache.lengths[slot] == ended[slot].cache.lengths[slot]
        elif state.finish[slot] != DecodeState.RUNNING:
          ended[slot] = state
        elif slot in ended:
          # Only an admission starts a slot again, and only for a new prompt.
          assert name == "first token" and admissions == 2
          assert state.generated[slot] == 1
          del ended[slot]
      assert (state.cache.lengths <= CACHE).all()
    assert admissions == 2 and len(ended) == SLOTS


def test_idle_slots_are_never_used(states):
  decode(half_right(), PROMPTS[:1], **SAMPLING)
  for _, state in states:
    assert (state.finish[1:] == DecodeState.IDLE).all()
    for field in ("generated", "rounds", "tokens", "accepted", "logits"):
      assert not getattr(state, field)[1:].any()
    assert not state.cache.lengths[1:].any()
    assert not state.cache.data.size or not state.cache.data[:, 1:].any()
