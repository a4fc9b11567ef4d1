"""A sequence does not notice its neighbours, its slot, or who was there before."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_jax.decoding.compare import first_difference
from tests.decoding.models import NEW, SLOTS, Mixed, decode, plain, prompt, script

SAMPLING = {"temperature": 1.0, "seed": 9}
# More prompts than slots, on both sides of attention's chunk of 128 positions. The
# long ones come first, so that later ones find leftovers behind their own rows.
QUEUE = [prompt(length, 20 + length) for length in (200, 131, 140, 3, 127, 1, 129, 64)]


@pytest.fixture(scope="module")
def alone():
  """Each prompt of the queue by itself, in slot 0."""
  results = [
    decode(None, [p], sequence_ids=[i], **SAMPLING) for i, p in enumerate(QUEUE)
  ]
  return [result[0] for result in results]


@pytest.fixture(scope="module")
def drafter(alone):
  return Mixed.create("0.5", continuations=script(QUEUE, [s.tokens for s in alone]))


def assert_same(expected, actual):
  assert actual.tokens.tolist() == expected.tokens.tolist()
  assert actual.logits.tobytes() == expected.logits.tobytes()
  assert actual.finish_reason == expected.finish_reason


def test_prompts_join_as_others_finish(alone, drafter):
  for result in (decode(None, QUEUE, **SAMPLING), decode(drafter, QUEUE, **SAMPLING)):
    assert len(result) == len(QUEUE)
    for expected, actual in zip(alone, result, strict=True):
      assert_same(expected, actual)


def test_rounds_of_the_drafter_do_not_depend_on_neighbours(drafter):
  """The drafter's state is per slot too: same rounds, not only the same text."""
  for kind in ("dflash", "ngram"):
    other = Mixed(drafter.parts, Mixed.create(kind).kind)
    together = decode(other, QUEUE, **SAMPLING)
    for i in (0, 3, 6):
      by_itself = decode(other, [QUEUE[i]], sequence_ids=[i], **SAMPLING)[0]
      lengths = by_itself.stats.accepted_lengths
      assert together[i].stats.accepted_lengths == lengths
      assert_same(by_itself, together[i])


def test_other_order_other_slots(alone, drafter):
  order = np.random.default_rng(0).permutation(len(QUEUE))
  shuffled = [QUEUE[i] for i in order]
  result = decode(drafter, shuffled, sequence_ids=order.tolist(), **SAMPLING)
  for i, actual in zip(order, result, strict=True):
    assert_same(alone[i], actual)


def test_all_long_prompts(alone, drafter):
  """With every length at 128 or more, attention skips no committed chunk's form."""
  for choice in ((0, 1, 2), (6, 2, 0)):
    prompts = [QUEUE[i] for i in choice]
    assert min(map(len, prompts)) >= 128
    for result in (
      decode(None, prompts, sequence_ids=choice, **SAMPLING),
      decode(drafter, prompts, sequence_ids=choice, **SAMPLING),
    ):
      for i, actual in zip(choice, result, strict=True):
        assert_same(alone[i], actual)


def test_one_prompt_in_every_slot(alone):
  """The id makes the text, the slot does not."""
  prompts = [QUEUE[4]] * SLOTS
  same = decode(None, prompts, sequence_ids=[4] * SLOTS, **SAMPLING)
  for sequence in same:
    assert_same(alone[4], sequence)
  others = decode(None, prompts, sequence_ids=[0, 1, 2], **SAMPLING)
  assert len({tuple(s.tokens.tolist()) for s in others}) == SLOTS


def test_neighbours_that_stop_early(alone, drafter):
  """Sequences that end in different rounds free their slots for the next ones."""
  stop = sorted({int(s.tokens[k]) for s, k in zip(alone[:3], (1, 6, 12), strict=True)})
  result = decode(drafter, QUEUE, stop_token_ids=tuple(stop), **SAMPLING)
  reasons = set()
  for expected, actual in zip(alone, result, strict=True):
    ends = np.flatnonzero(np.isin(expected.tokens, stop))
    count = ends[0] + 1 if ends.size else NEW
    assert actual.tokens.tolist() == expected.tokens[:count].tolist()
    assert actual.logits.tobytes() == expected.logits[:count].tobytes()
    assert actual.finish_reason == ("stop" if ends.size else "length")
    reasons.add(actual.finish_reason)
  assert reasons == {"stop", "length"}


def test_default_sequence_ids_are_the_indices():
  explicit = decode(None, sequence_ids=[0, 1, 2], **SAMPLING)
  assert first_difference(decode(None, **SAMPLING), explicit) is None
  other = decode(None, sequence_ids=[2**31 - 1, 5, 0], **SAMPLING)
  assert first_difference(plain(**SAMPLING), other) is not None
