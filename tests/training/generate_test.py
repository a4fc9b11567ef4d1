from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.model import Target, target_from_state_dict
from kdtree_jax.reference import random_weights
from kdtree_jax.training.generate import generate
from tests.training.tiny import MODEL, VOCAB

ROWS, PROMPT, LENGTH = 600, 3, 9


@functools.cache
def target() -> Target:
  return target_from_state_dict(MODEL, random_weights(MODEL, 1))


def run(prompts: np.ndarray, **changes) -> np.ndarray:
  """One batch of `ROWS` sequences, so that all tests share a program."""
  arguments = {"temperatures": (0.0,), "batch_size": ROWS} | changes
  (tokens,) = generate(target(), prompts, LENGTH, **arguments)
  assert tokens.dtype == np.uint16 and tokens.shape == (ROWS, LENGTH)
  return tokens


@functools.cache
def random_prompts() -> np.ndarray:
  return np.random.default_rng(0).integers(0, VOCAB, (ROWS, PROMPT)).astype(np.uint16)


@functools.cache
def logits_of(rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Greedy texts [rows, LENGTH] and `kd.forward` of them."""
  tokens = run(random_prompts())[:rows]
  return tokens, np.asarray(jax.jit(kd.forward)(target(), tokens.astype(np.int32)))


def test_temperature_zero_is_greedy_and_prompts_are_kept():
  tokens, logits = logits_of(50)
  np.testing.assert_array_equal(tokens[:, :PROMPT], random_prompts()[:50])
  np.testing.assert_array_equal(
    tokens[:, PROMPT:], logits[:, PROMPT - 1 : -1].argmax(-1)
  )
  assert len(np.unique(tokens[:, PROMPT:])) > 20


def test_temperatures_take_turns():
  mixed = run(random_prompts(), temperatures=(0.0, 1.0, 0.0, 2.0))
  greedy = run(random_prompts())
  same = np.all(mixed == greedy, axis=1)
  assert same[0::2].all() and same[1::2].mean() < 0.3
  np.testing.assert_array_equal(mixed[:, :PROMPT], random_prompts())


def test_the_seed_decides():
  one = run(random_prompts(), temperatures=(1.0,), seed=1)
  np.testing.assert_array_equal(one, run(random_prompts(), temperatures=(1.0,), seed=1))
  assert np.any(one != run(random_prompts(), temperatures=(1.0,), seed=2))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_samples_follow_the_softmax_of_the_scaled_logits(temperature):
  """600 first tokens after one prompt; the other temperature is told apart."""

  def chances(logits: np.ndarray, temperature: float) -> np.ndarray:
    p = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return p / p.sum(-1, keepdims=True)

  logits = logits_of(50)[1][:, PROMPT - 1].astype(np.float64)
  gap = np.abs(chances(logits, 0.5) - chances(logits, 1.0)).sum(-1)
  row = gap.argmax()  # the prompt where temperature matters most
  prompts = np.tile(random_prompts()[row], (ROWS, 1))
  first = run(prompts, temperatures=(temperature,), seed=3)[:, PROMPT]
  seen = np.bincount(first, minlength=VOCAB) / ROWS

  def distance(temperature: float) -> float:
    return 0.5 * np.abs(seen - chances(logits[row], temperature)).sum()

  p = chances(logits[row], temperature)
  # The expected total variation is at most half of sum sqrt(p (1 - p) / n), and it
  # exceeds that by t with a chance of at most exp(-2 n t^2) (McDiarmid): here e^-14.
  bound = 0.5 * np.sqrt(p * (1 - p) / ROWS).sum() + (14 / (2 * ROWS)) ** 0.5
  assert distance(temperature) < bound < distance(1.5 - temperature)


def test_whole_batches_only():
  prompts = np.concatenate([random_prompts()[:5], random_prompts()])
  batches = list(
    generate(target(), prompts, LENGTH, temperatures=(0.0,), batch_size=ROWS)
  )
  assert len(batches) == 1
  np.testing.assert_array_equal(batches[0][:, :PROMPT], prompts[:ROWS])
  assert list(generate(target(), prompts[:4], LENGTH, batch_size=ROWS)) == []


def test_batches_have_noise_of_their_own():
  """The same prompts twice, in two batches: not the same texts."""
  prompts = np.tile(random_prompts(), (2, 1))
  one, two = generate(target(), prompts, LENGTH, temperatures=(1.0,), batch_size=ROWS)
  assert np.mean(np.all(one == two, axis=1)) < 0.3
