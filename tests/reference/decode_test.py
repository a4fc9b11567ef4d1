from __future__ import annotations

import functools

import numpy as np
import pytest

from kdtree_jax import reference as ref
from tests.reference.models import drafter_config, target_config

CONFIG = target_config()
WEIGHTS = ref.random_weights(CONFIG, 1)
PROMPT = [7, 3, 44, 0, 12]
F64 = np.float64  # so that no near-tie is decided by the width of a matmul


def decode(method="plain", **arguments):
  return ref.decode(CONFIG, WEIGHTS, PROMPT, method=method, dtype=F64, **arguments)


def random_drafter(features, root_token, length):
  del features
  rng = np.random.default_rng([root_token, length])
  return (2 * rng.standard_normal((5, 61))).astype(np.float32)


@functools.cache
def plain(temperature, top_p=1.0, max_new_tokens=16):
  return decode(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)


def knowing_drafter(temperature):
  """Proposes what plain decoding writes, preferring a wrong token at every third."""
  tokens = plain(temperature, max_new_tokens=24).tokens

  def draft(features, root_token, length):
    del features
    rng = np.random.default_rng(length)
    logits = rng.standard_normal((5, 61)).astype(np.float32)
    done = length - len(PROMPT)
    assert tokens[done] == root_token
    for depth, token in enumerate(tokens[done + 1 : done + 6]):
      logits[depth, token] = 9
      if (done + depth) % 3 == 0:
        logits[depth, (token + 1) % 61] = 9.5
    return logits

  return draft


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.8, 1.0), (1.0, 0.7)])
@pytest.mark.parametrize("method", ["chain", "ddtree"])
@pytest.mark.parametrize("drafter", ["random", "knowing"])
def test_speculation_writes_what_plain_decoding_writes(
  temperature, top_p, method, drafter
):
  if drafter == "knowing":
    draft_fn = knowing_drafter(temperature) if top_p == 1 else random_drafter
  else:
    draft_fn = random_drafter
  want = plain(temperature, top_p)
  got = decode(
    method,
    draft_fn=draft_fn,
    budget=9,
    temperature=temperature,
    top_p=top_p,
    max_new_tokens=16,
  )
  assert got.tokens == want.tokens
  np.testing.assert_allclose(got.logits, want.logits, atol=1e-12)
  assert sum(got.accepted_lengths) == len(got.tokens) - 1
  assert got.finish_reason == want.finish_reason == "length"
  assert want.accepted_lengths == [1] * 15
  if draft_fn is not random_drafter:
    # A chain ends at every third token, a tree goes on.
    assert max(got.accepted_lengths) == (3 if method == "chain" else 6)


def test_a_tree_survives_doubts_that_end_a_chain():
  drafter = knowing_drafter(0.0)
  arguments = {"draft_fn": drafter, "budget": 9, "max_new_tokens": 16}
  rounds = [len(decode(m, **arguments).accepted_lengths) for m in ("ddtree", "chain")]
  assert rounds[0] < rounds[1]


@pytest.mark.parametrize("budget", [0, 1, 2, 30, None])
def test_any_budget_writes_the_same(budget):
  got = decode(
    "ddtree", draft_fn=knowing_drafter(0.0), budget=budget, max_new_tokens=16
  )
  assert got.tokens == plain(0.0).tokens
  # None means 16 nodes, enough for the five proposals here.
  nodes = 16 if budget is None else budget
  assert max(got.accepted_lengths) <= min(nodes, 5) + 1
  assert (max(got.accepted_lengths) == 6) == (nodes >= 16)
  if budget == 0:
    assert got.accepted_lengths == [1] * 15


@pytest.mark.parametrize("method", ["plain", "ddtree"])
def test_each_token_is_chosen_with_the_noise_of_its_position(method):
  key = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "sequence_id": 6}
  got = decode(method, draft_fn=random_drafter, budget=9, max_new_tokens=12, **key)
  for i, (token, row) in enumerate(zip(got.tokens, got.logits, strict=True)):
    assert token == ref.choose(row, 0.8, 0.9, 5, 6, position=len(PROMPT) + i)


@pytest.mark.parametrize("sequence_id", range(8))
def test_the_first_token_is_sampled_at_the_position_after_the_prompt(sequence_id):
  got = decode(temperature=1.5, sequence_id=sequence_id, max_new_tokens=1)
  want = ref.choose(got.logits[0], 1.5, 1.0, 0, sequence_id, position=len(PROMPT))
  assert got.tokens == [want]
  assert got.accepted_lengths == []


def test_logits_are_those_of_one_forward_pass():
  got = plain(0.8)
  text = np.array(PROMPT + got.tokens[:-1])
  whole = ref.forward(CONFIG, WEIGHTS, text, dtype=F64)
  np.testing.assert_allclose(got.logits, whole.logits[len(PROMPT) - 1 :], atol=1e-12)


def test_dflash_drafter_gets_the_features_of_the_committed_tokens():
  config = drafter_config()
  weights = ref.random_drafter_weights(config, 3)
  drafter = functools.partial(ref.draft, config, weights, WEIGHTS)
  taps = config.target_layer_ids
  text = PROMPT + plain(0.8).tokens

  def watching(features, root_token, length):
    assert root_token == text[length]
    whole = ref.forward(CONFIG, WEIGHTS, np.array(text[:length]), taps=taps, dtype=F64)
    np.testing.assert_allclose(features, whole.features, atol=1e-12)
    # Proposals that are accepted, and not in the lowest slots.
    logits = knowing_drafter(0.8)(features, root_token, length)
    return logits[:4] + 0.01 * drafter(features, root_token, length)

  got = decode(
    "ddtree",
    draft_fn=watching,
    feature_layers=taps,
    budget=9,
    temperature=0.8,
    max_new_tokens=16,
  )
  assert got.tokens == plain(0.8).tokens
  assert max(got.accepted_lengths) == 5


