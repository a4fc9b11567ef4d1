"""Tokens and logit bits do not depend on how they were speculated."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kdtree_jax import reference as ref
from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.model.state_dict import target_from_state_dict
from tests.decoding.models import (
  DEPTH,
  NEW,
  PROMPTS,
  ROWS,
  SLOTS,
  VOCAB,
  Mixed,
  decode,
  model_config,
  plain,
  script,
  scripted,
  target,
  true_script,
)

GREEDY = {"temperature": 0.0}
COOL = {"temperature": 0.7, "seed": 3}
WARM = {"temperature": 1.0, "seed": 2**32 - 1}
NUCLEUS = {"temperature": 1.0, "top_p": 0.9, "seed": 1}


def check_counts(result):
  """Rounds and tokens add up: the first token belongs to no round."""
  for sequence in result:
    stats = sequence.stats
    assert sum(stats.accepted_lengths) == len(sequence.tokens) - 1
    assert len(stats.accepted_lengths) == stats.rounds
    assert min(stats.accepted_lengths, default=1) >= 1
    assert len(sequence.logprobs) == len(sequence.tokens) == len(sequence.logits)


@pytest.mark.parametrize("kind", Mixed.KINDS)
@pytest.mark.parametrize(
  ("dtype", "sampling"),
  [
    ("float32", GREEDY),
    ("float32", COOL),
    ("float32", WARM),
    ("bfloat16", COOL),
    ("bfloat16", WARM),
    # Two programs for one more way to read the same logits.
    pytest.param("bfloat16", GREEDY, marks=pytest.mark.slow),
  ],
  ids=lambda value: value if isinstance(value, str) else f"T{value['temperature']}",
)
def test_any_drafter_and_budget_give_the_bits_of_plain_decoding(dtype, sampling, kind):
  expected = plain(dtype, **sampling)
  drafter = Mixed.create(kind, dtype, true_script(dtype, **sampling))
  rounds = []
  for budget in (0, 1, 7):
    result = decode(drafter, model=target(dtype), budget=budget, **sampling)
    assert first_difference(expected, result) is None
    check_counts(result)
    rounds.append(sum(s.rounds for s in result.stats))
  assert rounds[0] == 3 * (NEW - 1)  # a root alone is plain decoding
  if kind == "1.0":
    # Half of a round's 0.7 ** depth is spent on siblings of rank 0.2: depth 5.
    assert rounds[1:] == [3 * 12, 3 * 4]
  elif kind == "0.5":
    assert rounds[0] > rounds[1] > rounds[2]
  elif kind == "0.0":
    assert rounds == [rounds[0]] * 3
  elif kind == "ngram":
    assert rounds[2] < rounds[0]


def test_the_texts_are_worth_comparing():
  """No loops, all temperatures differ, every sequence differs, ties are rare."""
  texts = set()
  for sampling in (GREEDY, COOL, WARM):
    for tokens in plain(**sampling).tokens:
      assert len(set(tokens.tolist())) > NEW / 2
      texts.add(tuple(tokens.tolist()))
  assert len(texts) == 9
  assert first_difference(plain(**WARM), plain("bfloat16", **WARM)) is not None


def test_nucleus_sampling():
  expected = plain(**NUCLEUS)
  unfiltered = plain(temperature=1.0, seed=1)
  assert first_difference(expected, unfiltered) is not None
  for continuations in (true_script(**NUCLEUS), true_script(**WARM)):
    drafter = Mixed.create("1.0", continuations=continuations)
    result = decode(drafter, **NUCLEUS)
    assert first_difference(expected, result) is None
    check_counts(result)


def test_a_chain_accepts_whole_blocks_of_a_true_script():
  drafter = Mixed.create("1.0", continuations=true_script(**WARM))
  for budget, lengths in (
    (7, (8, 8, 7)),  # the last one is cut at the limit
    (3, (4, 4, 4, 4, 4, 3)),
    (0, (1,) * (NEW - 1)),
  ):
    result = decode(drafter, method="chain", budget=budget, **WARM)
    assert first_difference(plain(**WARM), result) is None
    assert [s.accepted_lengths for s in result.stats] == [lengths] * 3
  for kind in ("0.5", "broken"):
    drafter = Mixed.create(kind, continuations=true_script(**WARM))
    result = decode(drafter, method="chain", **WARM)
    assert first_difference(plain(**WARM), result) is None
    check_counts(result)


def test_one_slot():
  """Batch 1 compiles to other products than batch 3, and no taps to another step."""
  expected = decode(slots=1, **WARM)
  drafter = scripted(true_script(**WARM))
  for budget in (1, 7):
    result = decode(drafter, slots=1, budget=budget, **WARM)
    assert first_difference(expected, result) is None


@functools.cache
def grouped(number=SLOTS, budget=7):
  """Decoding with more than 16 experts, which also keeps each round's tree."""
  config = model_config(
    n_routed_experts=20, num_hidden_layers=1, first_k_dense_replace=0
  )
  model = target_from_state_dict(config, ref.random_weights(config, 4))
  drafter = scripted(true_script(**WARM))
  if budget:
    drafter = scripted(script(PROMPTS, grouped(budget=0).tokens))
  arguments = {"model": model, "budget": budget, "return_trees": True}
  return decode(drafter, PROMPTS[:number], **arguments, **WARM)


