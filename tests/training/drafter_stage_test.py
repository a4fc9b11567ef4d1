from __future__ import annotations

import copy
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kdtree_jax.model import target_from_state_dict
from kdtree_jax.reference import drafter_weight_shapes, random_weights
from kdtree_jax.training import drafter_stage
from kdtree_jax.training.drafter_loss import dpace_weights
from kdtree_jax.training.drafter_stage import DrafterStage
from kdtree_jax.training.loop import fit
from kdtree_jax.training.optimizer import make_optimizer
from tests.training.tiny import (
  DRAFTER,
  DRAFTER_TRAIN,
  HELD_OUT,
  LENGTH,
  MODEL,
  PROMPT,
  SAMPLES,
  corpus,
  fresh,
)


@pytest.fixture(scope="module")
def stage() -> DrafterStage:
  target = target_from_state_dict(MODEL, random_weights(MODEL, 1))
  return DrafterStage(
    DRAFTER, target, PROMPT, DRAFTER_TRAIN, make_optimizer(DRAFTER_TRAIN)
  )


def samples() -> np.ndarray:
  """u16 [SAMPLES, LENGTH], cut from the corpus at steps of 5."""
  starts = 5 * np.arange(SAMPLES)
  return corpus()[starts[:, None] + np.arange(LENGTH)]


def held_out_samples() -> jax.Array:
  return jnp.asarray(samples()[:8].reshape(2, 4, LENGTH))


@pytest.fixture(scope="module")
def evaluate(stage):
  """Metrics of a state on samples that are not trained on."""
  run = stage.eval_fn()

  def evaluate(state, target_state=stage.target_state):
    return jax.device_get(run(state, (target_state, held_out_samples())))

  return evaluate


@pytest.fixture(scope="module")
def trained(stage, tmp_path_factory):
  """(folder, target's arrays before, state after training)."""
  folder = tmp_path_factory.mktemp("drafter")
  before = jax.tree.map(np.array, stage.target_state)
  step = stage.step_fn()
  data = (stage.target_state, jnp.asarray(samples()[HELD_OUT:]))
  state = fit(fresh(stage.state), lambda _: step, data, DRAFTER_TRAIN, folder)
  return folder, before, state


def test_the_loss_falls(stage, evaluate, trained):
  before, after = evaluate(stage.state), evaluate(trained[2])
  assert before["loss"] > 3 and after["loss"] < 0.5
  # Blocks of 4: three drafts and the bonus at most.
  assert before["tokens_per_round"] < 1.2 and after["tokens_per_round"] > 3.5
  for row in (1, 2, 3):
    assert after[f"accuracy_{row}"] > 0.9
  assert "accuracy_4" not in after and "accuracy" not in after


def test_the_target_is_not_touched(stage, trained):
  _, before, _ = trained
  for was, leaf in zip(
    jax.tree.leaves(before), jax.tree.leaves(stage.target_state), strict=True
  ):
    np.testing.assert_array_equal(was, leaf)


def test_what_is_trained_is_the_drafter_alone(stage, trained):
  """No copy of the embedding or of the head: names and shapes are the published."""
  state = trained[2]
  weights = stage.drafter(state).to_state_dict()
  assert {n: w.shape for n, w in weights.items()} == drafter_weight_shapes(DRAFTER)
  initial = stage.drafter(stage.state).to_state_dict()
  unmoved = [n for n in weights if np.array_equal(weights[n], initial[n])]
  assert unmoved == []
  assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}


def test_no_block_starts_in_the_prompt(stage, evaluate):
  """Anchors 4 to 10 have a token to predict; 4 to 8 have all three."""
  assert evaluate(stage.state)["blocks"] == 5 * 4


def test_the_target_takes_part_in_the_loss(stage, evaluate):
  """Other hidden states, another loss: the features are the target's own."""
  weights = random_weights(MODEL, 1)
  weights["model.layers.0.self_attn.o_proj.weight"] *= 2
  _, other = nnx.split(target_from_state_dict(MODEL, weights))
  before = evaluate(stage.state)["loss"]
  assert evaluate(stage.state, other)["loss"] != before


def test_the_loss_gets_the_settings_of_the_stage(stage, monkeypatch):
  seen = {}

  def record(drafter, target, features, tokens, anchors, valid, gamma, **settings):
    seen.update(settings, gamma=gamma, anchors=anchors.shape)
    return jnp.zeros(()), {}

  monkeypatch.setattr(drafter_stage, "drafter_loss", record)
  other = copy.copy(stage)
  other.config = dataclasses.replace(
    DRAFTER_TRAIN, dpace_smoothing=0.3, loss_gamma=5.0, anchors=6
  )
  tokens = held_out_samples()[0].astype(jnp.int32)
  arguments = (stage.state.params, stage.target_state, tokens, jax.random.key(0))
  jax.eval_shape(other._loss, *arguments)
  assert seen == {"gamma": 5.0, "dpace_smoothing": 0.3, "anchors": (4, 6)}


def expected_tokens(q: np.ndarray) -> float:
  """Mean accepted drafts of a block whose rows are right with the chances q."""
  total = 0.0
  for right in itertools.product([False, True], repeat=len(q)):
    chance = np.prod(np.where(right, q, 1 - q))
    total += chance * np.argmin([*right, False])
  return total


def test_dpace_weights_are_the_gradient_of_the_accepted_length():
  """At smoothing 0, with respect to the log-probabilities, by differences."""
  q = np.array([0.9, 0.6, 0.3, 0.8])
  live = np.ones(4, bool)
  got = dpace_weights(jnp.asarray(-np.log(q)), live, 0.0)
  assert float(got[0]) == pytest.approx(expected_tokens(q), rel=1e-5)
  for row in range(4):
    up, down = q.copy(), q.copy()
    up[row] *= 1 + 1e-6
    down[row] *= 1 - 1e-6
    slope = (expected_tokens(up) - expected_tokens(down)) / 2e-6
    assert float(got[row]) == pytest.approx(slope, rel=1e-4)


def test_dpace_weights_smoothing_and_rows_that_do_not_count():
  losses = jnp.asarray(-np.log([[0.5, 0.25, 0.5], [0.5, np.nan, 0.5]]))
  live = np.array([[True, True, True], [True, False, True]])
  got = dpace_weights(losses, live, 0.5)
  # p = 0.75, 0.625, 0.75, and their products from the first row on.
  reached = np.array([0.75, 0.75 * 0.625, 0.75 * 0.625 * 0.75])
  np.testing.assert_allclose(got[0], np.cumsum(reached[::-1])[::-1], rtol=1e-6)
  np.testing.assert_allclose(got[1], [0.75, 0, 0], rtol=1e-6)
  flat = dpace_weights(losses[:1], live[:1], 1.0)
  np.testing.assert_allclose(flat[0], [3, 2, 1], rtol=1e-6)
  gradient = jax.grad(lambda x: jnp.sum(dpace_weights(x, live[:1], 0.3)))(losses[:1])
  np.testing.assert_array_equal(gradient, 0)
