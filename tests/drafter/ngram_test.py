from __future__ import annotations

import jax
import numpy as np
import pytest

from kdtree_jax.config import ConfigError
from kdtree_jax.drafter.ngram import NGram

VOCAB, DEPTH, CACHE = 11, 5, 40


@jax.jit
def _draft(drafter, state, root, lengths):
  return drafter.draft(None, state, root, lengths, np.zeros(len(lengths), int))


def _logits(texts: list[list[int]], max_ngram: int = 4) -> np.ndarray:
  """Logits after each text, whose last token is the root."""
  drafter = NGram(VOCAB, DEPTH, max_ngram)
  lengths = np.array([len(text) - 1 for text in texts])
  rows = np.full((len(texts), CACHE), 7)
  for row, text in zip(rows, texts, strict=True):
    row[: len(text) - 1] = text[:-1]
  features = np.zeros((*rows.shape, 0))
  state = drafter.init_state(len(texts), CACHE)
  state = drafter.observe(None, state, rows, features, np.zeros_like(lengths), lengths)
  roots = np.array([text[-1] for text in texts])
  return np.asarray(_draft(drafter, state, roots, lengths))


def _probabilities(text: list[int], max_ngram: int = 4) -> np.ndarray:
  return np.exp(_logits([text], max_ngram)[0])


def _ranked(text: list[int], max_ngram: int = 4) -> list[list[int]]:
  """Per depth the tokens above the uniform share, best first."""
  likely = _probabilities(text, max_ngram)
  return [
    [int(i) for i in np.argsort(-row) if row[i] > 1.5 * row.min()] for row in likely
  ]


def test_a_repeating_text_goes_on_repeating():
  text = [1, 2, 3] * 4
  for cut in (7, 8, 9, 12):
    expected = [text[(cut + k) % 3] for k in range(DEPTH)]
    assert [row[0] for row in _ranked(text[:cut])] == expected


def test_the_longest_suffix_wins_over_a_later_shorter_one():
  # The text ends in 5 6; the earlier place repeats both, the later only the 6.
  assert _ranked([5, 6, 1, 2, 3, 9, 6, 4, 4, 8, 5, 6])[0] == [1, 4]
  # With unigrams alone the later one wins.
  assert _ranked([5, 6, 1, 2, 3, 9, 6, 4, 4, 8, 5, 6], max_ngram=1)[0] == [4, 1]


def test_the_latest_of_equals_wins_and_the_alternative_differs():
  text = [6, 1, 0, 6, 2, 0, 6, 2, 9, 6]
  assert _ranked(text)[0] == [2, 1]
  assert _ranked(text)[1] == [9, 0]


def test_nothing_found_means_uniform():
  for text in ([3], [1, 2, 3]):
    np.testing.assert_allclose(_probabilities(text), 1 / VOCAB, rtol=1e-6)


def test_logits_are_log_probabilities():
  for text in ([1, 2, 3], [1, 2, 1], [6, 1, 0, 6, 2, 0, 6]):
    # VOCAB terms of one rounding each, and those of exp and log.
    np.testing.assert_allclose(_probabilities(text).sum(axis=-1), 1, rtol=1e-5)


def test_top_proposal_equals_a_plain_search():
  rng = np.random.default_rng(0)
  texts = [
    rng.integers(0, vocab, size=rng.integers(2, CACHE)).tolist()
    for vocab in (2, 3, 5, 10)
    for _ in range(50)
  ]

  def search(text: list[int], max_ngram: int) -> list[int] | None:
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
      for end in range(len(text) - 2, n - 2, -1):
        if text[end - n + 1 : end + 1] == text[-n:]:
          period = len(text) - 1 - end
          return [text[end + 1 + k % period] for k in range(DEPTH)]
    return None

  top = _logits(texts, 3).argmax(axis=-1)
  for text, proposal in zip(texts, top, strict=True):
    expected = search(text, 3)
    if expected is not None:
      assert proposal.tolist() == expected, text


def test_the_past_of_a_slot_and_garbage_rows_are_not_searched():
  drafter = NGram(VOCAB, DEPTH)
  rows, features = np.full((1, CACHE), 4), np.zeros((1, CACHE, 0))
  zero, full = np.array([0]), np.array([CACHE])
  used = drafter.observe(None, drafter.init_state(1, CACHE), rows, features, zero, full)
  # A new sequence of 3 tokens, in a step of which only 3 rows count.
  rows = np.array([[1, 2, 1, 9, 9]])
  state = drafter.observe(None, used, rows, features[:, :5], zero, np.array([3]))
  np.testing.assert_array_equal(state.history[0, :5], [1, 2, 1, 4, 4])
  fresh = drafter.init_state(1, CACHE)
  fresh = drafter.observe(None, fresh, rows[:, :3], features[:, :3], zero, zero + 3)
  for root in (1, 2, 4):
    root = np.array([root])
    np.testing.assert_array_equal(
      _draft(drafter, state, root, zero + 3), _draft(drafter, fresh, root, zero + 3)
    )
  # Rows beyond the cache are dropped, and a root beyond it can be drafted from.
  end = drafter.observe(None, used, rows, features[:, :5], full - 2, zero + 5)
  np.testing.assert_array_equal(end.history[0, -3:], [4, 1, 2])
  assert _draft(drafter, end, np.array([1]), full)[0, 0].argmax() == 2


def test_sizes_are_checked():
  with pytest.raises(ConfigError, match="max_ngram = 0"):
    NGram(VOCAB, DEPTH, 0)
  with pytest.raises(ConfigError, match="depth = 0"):
    NGram(VOCAB, 0)
