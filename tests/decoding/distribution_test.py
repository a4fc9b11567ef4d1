"""At a temperature, speculation draws from the target's own distribution."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax import reference as ref
from kdtree_jax.config import DecodeConfig
from kdtree_jax.drafter import Scripted
from kdtree_jax.model.state_dict import target_from_state_dict
from tests.decoding.models import model_config

VOCAB, SAMPLES, SLOTS = 4, 4096, 256
PROMPT = [2, 0, 3, 3, 1]
CONFIG = model_config(
  vocab_size=VOCAB, num_hidden_layers=1, first_k_dense_replace=0, hidden_size=32
)
# Probability of a false alarm, for any of the tests here.
ALARM = 1e-9


@pytest.fixture(scope="module")
def toy():
  return target_from_state_dict(CONFIG, ref.random_weights(CONFIG, 3))


def probabilities(model, temperature):
  """Exact [V, V, V] of the first three tokens, from `kd.forward` in float64."""
  firsts = list(itertools.product(range(VOCAB), repeat=2))
  texts = jnp.array([[*PROMPT, *pair] for pair in firsts])
  logits = np.asarray(jax.jit(lambda t: kd.forward(model, t))(texts), np.float64)

  def distribution(row):
    p = np.exp((row - row.max()) / temperature)
    return p / p.sum()

  end = len(PROMPT) - 1
  joint = np.zeros((VOCAB,) * 3)
  for (one, two), rows in zip(firsts, logits, strict=True):
    first, second, third = (distribution(rows[end + k]) for k in range(3))
    joint[one, two] = first[one] * second[two] * third
  np.testing.assert_allclose(joint.sum(), 1, atol=1e-12)
  return joint


def bound(cells):
  """What the total variation of SAMPLES draws exceeds with probability ALARM.

  E[TV] <= sqrt(cells / n) / 2 by Cauchy-Schwarz, and one draw moves TV by 1 / n at
  most, so by McDiarmid TV - E[TV] > sqrt(log(1 / ALARM) / 2 n) is that rare.
  """
  deviation = np.sqrt(np.log(1 / ALARM) / (2 * SAMPLES))
  return 0.5 * np.sqrt(cells / SAMPLES) + deviation


def distance(counts, expected):
  return 0.5 * np.abs(counts / counts.sum() - expected).sum()


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_three_tokens_of_many_sequences(toy, temperature):
  # A fixed wrong script: the tree holds some continuations and misses others.
  script = jnp.array([[*PROMPT, 1, 2, 0, 3]], jnp.int32)
  drafter = Scripted(script, 1.0, VOCAB, depth=3)
  config = DecodeConfig(
    method="ddtree",
    budget=7,
    rows=8,
    slots=SLOTS,
    max_new_tokens=3,
    temperature=temperature,
    seed=17,
    stop_token_ids=(),
    prefill_chunk=8,
  )
  result = kd.decode(toy, drafter, [PROMPT] * SAMPLES, config)
  texts = np.stack(result.tokens)
  expected = probabilities(toy, temperature)

  rounds = np.array([s.rounds for s in result.stats])
  # Both ways to come by the third token: a draft's bonus, and a round of its own.
  assert 0.1 < np.mean(rounds == 1) < 0.9

  counts = np.zeros_like(expected)
  np.add.at(counts, tuple(texts.T), 1)
  assert distance(counts.sum(2), expected.sum(2)) < bound(VOCAB**2)
  assert distance(counts, expected) < bound(VOCAB**3)

  # The bound is tight enough to tell neighbouring temperatures.
  for other in (temperature * 1.5, temperature / 1.5):
    assert distance(counts, probabilities(toy, other)) > bound(VOCAB**3)
