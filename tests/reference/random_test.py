from __future__ import annotations

import numpy as np
import pytest

from kdtree_jax import reference as ref


@pytest.mark.parametrize(
  ("key", "counter", "answer"),
  # Random123, tests/kat_vectors: threefry2x32, 20 rounds.
  [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    (
      (0x13198A2E, 0x03707344),
      (0x243F6A88, 0x85A308D3),
      (0xC4923A9C, 0x483DF7A0),
    ),
  ],
)
def test_threefry_known_answers(key, counter, answer):
  words = ref.threefry2x32(key, (np.array(counter[0]), np.array(counter[1])))
  assert tuple(int(word) for word in words) == answer


def test_threefry_of_arrays_is_elementwise():
  counters = np.arange(12, dtype=np.uint32).reshape(3, 4)
  x0, x1 = ref.threefry2x32((5, 6), (counters, counters + 100))
  assert x0.shape == x1.shape == (3, 4) and x0.dtype == np.uint32
  for at in np.ndindex(3, 4):
    alone = ref.threefry2x32((5, 6), (counters[at], counters[at] + np.uint32(100)))
    assert (x0[at], x1[at]) == alone


def test_bits_are_two_nested_hashes():
  bits = ref.random_bits(seed=11, sequence_id=3, position=70, vocab_size=5)
  row_key = ref.threefry2x32((11, 3), (np.array(70), np.array(0)))
  for token in range(5):
    key = (int(row_key[0]), int(row_key[1]))
    word, _ = ref.threefry2x32(key, (np.array(token), np.array(0)))
    assert bits[token] == word


def test_bits_of_a_token_do_not_depend_on_the_vocabulary():
  np.testing.assert_array_equal(
    ref.random_bits(1, 2, 3, 10), ref.random_bits(1, 2, 3, 1000)[:10]
  )


def test_every_part_of_the_key_counts():
  keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32 - 1, 0, 0)]
  rows = {ref.random_bits(*key, 8).tobytes() for key in keys}
  assert len(rows) == len(keys)


def test_gumbel_noise_has_its_distribution():
  noise = ref.gumbel_noise(seed=0, sequence_id=0, position=0, vocab_size=200_000)
  assert noise.dtype == np.float32 and np.all(np.isfinite(noise))
  # Standard errors: 1.28 / sqrt(n) = 0.003 of the mean, about 0.009 of the variance.
  assert abs(noise.mean() - np.euler_gamma) < 0.012
  assert abs(noise.var() - np.pi**2 / 6) < 0.04
  # P(g <= x) = exp(-exp(-x)); Kolmogorov's distance is below 1.95 / sqrt(n) in all
  # but 1 of 1000 cases.
  ordered = np.exp(-np.exp(-np.sort(noise.astype(np.float64))))
  steps = np.arange(len(ordered)) / len(ordered)
  assert np.abs(ordered - steps).max() < 1.95 / np.sqrt(len(ordered))


def test_gumbel_noise_is_the_formula():
  bits = ref.random_bits(4, 5, 6, 1000)
  uniform = ((bits >> 9).astype(np.float64) + 0.5) / 2**23
  assert np.all(uniform.astype(np.float32) == uniform)  # exact in float32
  want = (-np.log(-np.log(uniform))).astype(np.float32)
  np.testing.assert_array_equal(ref.gumbel_noise(4, 5, 6, 1000), want)
