"""Acceptance, repetition and intervals on numbers that were counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kdtree_jax.bench import metrics

# Two texts; per round one token more than drafts were accepted: a = 2, 0, 0 and 1.
ROUNDS = [(3, 1, 1), (2,)]


def test_micro_pools_rounds_and_macro_averages_prompts():
  counted = metrics.acceptance(ROUNDS, 3)
  assert (counted.prompts, counted.rounds, counted.committed) == (2, 4, 7)
  assert counted.tokens_per_round_micro == 7 / 4
  assert counted.tokens_per_round_macro == (5 / 3 + 2) / 2


def test_acceptance_by_position():
  counted = metrics.acceptance(ROUNDS, 3)
  assert counted.unconditional == (2 / 4, 1 / 4, 0)
  assert counted.conditional == (2 / 4, 1 / 2, 0)
  assert counted.histogram == (2, 1, 1, 0)
  assert counted.zero_share == 2 / 4
  # Leading runs are counted, so they add up; marginals multiplied would not.
  assert sum(counted.unconditional) == counted.tokens_per_round_micro - 1


def test_conditional_acceptance_is_nan_where_no_round_came():
  conditional = metrics.acceptance(ROUNDS, 5).conditional
  assert conditional[:3] == (1 / 2, 1 / 2, 0)
  assert all(math.isnan(c) for c in conditional[3:])


def test_prompts_without_rounds_have_no_weight():
  assert metrics.acceptance([*ROUNDS, ()], 3) == metrics.acceptance(ROUNDS, 3)
  nothing = metrics.acceptance([(), ()], 2)
  assert (nothing.prompts, nothing.rounds, nothing.histogram) == (0, 0, (0, 0, 0))
  assert math.isnan(nothing.tokens_per_round_micro)
  assert math.isnan(nothing.tokens_per_round_macro)
  assert all(math.isnan(u) for u in nothing.unconditional)


@pytest.mark.parametrize("rounds", [(4,), (0, 1)])
def test_impossible_rounds_are_refused(rounds):
  with pytest.raises(ValueError, match="accepted_lengths holds"):
    metrics.acceptance([rounds], 2)


def test_repeated_ngrams_are_those_seen_before_in_the_same_text():
  period = [*range(8), *range(8)]  # 9 8-grams, of which the last is the first
  assert metrics.repeated_ngram_share([period]) == 1 / 9
  fresh = [*range(20, 29)]  # two more, neither seen before
  assert metrics.repeated_ngram_share([period, fresh]) == 1 / 11
  # What another text said is no repetition.
  assert metrics.repeated_ngram_share([fresh, fresh]) == 0
  # 13 8-grams of one token, all but the first a repetition.
  assert metrics.repeated_ngram_share([[5] * 20]) == 12 / 13
  assert metrics.repeated_ngram_share([np.array([1, 2, 1, 2])], n=2) == 1 / 3
  assert math.isnan(metrics.repeated_ngram_share([[1] * 7, []]))


def test_interval_of_a_ratio_is_paired():
  rng = np.random.default_rng(0)
  rounds = rng.integers(5, 50, 12)
  committed = rounds * rng.uniform(1, 6, 12)
  # Prompts differ by a factor of six, yet each has the same ratio.
  low, high = metrics.ratio_interval((1.25 * committed, rounds), (committed, rounds))
  np.testing.assert_allclose([low, high], 1.25, rtol=1e-12)


def test_interval_of_a_ratio_spreads_as_its_prompts_do():
  below = ([10.0] * 4, [10.0] * 4)
  low, high = metrics.ratio_interval(([10.0, 10.0, 20.0, 20.0], [10.0] * 4), below)
  assert 1.0 <= low < 1.5 < high <= 2.0
  assert (low, high) == metrics.ratio_interval(
    ([10.0, 10.0, 20.0, 20.0], [10.0] * 4), below
  )
  assert all(math.isnan(x) for x in metrics.ratio_interval(([], []), ([], [])))


def test_interval_of_medians():
  rng = np.random.default_rng(1)
  plain = rng.uniform(50, 100, (5, 3))
  low, high = metrics.median_ratio_interval(2 * plain, plain)
  np.testing.assert_allclose([low, high], 2, rtol=1e-12)
  # A prompt on which speculation is slower widens the interval downwards.
  slower = 2 * plain
  slower[0] /= 4
  low, high = metrics.median_ratio_interval(slower, plain)
  assert low < high
