"""The choice of a token: noise by position, filters, and logits that are no numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import reference as ref
from kdtree_jax.decoding.sampling import (
  NO_TOKEN,
  Sampler,
  _threefry2x32,
  gumbel_noise,
)

B, N, V = 3, 8, 97
POSITIONS = np.array([0, 1, 127, 128, 262_143])


def noise(seed, ids, positions, size=V):
  make = jax.jit(gumbel_noise, static_argnums=3)
  return np.asarray(make(jnp.uint32(seed), jnp.asarray(ids), positions, size))


@functools.cache
def chooser(max_depth):
  return jax.jit(
    lambda sampler, logits, ids, first, depths: sampler.choose(
      logits, ids, first, depths, max_depth
    )
  )


def choose(sampler, logits, ids=(0, 1, 2), first=(5, 6, 7), depths=None, max_depth=0):
  logits = np.asarray(logits, np.float32)
  if depths is None:
    depths = np.zeros(logits.shape[:2], np.int32)
  ids, first = jnp.array(ids), jnp.array(first)
  return np.asarray(
    chooser(max_depth)(sampler, logits, ids, first, jnp.asarray(depths))
  )


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("sequence_id", [0, 7, 2**31 - 1])
def test_noise_is_the_reference_s(seed, sequence_id):
  """The bits behind it are equal; XLA's and numpy's logarithms differ a little.

  With l = -log(u), g = -log(l): an error of r ulp in log(u) is a relative error of
  r * 2**-23 in l, hence as much, absolutely, in g; log itself adds r ulp of g. XLA
  documents no bound; r = 2 holds for its polynomials, so |error| <= 2**-22 (1 + |g|).
  """
  got = noise(seed, np.full(5, sequence_id, np.int32), POSITIONS)
  for row, position in zip(got, POSITIONS, strict=True):
    want = ref.gumbel_noise(seed, sequence_id, int(position), V)
    error = np.abs(row.astype(np.float64) - want)
    assert np.all(error <= 2.0**-22 * (1 + np.abs(want)))


def test_random_bits_are_the_reference_s():
  rng = np.random.default_rng(0)
  words = rng.integers(0, 2**32, (4, 50), dtype=np.uint32)
  words[:, :3] = [[0, 2**32 - 1, 1]] * 4
  got = jax.jit(_threefry2x32)((words[0], words[1]), (words[2], words[3]))
  for i in range(words.shape[1]):
    key, counters = (int(words[0, i]), int(words[1, i])), (words[2, i], words[3, i])
    want = ref.threefry2x32(key, counters)
    assert [int(x[i]) for x in got] == [int(x) for x in want]


def test_noise_is_standard_gumbel():
  """Kolmogorov-Smirnov: at n = 97,000 the distance exceeds 0.01 once in 10**8."""
  n = 1000
  values = noise(3, np.arange(n, dtype=np.int32), np.arange(n)).ravel()
  order = np.sort(values)
  expected = np.exp(-np.exp(-order.astype(np.float64)))
  distance = np.abs(expected - (np.arange(order.size) + 0.5) / order.size).max()
  assert distance < 0.01
  assert np.isfinite(values).all()


def test_noise_does_not_depend_on_the_shape():
  """Plain decoding draws one row a sequence, a tree one per depth."""
  ids = np.arange(B, dtype=np.int32)
  one = np.stack([noise(5, ids, np.full(B, p)) for p in range(10, 18)], axis=1)
  many = noise(5, ids[:, None], 10 + np.arange(8)[None])
  assert one.tobytes() == many.tobytes()
  assert (
    one.tobytes()
    == np.asarray(
      gumbel_noise(jnp.uint32(5), ids[:, None], 10 + np.arange(8)[None], V)
    ).tobytes()
  )


def test_greedy_takes_the_lowest_of_equal_ids():
  logits = np.zeros((B, N, V))
  logits[:, :, [40, 90]] = 3.0
  assert (choose(Sampler.create(0.0), logits) == 40).all()
  logits[0, 0, 0] = 3.0
  got = choose(Sampler.create(0.0), logits)
  assert got[0, 0] == 0 and (got.ravel()[1:] == 40).all()


@pytest.mark.parametrize(
  ("temperature", "top_p"),
  [(0.0, 1.0), (0.7, 1.0), (1.0, 0.9), (2.0, 0.3), (1.0, 1e-9)],
)
def test_choices_are_the_reference_s(temperature, top_p):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(B, N, V), scale=2.5).astype(np.float32)
  depths = rng.integers(0, 4, (B, N))
  sampler = Sampler.create(temperature, top_p, seed=11)
  ids, first = (4, 0, 9), (128, 3, 77)
  got = choose(sampler, logits, ids, first, depths, max_depth=3)
  for b in range(B):
    for n in range(N):
      position = first[b] + int(depths[b, n])
      want = ref.choose(logits[b, n], temperature, top_p, 11, ids[b], position)
      assert got[b, n] == want


def test_a_row_s_choice_depends_on_its_depth_and_nothing_else():
  rng = np.random.default_rng(1)
  row = rng.normal(size=V)
  logits = np.broadcast_to(row, (B, N, V))
  depths = np.array([[0, 1, 2, 3, 3, 2, 1, 0]] * B)
  sampler = Sampler.create(1.0, seed=2)
  got = choose(sampler, logits, (5, 5, 6), (9, 9, 9), depths, max_depth=3)
  assert (got[0] == got[1]).all() and (got[0] != got[2]).any()
  assert (got[:, :4] == got[:, :3:-1]).all()
  assert len(set(got[0, :4])) > 1
  # Depth 2 after position 9 is depth 0 after position 11.
  later = choose(sampler, logits, (5, 5, 6), (11, 11, 11))
  assert (later[:, 0] == got[:, 2]).all()


@pytest.mark.parametrize("top_p", [1e-50, 1e-9, 0.2])
def test_the_most_probable_token_always_stays(top_p):
  """1e-50 is 0 in fp32, and still must not drop every token."""
  logits = np.zeros((B, N, V))
  logits[..., 60] = 5.0
  assert (choose(Sampler.create(1.0, top_p), logits) == 60).all()


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
  """Masses 0.5, 0.3 and 0.2: which tokens appear over many positions?"""
  logits = np.log(np.array([0.3, 0.2, 0.5]))
  rows = np.broadcast_to(logits, (B, 400, 3))
  depths = np.broadcast_to(np.arange(400), (B, 400))
  for top_p, kept in ((0.45, {2}), (0.55, {0, 2}), (0.79, {0, 2}), (0.81, {0, 1, 2})):
    got = choose(Sampler.create(1.0, top_p), rows, depths=depths, max_depth=399)
    assert set(got.ravel().tolist()) == kept
  tied = np.zeros((B, 400, 3))
  got = choose(Sampler.create(1.0, 0.5), tied, depths=depths, max_depth=399)
  assert set(got.ravel().tolist()) == {0, 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 3, 8, 31, 64, 95, 96])
@pytest.mark.parametrize(
  "sampler",
  [Sampler.create(0.0), Sampler.create(1.0), Sampler.create(1.0, 0.9)],
  ids=["greedy", "sampled", "nucleus"],
)
def test_bad_logits_give_no_token(bad, place, sampler):
  rng = np.random.default_rng(2)
  logits = rng.normal(size=(B, N, V))
  expected = choose(sampler, logits)
  logits[1, 2, place] = bad
  logits[0, 7] = -np.inf  # nothing to choose from
  logits[2, 0, np.arange(V) != place] = -np.inf  # one token left
  got = choose(sampler, logits)
  assert got[1, 2] == got[0, 7] == NO_TOKEN
  assert got[2, 0] == place
  others = np.ones((B, N), bool)
  others[1, 2] = others[0, 7] = others[2, 0] = False
  assert (got[others] == expected[others]).all() and (expected >= 0).all()
