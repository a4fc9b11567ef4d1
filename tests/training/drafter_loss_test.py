from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.training.drafter_loss import drafter_loss, sample_anchors
from tests.drafter.fake_target import (
  WIDTH,
  FakeTarget,
  make_config,
  make_drafter,
  make_target,
  make_text,
)

BATCH, LENGTH, GAMMA = 2, 24, 3.0
ONE_LAYER = {
  "num_hidden_layers": 1,
  "layer_types": ("sliding_attention",),
  "sliding_window": 9,
}
ANCHORS = np.array([[0, 3, 9, 0], [2, 17, 21, 23]])  # the last ones run over the end
VALID = np.array([[True, True, True, False], [True, True, True, True]])


@jax.jit
def _loss(drafter, target, features, tokens, anchors, valid, loss_mask=None):
  return drafter_loss(
    drafter, target, features, tokens, anchors, valid, GAMMA, loss_mask=loss_mask
  )


def _setup():
  config = make_config(**ONE_LAYER)
  tokens, features = make_text(config, BATCH, LENGTH)
  return make_drafter(config), make_target(), features, tokens


def _norm(gradient):
  return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def _naive(logits, tokens, valid, loss_mask):
  """The loss row by row in float64, and the metrics by counting."""
  depth = logits.shape[2]
  total = weight = 0.0
  hits, rows = np.zeros(depth), np.zeros(depth)
  rounds = []
  for b in range(BATCH):
    for a, anchor in enumerate(ANCHORS[b]):
      outcome = []
      for k in range(1, depth + 1):
        at = anchor + k
        if not valid[b, a] or at >= LENGTH or not loss_mask[b, at]:
          continue
        row = logits[b, a, k - 1].astype(np.float64)
        loss = np.log(np.exp(row).sum()) - row[tokens[b, at]]
        total += np.exp(-(k - 1) / GAMMA) * loss
        weight += np.exp(-(k - 1) / GAMMA)
        outcome.append(row.argmax() == tokens[b, at])
        hits[k - 1] += outcome[-1]
        rows[k - 1] += 1
      if len(outcome) == depth:
        rounds.append(1 + (outcome + [False]).index(False))
  return total / weight, hits / rows, rounds


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_metrics_equal_a_count_by_hand(masked):
  drafter, target, features, tokens = _setup()
  logits = np.array(
    jax.jit(DFlash.block_logits)(drafter, target, features, tokens, ANCHORS)
  )
  # Plant right answers, so that runs of several lengths are counted.
  for b, a, k in [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 3), (1, 0, 1)]:
    tokens[b, ANCHORS[b, a] + 1 + k] = logits[b, a, k].argmax()
  logits = np.array(
    jax.jit(DFlash.block_logits)(drafter, target, features, tokens, ANCHORS)
  )
  loss_mask = np.ones((BATCH, LENGTH), bool)
  if masked:
    loss_mask[0, 11:] = loss_mask[1, 4] = False
  loss, metrics = _loss(
    drafter, target, features, tokens, ANCHORS, VALID, loss_mask if masked else None
  )
  expected, accuracy, rounds = _naive(logits, tokens, VALID, loss_mask)
  # Means of values below 20, each rounded a few times in f32.
  np.testing.assert_allclose(loss, expected, rtol=0, atol=20 * 8 * 2**-24)
  np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
  assert metrics["blocks"] == len(rounds)
  np.testing.assert_allclose(metrics["tokens_per_round"], np.mean(rounds), rtol=1e-6)
  assert accuracy.max() > 0 and max(rounds) > 1


def test_rows_that_do_not_count_have_no_gradient():
  drafter, target, features, tokens = _setup()
  graph, params = nnx.split(drafter)

  def gradient(tokens, anchors):
    def loss(params):
      merged = nnx.merge(graph, params)
      args = (merged, target, features, tokens, anchors, VALID, GAMMA)
      return drafter_loss(*args)[0]

    return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

  base = gradient(tokens, ANCHORS)
  moved = ANCHORS.copy()
  moved[0, 3] = 7  # not valid
  changed = tokens.copy()
  changed[0, 15:] = 0  # no block of sequence 0 reaches here
  for one, other in zip(base, gradient(changed, moved), strict=True):
    np.testing.assert_array_equal(one, other)
  assert all(np.isfinite(g).all() for g in base)
  assert sum(np.abs(g).max() > 0 for g in base) == len(base)


def test_gradient_points_uphill():
  drafter, target, features, tokens = _setup()
  graph, params = nnx.split(drafter)

  @jax.jit
  def loss(params):
    args = (nnx.merge(graph, params), target, features, tokens, ANCHORS, VALID, GAMMA)
    return drafter_loss(*args)[0]

  gradient = jax.jit(jax.grad(loss))(params)
  norm = _norm(gradient)
  step = 1e-2

  def moved(sign):
    return jax.tree.map(lambda p, g: p + sign * step * g / norm, params, gradient)

  slope = (loss(moved(1)) - loss(moved(-1))) / (2 * step)
  # A central difference: truncation of the order of step**2, and two roundings of
  # a loss below 8, 2 * 8 * 2**-24 / (2 * step) < 1e-4.
  np.testing.assert_allclose(slope, norm, rtol=1e-2)


