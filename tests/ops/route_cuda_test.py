"""route's custom call: scores against float64, the rest against numpy, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.custom_calls import assert_same_bits, replayed
from tests.ops.route_test import (
  KINDS,
  SHAPES,
  check_scores,
  chosen,
  four,
  inputs,
  weighed,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choices_and_weights_of_numpy(shape):
  """Numpy chooses by the kernel's own scores, so there is one right answer."""
  logits, bias = inputs(shape, 180)
  results = replayed(four(shape, "cuda"))(logits, bias)
  _, n_group, topk_group, k = shape
  for kind, (experts, weights, scores) in zip(KINDS, results, strict=True):
    scoring, biased, norm, scaling = kind
    check_scores(scores, logits, scoring)
    want = chosen(scores, bias if biased else None, k, n_group, topk_group)
    np.testing.assert_array_equal(experts, want)
    np.testing.assert_array_equal(weights, weighed(scores, want, norm, scaling))


def test_scores_of_every_size():
  """A million logits over all that the exponential does not overflow at, and beyond."""
  logits = np.linspace(-110, 110, 2**20, dtype=np.float32).reshape(-1, 1024)
  rng = np.random.default_rng(1)
  mixed = rng.permuted(logits.ravel()).reshape(logits.shape)
  for scoring in ("sigmoid", "softmax"):
    run = jax.jit(
      lambda x, s=scoring: ops.route(x, k=1, scoring=s, implementation="cuda")[2]
    )
    check_scores(run(logits), logits, scoring)
    check_scores(run(mixed), mixed, scoring)


@pytest.mark.parametrize("shape", [(384, 1, 1, 8), (256, 8, 4, 8)], ids=str)
def test_any_number_of_tokens_gives_the_bits_of_one_alone(shape):
  """1 to 160 tokens, in one program: the last ones of 160."""
  logits, bias = inputs(shape, 160)
  run = four(shape, "cuda")

  def bits(tree):
    return [
      jax.lax.bitcast_convert_type(x, jnp.int32)
      for x in jax.tree.leaves([tree[0], tree[3]])
    ]

  @jax.jit
  def program(logits, bias):
    everything = bits(run(logits, bias))
    equal = []
    for rows in range(1, 160):
      some = bits(run(logits[-rows:], bias))
      same = [jnp.all(x == y[-rows:]) for x, y in zip(some, everything, strict=True)]
      equal.append(jnp.stack(same))
    return everything, jnp.stack(equal)

  everything, equal = jax.device_get(program(logits, bias))
  assert equal.shape == (159, 6) and equal.all(), np.argwhere(~equal)
  order = np.random.default_rng(2).permutation(160)
  moved = jax.jit(lambda *x: bits(run(*x)))(logits[order], bias)
  assert_same_bits([x[order] for x in everything], moved)


def test_a_bias_that_is_no_number_takes_part():
  bias = np.zeros(9, np.float32)
  bias[[7, 2, 4]] = np.nan, np.inf, -np.inf
  settings = {"k": 9, "scoring": "sigmoid", "n_group": 3, "topk_group": 2}
  for implementation in ("cuda", "xla"):
    experts, weights, _ = ops.route(
      np.zeros((1, 9), np.float32), bias, implementation=implementation, **settings
    )
    assert experts.tolist() == [[7, 2, 0, 1, 6, 8, 3, 4, 5]]
    np.testing.assert_allclose(weights, np.full((1, 9), 1 / 9), rtol=1e-6)


def test_without_tokens():
  logits = jnp.zeros((0, 8))
  for array in ops.route(logits, k=2, scoring="softmax", implementation="cuda"):
    assert array.shape[0] == 0