def test_grouped_experts():
  """Rows are sorted by expert, so neighbours and siblings move them."""
  expected = grouped(budget=0)  # a root alone is plain decoding, see above
  assert first_difference(expected, grouped()) is None
  assert [s.rounds for s in grouped().stats] == [4] * 3
  assert grouped(1)[0].logits.tobytes() == expected[0].logits.tobytes()


def test_traces_of_the_rounds():
  """Trees are the best for the drafter's table, and paths spell the text.

  Not the reference's node by node: XLA's and numpy's exp and log differ in their
  last bits, and the table is full of ties.
  """
  for prompt, sequence in zip(PROMPTS, grouped(), strict=True):
    text = [*prompt, *sequence.tokens.tolist()]
    assert len(sequence.rounds) == sequence.stats.rounds
    start = len(prompt)
    for taken, kept in zip(
      sequence.rounds, sequence.stats.accepted_lengths, strict=True
    ):
      assert taken.start == start and taken.path[0] == 0
      assert taken.draft_logits.shape == (DEPTH, VOCAB)
      tree = ref.build_tree(
        *ref.log_softmax_topk(taken.draft_logits, 7), 7, root_token=text[start]
      )
      assert taken.size == tree.size == ROWS
      np.testing.assert_allclose(taken.log_probs, tree.log_probs, atol=1e-5)
      table = ref.log_softmax(taken.draft_logits)
      assert taken.parents[0] == -1 and taken.token_ids[0] == text[start]
      for node in range(1, ROWS):
        parent, depth = taken.parents[node], taken.depths[node]
        assert parent < node and depth == taken.depths[parent] + 1
        own = taken.log_probs[node] - taken.log_probs[parent]
        drafted = table[depth - 1, taken.token_ids[node]]
        np.testing.assert_allclose(own, drafted, atol=1e-5)
      for depth, slot in enumerate(taken.path[:kept]):
        assert taken.depths[slot] == depth
        assert taken.token_ids[slot] == text[start + depth]
        assert depth == 0 or taken.parents[slot] == taken.path[depth - 1]
      start += len(taken.path)
    assert kept < len(taken.path)  # the last round is cut at the limit
  assert all(s.rounds is None for s in plain(**WARM))


@pytest.mark.parametrize("chunk_rounds", [1, 3, 7])
def test_compiled_calls_of_any_number_of_rounds(chunk_rounds):
  drafter = Mixed.create("1.0", continuations=true_script(**WARM))
  result = decode(drafter, chunk_rounds=chunk_rounds, budget=1, **WARM)
  expected = decode(drafter, budget=1, **WARM)
  assert first_difference(expected, result) is None
  for one, other in zip(expected.stats, result.stats, strict=True):
    assert one.accepted_lengths == other.accepted_lengths


def test_log_probabilities_are_those_of_the_logits():
  """fp32 log-softmax before temperature and filters.

  A sum of V terms in any order is off by V * 2**-24 of it at most, and exp and
  log by a few ulp: in all below 1e-5 at V = 97.
  """
  drafter = Mixed.create("0.5", continuations=true_script(**COOL))
  for result in (plain(**COOL), decode(drafter, **COOL)):
    for sequence in result:
      logits = sequence.logits.astype(np.float64)
      top = logits.max(axis=1, keepdims=True)
      log_z = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
      expected = np.take_along_axis(logits - log_z, sequence.tokens[:, None], 1)[:, 0]
      np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)


def test_two_calls_give_the_same_result():
  arguments = {"budget": 7, **WARM}
  drafter = Mixed.create("dflash")
  one, other = (decode(drafter, **arguments) for _ in range(2))
  assert first_difference(one, other) is None
  assert one.stats[0].accepted_lengths == other.stats[0].accepted_lengths
