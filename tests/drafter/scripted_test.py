from __future__ import annotations

import jax
import numpy as np
import pytest

from kdtree_jax.config import ConfigError
from kdtree_jax.drafter.scripted import Scripted

VOCAB, DEPTH, TOTAL = 13, 8, 600


@jax.jit
def _draft(drafter, lengths, sequence_ids):
  root = np.zeros(len(lengths), np.int32)
  return drafter.draft(None, (), root, lengths, sequence_ids)


def _script(rows: int = 5) -> np.ndarray:
  return np.random.default_rng(0).integers(0, VOCAB, size=(rows, TOTAL))


def _table(accuracy: float) -> tuple[np.ndarray, np.ndarray]:
  """Logits [N, V] and true tokens [N] at many places of the script."""
  script = _script()
  starts = np.arange(0, TOTAL - DEPTH - 1, DEPTH)
  ids = np.repeat(np.arange(5), len(starts))
  lengths = np.tile(starts, 5)
  drafter = Scripted(script, accuracy, VOCAB, DEPTH)
  logits = np.asarray(_draft(drafter, lengths, ids))
  true = script[ids[:, None], lengths[:, None] + 1 + np.arange(DEPTH)]
  return logits.reshape(-1, VOCAB), true.reshape(-1)


def test_always_right():
  logits, true = _table(1.0)
  np.testing.assert_array_equal(logits.argmax(axis=-1), true)


def test_always_wrong_never_holds_the_true_token():
  logits, true = _table(0.0)
  picked = np.take_along_axis(logits, true[:, None], axis=1)
  assert (picked == -np.inf).all()
  others = logits.copy()
  np.put_along_axis(others, true[:, None], 0, axis=1)
  assert np.isfinite(others).all()


@pytest.mark.parametrize("accuracy", [0.25, 0.5, 0.9])
def test_hits_and_findable_misses_have_their_shares(accuracy):
  logits, true = _table(accuracy)
  order = np.argsort(-logits, axis=-1, kind="stable")
  hit = order[:, 0] == true
  misses = (~hit).sum()
  # Five standard deviations of a binomial share.
  assert abs(hit.mean() - accuracy) < 5 * (accuracy * (1 - accuracy) / len(hit)) ** 0.5
  second = (order[:, 1] == true) & ~hit
  assert abs(second.sum() / misses - 0.5) < 5 * 0.5 / misses**0.5
  ruled_out = np.take_along_axis(logits, true[:, None], axis=1)[:, 0] == -np.inf
  np.testing.assert_array_equal(ruled_out, ~hit & ~second)
  # First and second stand out of the rest.
  top = np.take_along_axis(logits, order[:, :3], axis=1)
  assert ((top[:, 0] - top[:, 1] > 1) & (top[:, 1] - top[:, 2] > 1)).all()


def test_wrong_tokens_spread_over_the_vocabulary():
  logits, true = _table(0.0)
  distance = (logits.argmax(axis=-1) - true) % VOCAB
  counts = np.bincount(distance, minlength=VOCAB)
  assert counts[0] == 0
  share = 1 / (VOCAB - 1)
  deviation = (share * (1 - share) / len(true)) ** 0.5
  assert (np.abs(counts[1:] / len(true) - share) < 5 * deviation).all()


def test_a_position_is_judged_alike_from_every_root_and_batch():
  drafter = Scripted(_script(), 0.5, VOCAB, DEPTH)
  base = np.asarray(_draft(drafter, np.array([10, 40]), np.array([3, 1])))
  later = np.asarray(_draft(drafter, np.array([0, 0, 13]), np.array([3, 1, 3])))
  np.testing.assert_array_equal(base[0, 3:], later[2, :-3])
  other = np.asarray(_draft(drafter, np.array([10]), np.array([1])))
  assert (other[0] != base[0]).any()


def test_beyond_the_script_nothing_is_known():
  drafter = Scripted(_script(), 1.0, VOCAB, DEPTH)
  logits = np.asarray(_draft(drafter, np.array([TOTAL - 3]), np.array([0])))[0]
  np.testing.assert_array_equal(logits[:2].argmax(-1), _script()[0, -2:])
  assert not np.isnan(logits).any()
  # All tokens are possible within it; beyond it the last one counts as ruled out.
  possible = np.isfinite(logits).sum(axis=-1)
  np.testing.assert_array_equal(possible, [VOCAB] * 2 + [VOCAB - 1] * (DEPTH - 2))


def test_arguments_are_checked():
  with pytest.raises(ConfigError, match=r"accuracy = 1.5"):
    Scripted(_script(), 1.5, VOCAB)
  with pytest.raises(ConfigError, match="vocab_size = 2"):
    Scripted(_script(), 0.5, 2)
