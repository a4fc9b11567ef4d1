"""How texts end, by every method at the same token."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.model.state_dict import target_from_state_dict
from tests.decoding.models import (
  CACHE,
  CONFIG,
  LENGTHS,
  NEW,
  PROMPTS,
  SLOTS,
  VOCAB,
  WEIGHTS,
  Mixed,
  decode,
  plain,
  prompt,
  script,
  true_script,
)

SAMPLING = {"temperature": 1.0, "seed": 2}


def texts() -> list[list[int]]:
  """What plain decoding writes, uncut."""
  return [tokens.tolist() for tokens in plain(**SAMPLING).tokens]


def speculators(scripted=None):
  """(drafter, arguments), most of which accept a lot."""
  scripted = true_script(**SAMPLING) if scripted is None else scripted
  yield Mixed.create("1.0", continuations=scripted), {}
  yield Mixed.create("1.0", continuations=scripted), {"method": "chain"}
  yield Mixed.create("0.5", continuations=scripted), {}
  yield Mixed.create("dflash"), {}


def check_all(expected, prompts=None, scripted=None, **arguments):
  """Every method ends as plain decoding does."""
  for drafter, method in speculators(scripted):
    result = decode(drafter, prompts, **method, **SAMPLING, **arguments)
    assert first_difference(expected, result) is None
    for sequence in result:
      lengths = sequence.stats.accepted_lengths
      assert sum(lengths) == max(len(sequence.tokens) - 1, 0)
      assert len(lengths) == sequence.stats.rounds


@pytest.mark.parametrize("place", [0, 1, 2, 4, 7, 8, 9, 15, 22, 23])
def test_stop_token_at_any_place_of_a_block(place):
  """Blocks of the true script end after tokens 0, 8, 16, ...; 0 is the prefill's."""
  stop = texts()[1][place]
  expected = decode(stop_token_ids=(stop,), **SAMPLING)
  for text, sequence in zip(texts(), expected, strict=True):
    count = text.index(stop) + 1 if stop in text else NEW
    assert sequence.tokens.tolist() == text[:count]
    assert sequence.finish_reason == ("stop" if stop in text else "length")
  assert expected[1].finish_reason == "stop"
  check_all(expected, stop_token_ids=(stop,))


def test_several_stop_tokens():
  """The first of them in the text counts; one of them is the first token of a text."""
  one, two, three = texts()
  stop = (one[0], two[13], two[5], three[18])
  expected = decode(stop_token_ids=stop, **SAMPLING)
  for text, sequence in zip(texts(), expected, strict=True):
    count = min((text.index(t) + 1 for t in stop if t in text), default=NEW)
    assert sequence.tokens.tolist() == text[:count]
  assert len(expected[0].tokens) == 1 and expected[0].stats.rounds == 0
  assert expected[0].finish_reason == "stop"
  check_all(expected, stop_token_ids=stop)


def test_token_0_can_stop_and_padding_does_not():
  """Unused stop tokens and padded nodes must not pass for tokens."""
  common = texts()[0][6]
  swap = {common: 0, 0: common}
  order = np.array([swap.get(v, v) for v in range(VOCAB)])
  weights = dict(WEIGHTS)
  for name in ("model.embed_tokens.weight", "lm_head.weight"):
    weights[name] = WEIGHTS[name][order]
  model = target_from_state_dict(CONFIG, weights)
  prompts = [order[p].tolist() for p in PROMPTS]
  expected = decode(None, prompts, model=model, temperature=0.0, stop_token_ids=(0,))
  scripted = script(prompts, decode(None, prompts, model=model, temperature=0.0).tokens)
  drafter = Mixed.create("0.5", continuations=scripted)
  result = decode(drafter, prompts, model=model, stop_token_ids=(0,))
  assert first_difference(expected, result) is None
  for sequence in result:
    assert (sequence.finish_reason == "stop") == (0 in sequence.tokens)
    assert 0 not in sequence.tokens[:-1]


@pytest.mark.parametrize("which", ["none", "first", "all"])
def test_one_new_token(which):
  """No round runs at all; any number of stop tokens is allowed."""
  stops = {"none": (), "first": (texts()[0][0],), "all": tuple(range(VOCAB))}[which]
  for drafter in (None, Mixed.create("dflash")):
    result = decode(drafter, max_new_tokens=1, stop_token_ids=stops, **SAMPLING)
    for text, sequence in zip(texts(), result, strict=True):
      assert sequence.tokens.tolist() == text[:1]
      reason = "stop" if text[0] in stops else "length"
      assert sequence.finish_reason == reason
      assert sequence.stats.rounds == 0 and sequence.stats.accepted_lengths == ()
      assert math.isnan(sequence.stats.tokens_per_round)
    assert math.isnan(result.tokens_per_round)


