from __future__ import annotations

import numpy as np
import pytest

from kdtree_jax import reference as ref

LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 1.5, -np.inf, 3.0], np.float32)


def exact_distribution(temperature: float, top_p: float) -> np.ndarray:
  """By definition, with Python's sort and float64."""
  p = np.exp(LOGITS.astype(np.float64) / temperature)
  p /= p.sum()
  kept, mass = [], 0.0
  for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
    if mass < top_p:
      kept.append(token)
      mass += p[token]
  return np.where(np.isin(np.arange(len(p)), kept), p, 0) / p[kept].sum()


@pytest.mark.parametrize(
  ("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 0.8), (1.0, 0.35)]
)
def test_frequencies_follow_the_exact_distribution(temperature, top_p):
  draws = 2500
  tokens = [ref.choose(LOGITS, temperature, top_p, 9, 2, i) for i in range(draws)]
  counts = np.bincount(tokens, minlength=len(LOGITS))
  p = exact_distribution(temperature, top_p)
  assert np.all(counts[p == 0] == 0)
  live = p > 0
  chi2 = np.sum((counts[live] - draws * p[live]) ** 2 / (draws * p[live]))
  # The 99.9 % point of chi-square with at most 6 degrees of freedom is 22.5.
  assert chi2 < 22.5


def test_greedy_takes_the_lowest_of_equal_logits():
  assert ref.choose(LOGITS, 0.0, 1.0, 0, 0, 0) == 1


def test_choice_depends_on_position_and_sequence_only_through_the_noise():
  flat = np.zeros(50, np.float32)
  picks = {
    ref.choose(flat, 1.0, 1.0, 0, sequence, position)
    for sequence in range(5)
    for position in range(5)
  }
  assert len(picks) > 10
  noise = ref.gumbel_noise(0, 3, 4, 50)
  assert ref.choose(flat, 1.0, 1.0, 0, 3, 4) == np.argmax(noise)
  assert ref.choose(flat + 2 * noise, 2.0, 1.0, 0, 3, 4) == np.argmax(2 * noise)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.75, 0.9, 0.99999])
def test_top_p_keeps_the_smallest_sufficient_set(top_p):
  filtered = ref.top_p_filter(LOGITS, top_p)
  want = exact_distribution(1.0, top_p) > 0
  np.testing.assert_array_equal(filtered > -np.inf, want)
  np.testing.assert_array_equal(filtered[want], LOGITS[want])


def test_top_p_ties_keep_the_lowest_ids():
  filtered = ref.top_p_filter(np.zeros(4, np.float32), 0.5)
  assert np.flatnonzero(filtered > -np.inf).tolist() == [0, 1]


def test_top_p_of_one_keeps_all():
  tiny = np.array([50.0, -50.0], np.float32)
  np.testing.assert_array_equal(ref.top_p_filter(tiny, 1.0), tiny)
