"""Whole decodes against the numpy reference, in fp32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import reference as ref
from kdtree_jax.drafter import NGram
from tests.decoding.models import (
  CACHE,
  CONFIG,
  DEPTH,
  NEW,
  PROMPTS,
  ROWS,
  VOCAB,
  WEIGHTS,
  Mixed,
  decode,
  drafter_config,
  plain,
  true_script,
)

SAMPLING = {"temperature": 0.7, "seed": 3}

# Two fp32 forwards of two layers that add in different orders: logits of up to 10
# differ by some 1e-5. The gaps between candidates have to be far wider.
GAP = 1e-3


def gaps(sequence, index, temperature=0.0, seed=0):
  """How far the second best choice was at each token of a text."""
  values = sequence.logits.astype(np.float64)
  if temperature:
    values = values / temperature
    for t, row in enumerate(values):
      row += ref.gumbel_noise(seed, index, len(PROMPTS[index]) + t, VOCAB)
  best = np.sort(values, axis=1)
  return best[:, -1] - best[:, -2]


@functools.cache
def by_reference(index, method="plain", draft_fn=None, **arguments):
  return ref.decode(
    CONFIG,
    WEIGHTS,
    PROMPTS[index],
    method=method,
    draft_fn=draft_fn,
    max_new_tokens=NEW,
    sequence_id=index,
    stop_token_ids=(),
    **arguments,
  )


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_plain_text(sampling):
  for i, sequence in enumerate(plain(**sampling)):
    want = by_reference(i, **sampling)
    assert gaps(sequence, i, **sampling).min() > GAP
    assert sequence.tokens.tolist() == want.tokens
    np.testing.assert_allclose(sequence.logits, want.logits, atol=GAP / 10)
    assert list(sequence.stats.accepted_lengths) == want.accepted_lengths
    assert sequence.finish_reason == want.finish_reason


def table_of(part, index):
  """A drafter's logits as the reference asks for them, from the text so far."""
  text = np.zeros((1, CACHE), np.int32)
  whole = [*PROMPTS[index], *plain(**SAMPLING)[index].tokens]
  text[0, : len(whole)] = whole
  end = len(whole) - 1

  @jax.jit
  def draft(root, length):
    state = part.init_state(1, CACHE)
    nothing = jnp.zeros((1, CACHE, 0))
    start = jnp.zeros((1,), jnp.int32)
    state = part.observe(None, state, text, nothing, start, length)
    return part.draft(None, state, root, length, jnp.array([index]))

  def draft_fn(features, root, length):
    del features
    assert length <= end and text[0, length] == root
    return np.asarray(draft(jnp.array([root]), jnp.array([length])))[0]

  return draft_fn


@pytest.mark.parametrize("kind", ["1.0", "0.5", "ngram"])
@pytest.mark.parametrize("budget", [1, 7])
def test_rounds_are_the_reference_s(kind, budget):
  """The same draft tables give the same trees, rounds and texts."""
  drafter = Mixed.create(kind, continuations=true_script(**SAMPLING))
  part = NGram(VOCAB, depth=DEPTH)
  if kind != "ngram":
    part = drafter.parts[Mixed.KINDS.index(kind)]
  result = decode(drafter, budget=budget, **SAMPLING)
  for i, sequence in enumerate(result):
    want = by_reference(
      i, "ddtree", draft_fn=table_of(part, i), budget=budget, **SAMPLING
    )
    assert sequence.tokens.tolist() == want.tokens
    assert list(sequence.stats.accepted_lengths) == want.accepted_lengths
    assert sequence.stats.rounds == len(want.accepted_lengths)


def test_rounds_with_dflash_are_the_reference_s():
  """Taps, context and block all through the loop; one token off ends acceptance.

  The tables differ in their last bits only, which the trees of this seed survive.
  """
  config = drafter_config()
  weights = ref.random_drafter_weights(config, 2)
  result = decode(Mixed.create("dflash"), budget=ROWS - 1)
  accepted = []
  for i, sequence in enumerate(result):
    want = by_reference(
      i,
      "ddtree",
      draft_fn=functools.partial(ref.draft, config, weights, WEIGHTS),
      feature_layers=config.target_layer_ids,
      budget=ROWS - 1,
    )
    assert sequence.tokens.tolist() == want.tokens
    assert list(sequence.stats.accepted_lengths) == want.accepted_lengths
    accepted += want.accepted_lengths
  assert max(accepted) > 1