@pytest.mark.parametrize("capacity", [*range(129, 137), 141, 147, 148, 149])
def test_full_cache(capacity):
  """A sequence may fill `cache_len` positions; its last token needs none."""
  expected = decode(cache_len=capacity, **SAMPLING)
  for text, length, sequence in zip(texts(), LENGTHS, expected, strict=True):
    count = min(capacity - length + 1, NEW)
    assert sequence.tokens.tolist() == text[:count]
    assert sequence.finish_reason == ("length" if count == NEW else "cache")
  check_all(expected, cache_len=capacity)


def test_a_prompt_that_fills_the_cache():
  prompts = [prompt(200, 1), prompt(199, 2), prompt(7, 3)]
  expected = decode(None, prompts, cache_len=200, **SAMPLING)
  assert [len(t) for t in expected.tokens] == [1, 2, NEW]
  assert expected.finish_reason == ["cache", "cache", "length"]
  scripted = script(prompts, decode(None, prompts, **SAMPLING).tokens)
  check_all(expected, prompts, scripted, cache_len=200)


def test_stop_comes_before_limit_and_cache():
  """A last token that is a stop token ends the text as "stop"."""
  for drafter in (None, Mixed.create("1.0", continuations=true_script(**SAMPLING))):
    for text, result_index in ((texts()[0], 0), (texts()[2], 2)):
      last = {"stop_token_ids": (text[-1],)}
      if text[-1] not in text[:-1]:
        sequence = decode(drafter, **last, **SAMPLING)[result_index]
        assert sequence.finish_reason == "stop" and len(sequence.tokens) == NEW
    text = texts()[0]
    at = next(k for k in range(4, 12) if text[k] not in text[:k])
    full = {"stop_token_ids": (text[at],), "cache_len": LENGTHS[0] + at}
    sequence = decode(drafter, **full, **SAMPLING)[0]
    assert sequence.finish_reason == "stop" and len(sequence.tokens) == at + 1


def poisoned(token, value=np.nan):
  """The target, with bad logits after one token."""
  embedding = WEIGHTS["model.embed_tokens.weight"].copy()
  embedding[token] = value
  return target_from_state_dict(
    CONFIG, WEIGHTS | {"model.embed_tokens.weight": embedding}
  )


def unique_token(owner, first=4):
  """A token that text `owner` writes at or after `first`, and no one else."""
  text = texts()[owner]
  taken = {t for i, other in enumerate(texts()) if i != owner for t in other}
  taken |= {t for p in PROMPTS for t in p} | set(text[:first])
  at = next(k for k in range(first, NEW - 1) if text[k] not in taken)
  return text[at], at


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("owner", [0, 1])
def test_bad_logits_end_one_sequence_only(owner, value):
  bad, at = unique_token(owner)
  model = poisoned(bad, value)
  expected = decode(model=model, **SAMPLING)
  for i, (text, sequence) in enumerate(zip(texts(), expected, strict=True)):
    reason, count = ("error", at + 1) if i == owner else ("length", NEW)
    assert sequence.finish_reason == reason
    assert sequence.tokens.tolist() == text[:count]
    clean = plain(**SAMPLING)[i].logits[:count]
    assert sequence.logits.tobytes() == clean.tobytes()
  check_all(expected, model=model)


def test_bad_logits_of_rejected_drafts_are_ignored():
  """A drafter that proposes the poisonous token everywhere, siblings included."""
  bad, at = unique_token(1)
  model = poisoned(bad)
  wrong = jnp.full((SLOTS, CACHE), bad, jnp.int32)
  drafter = Mixed.create("1.0", continuations=wrong)
  result = decode(drafter, model=model, **SAMPLING)
  assert first_difference(decode(model=model, **SAMPLING), result) is None
  assert result.finish_reason == ["length", "error", "length"]
  assert len(result[1].tokens) == at + 1


def test_a_slot_recovers_from_bad_logits():
  """NaN keys stay behind in the slot; the next prompt there must not see them."""
  bad, _ = unique_token(1)
  model = poisoned(bad)
  long = [*prompt(150, 1), bad]
  ends_badly = [*PROMPTS[1], bad]
  queue = [long, ends_badly, long, *PROMPTS]
  for drafter in (None, Mixed.create("dflash"), Mixed.create("ngram")):
    result = decode(
      drafter, queue, model=model, sequence_ids=[7, 8, 9, 0, 1, 2], **SAMPLING
    )
    assert result.finish_reason[:3] == ["error"] * 3
    for sequence in result[:3]:
      assert len(sequence.tokens) == 0 and sequence.stats.rounds == 0
    for i, actual in enumerate(result[3:]):
      expected = decode(model=model, **SAMPLING)[i]
      assert actual.tokens.tolist() == expected.tokens.tolist()
      assert actual.logits.tobytes() == expected.logits.tobytes()
      assert actual.finish_reason == expected.finish_reason


def test_a_stop_or_limit_before_bad_logits_wins():
  bad, at = unique_token(1)
  model = poisoned(bad)
  expected = decode(model=model, stop_token_ids=(bad,), **SAMPLING)
  assert expected[1].finish_reason == "stop" and len(expected[1].tokens) == at + 1
  check_all(expected, model=model, stop_token_ids=(bad,))