def test_chunks_change_nothing_but_memory():
  drafter, target, features, tokens = _setup()
  graph, params = nnx.split(drafter)

  @functools.partial(jax.jit, static_argnums=1)
  @functools.partial(jax.value_and_grad, has_aux=True)
  def value(params, chunk):
    args = (nnx.merge(graph, params), target, features, tokens, ANCHORS, VALID, GAMMA)
    return drafter_loss(*args, chunk=chunk)

  (loss, metrics), gradient = value(params, None)
  for chunk in (3, 100):  # 4 anchors: one piece with padding, and more than all
    (chunked, same), chunked_gradient = value(params, chunk)
    # Sums in another order: a few roundings of a loss below 8.
    np.testing.assert_allclose(chunked, loss, rtol=8 * 2**-24)
    jax.tree.map(np.testing.assert_array_equal, same, metrics)
    atol = float(_norm(gradient)) * 64 * 2**-24
    for one, other in zip(
      jax.tree.leaves(gradient), jax.tree.leaves(chunked_gradient), strict=True
    ):
      np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def test_chunks_bound_the_memory():
  drafter, _, features, tokens = _setup()
  graph, params = nnx.split(drafter)
  vocab = 4000  # so that logits outweigh everything else
  target = FakeTarget(jnp.zeros((vocab, WIDTH)), jnp.zeros((WIDTH, vocab)))
  anchors = np.tile(np.arange(16), (BATCH, 1))
  valid = np.ones(anchors.shape, bool)

  def temporaries(chunk):
    def value(params):
      args = (nnx.merge(graph, params), target, features, tokens, anchors, valid, GAMMA)
      return drafter_loss(*args, chunk=chunk)[0]

    compiled = jax.jit(jax.grad(value)).lower(params).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  logits = BATCH * 16 * drafter.max_depth * vocab * 4
  assert temporaries(2) < logits < temporaries(None)


def test_a_few_steps_of_training_fit_a_text():
  config = make_config(**ONE_LAYER)
  target = make_target()
  graph, params = nnx.split(DFlash(config, rngs=nnx.Rngs(0)))
  tokens, features = make_text(config, BATCH, LENGTH)
  anchors = np.tile(np.arange(0, LENGTH - 6, 3), (BATCH, 1))
  valid = np.ones(anchors.shape, bool)
  optimizer = optax.adam(1e-2)

  def value(params):
    args = (nnx.merge(graph, params), target, features, tokens, anchors, valid, 4.0)
    return drafter_loss(*args, chunk=2)

  @jax.jit
  def train(params):
    def step(carry, _):
      params, state = carry
      (loss, metrics), gradient = jax.value_and_grad(value, has_aux=True)(params)
      updates, state = optimizer.update(gradient, state, params)
      carry = optax.apply_updates(params, updates), state
      return carry, (loss, metrics["tokens_per_round"])

    return jax.lax.scan(step, (params, optimizer.init(params)), None, 150)[1]

  loss, tokens_per_round = train(params)
  # It begins at chance (ln 37 = 3.6, one token a round) and learns 12 blocks by heart.
  assert loss[0] > 3 and tokens_per_round[0] < 1.5
  assert loss[-1] < 0.5 and tokens_per_round[-1] > 4


def test_anchors_are_eligible_distinct_and_sorted():
  rng = np.random.default_rng(0)
  mask = rng.random((20, 30)) < 0.7
  mask[0] = False
  mask[1, 4:] = False
  anchors, valid = map(
    np.asarray, jax.jit(sample_anchors, static_argnums=2)(jax.random.key(0), mask, 12)
  )
  eligible = mask & np.pad(mask[:, 1:], ((0, 0), (0, 1)))
  for row, kept, allowed in zip(anchors, valid, eligible, strict=True):
    chosen = row[kept]
    assert len(chosen) == min(12, allowed.sum())
    assert allowed[chosen].all()
    assert (np.diff(chosen) > 0).all()
    assert kept[: len(chosen)].all() and (row[~kept] == 0).all()
  assert anchors.dtype == np.int32 and not valid[0].any()


def test_anchors_are_uniform():
  mask = np.ones((4000, 9), bool)
  mask[:, 4] = False  # leaves 0 1 2 and 5 6 7
  anchors, valid = sample_anchors(jax.random.key(1), jnp.asarray(mask), 2)
  assert valid.all()
  counts = np.bincount(np.asarray(anchors).ravel(), minlength=9)
  assert counts[[3, 4, 8]].sum() == 0
  share = counts[[0, 1, 2, 5, 6, 7]] / 4000
  # Each is drawn with probability 1/3; five standard deviations.
  assert (np.abs(share - 1 / 3) < 5 * (2 / 9 / 4000) ** 0.5).all()


def test_arguments_are_checked():
  drafter, target, features, tokens = _setup()
  with pytest.raises(ValueError, match="num_anchors = 25"):
    sample_anchors(jax.random.key(0), jnp.ones((1, 24), bool), 25)
  args = (drafter, target, features, tokens, ANCHORS, VALID)
  with pytest.raises(ValueError, match="gamma = 0"):
    drafter_loss(*args, 0.0)
  with pytest.raises(ValueError, match="chunk = 0"):
    drafter_loss(*args, 4.0, chunk=0)