@pytest.mark.parametrize("method", ["plain", "ddtree"])
@pytest.mark.parametrize("index", range(1, 15))
def test_stop_token_ends_the_text_and_cuts_the_round(method, index):
  tokens = plain(0.8).tokens
  stop = tokens[index]
  got = decode(
    method,
    draft_fn=knowing_drafter(0.8),
    budget=9,
    temperature=0.8,
    max_new_tokens=16,
    stop_token_ids=(stop,),
  )
  assert got.tokens == tokens[: tokens.index(stop) + 1]
  assert got.finish_reason == "stop"
  assert len(got.logits) == len(got.tokens)
  assert sum(got.accepted_lengths) == len(got.tokens) - 1


def test_stop_on_the_first_token_and_config_eos():
  first = plain(0.0).tokens[0]
  got = ref.decode(target_config(eos_token_id=(first,)), WEIGHTS, PROMPT, dtype=F64)
  assert (got.tokens, got.finish_reason) == ([first], "stop")
  assert got.accepted_lengths == []


@pytest.mark.parametrize("limit", range(1, 9))
def test_limit_cuts_the_round(limit):
  got = decode("ddtree", draft_fn=knowing_drafter(0.0), budget=9, max_new_tokens=limit)
  assert got.tokens == plain(0.0).tokens[:limit]
  assert got.finish_reason == "length"
  assert sum(got.accepted_lengths) == limit - 1


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_bad_logits_end_the_text_with_an_error(method, temperature, poison):
  """Embedding a token that plain decoding writes makes its successor's logits bad."""
  tokens = plain(temperature).tokens
  drafter = knowing_drafter(temperature)
  bad = next(t for i, t in enumerate(tokens) if i >= 4 and t not in PROMPT)
  weights = dict(WEIGHTS)
  embedding = weights["model.embed_tokens.weight"].copy()
  embedding[bad] = poison
  weights["model.embed_tokens.weight"] = embedding
  with np.errstate(invalid="ignore"):
    got = ref.decode(
      CONFIG,
      weights,
      PROMPT,
      method=method,
      draft_fn=drafter,
      budget=9,
      temperature=temperature,
      max_new_tokens=16,
      dtype=F64,
    )
  assert got.finish_reason == "error"
  assert got.tokens == tokens[: tokens.index(bad) + 1]
  assert sum(got.accepted_lengths) == len(got.tokens) - 1
  assert 0 not in got.accepted_lengths
  assert np.all(np.isfinite(got.logits))


def test_infinite_logits_end_the_text_with_an_error():
  """A row of the head with one entry so large that a product overflows."""
  tokens = plain(0.0).tokens
  text = np.array(PROMPT + tokens[:-1])
  hidden = ref.forward(CONFIG, WEIGHTS, text, taps=(2,), dtype=F64).features
  norm = WEIGHTS["model.norm.weight"]
  final = ref.rms_norm(hidden, norm, CONFIG.rms_norm_eps)[len(PROMPT) - 1 :]
  # Negative up to some step, so that the token is out of the question till then.
  above = final > 1.1
  first = above.argmax(axis=0)
  steps = np.arange(len(final))[:, None]
  fits = above.any(axis=0) & (first >= 3)
  fits &= np.all((final < 0) | (steps >= first), axis=0)
  column = int(np.flatnonzero(fits)[0])
  unused = next(token for token in range(61) if token not in PROMPT + tokens)
  head = WEIGHTS["lm_head.weight"].copy()
  head[unused] = 0
  head[unused, column] = np.finfo(np.float32).max
  with np.errstate(over="ignore"):
    got = ref.decode(
      CONFIG, WEIGHTS | {"lm_head.weight": head}, PROMPT, max_new_tokens=16
    )
  assert got.finish_reason == "error"
  assert got.tokens == tokens[: first[column]]


def test_seed_and_sequence_id_change_the_text():
  texts = {
    tuple(decode(temperature=1.0, max_new_tokens=6, **key).tokens)
    for key in ({}, {"seed": 1}, {"sequence_id": 1})
  }
  assert len(texts) == 3


def test_chain_is_the_top_1_path_within_its_budget():
  drafter = knowing_drafter(0.0)
  longest = {}
  for budget in (1, None):
    got = decode("chain", draft_fn=drafter, budget=budget, max_new_tokens=16)
    longest[budget] = max(got.accepted_lengths)
    assert got.tokens == plain(0.0).tokens
  assert longest == {1: 2, None: 3}


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="method = 'tree'"):
    decode("tree")
  with pytest.raises(ValueError, match="draft_fn is None"):
    decode("ddtree")
  with pytest.raises(ValueError, match="budget = -1"):
    decode("ddtree", draft_fn=random_drafter, budget=-1)
  with pytest.raises(ValueError, match="max_new_tokens = 0"):
    decode(max_new_tokens=0)
  with pytest.raises(ValueError, match="one sequence"):
    ref.decode(CONFIG, WEIGHTS, [])
