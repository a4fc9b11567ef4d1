from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.checkpoint.int4 import dequantize, quantize
from kdtree_jax.model import target_to_state_dict
from kdtree_jax.training.loop import fit
from kdtree_jax.training.target_stage import cast_params, sample_windows
from tests.training.tiny import (
  MODEL,
  TRAIN,
  VOCAB,
  corpus,
  fresh,
  target_loss,
  target_stage,
  target_step,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("target")
  data = jnp.asarray(corpus())
  return fit(fresh(target_stage().state), lambda _: target_step(), data, TRAIN, folder)


def held_out(batches: int = 5) -> np.ndarray:
  """i32 [batches, 4, 17]."""
  tokens = corpus()[7 : 7 + batches * 4 * 17]
  return tokens.astype(np.int32).reshape(batches, 4, 17)


def loss_of(state, tokens: np.ndarray):
  return target_loss()(state.params, state.extra, tokens)


def test_the_loss_falls_on_a_text_that_repeats(trained):
  before = float(loss_of(target_stage().state, held_out()[0])[0])
  after = float(loss_of(trained, held_out()[0])[0])
  # Untrained, no token is likelier than others; after 40 steps the next is known.
  assert before > 0.8 * np.log(VOCAB)
  assert after < 0.3


def test_the_loss_is_the_cross_entropy_of_the_next_token_under_int4_experts(trained):
  weights = target_to_state_dict(target_stage().target(trained))
  for name, array in weights.items():
    if ".mlp.experts." in name:
      weights[name] = dequantize(quantize(array))
  tokens = held_out()[0]
  losses = []
  for row in tokens:
    logits = reference.forward(MODEL, weights, row[:-1], dtype=np.float64).logits
    chances = reference.softmax(logits)
    losses.extend(-np.log(chances[np.arange(16), row[1:]]))
  loss, loads = loss_of(trained, tokens)
  assert float(loss) == pytest.approx(np.mean(losses), rel=2e-5)
  assert loads.shape == (1, 4)
  np.testing.assert_allclose(jnp.sum(loads, -1), 1, rtol=1e-6)


def test_evaluation_is_the_mean_over_batches(trained):
  each = [float(loss_of(trained, batch)[0]) for batch in held_out()]
  mean = float(target_stage().eval_fn(quantized=True)(trained, held_out()))
  assert mean == pytest.approx(np.mean(each), rel=1e-5)


def bias_of(state) -> np.ndarray:
  (bias,) = jax.tree.leaves(state.extra)
  return np.asarray(bias)


def test_the_correction_bias_moves_against_the_load():
  stage = target_stage()
  data = jnp.asarray(corpus())
  tokens = sample_windows(stage.state.step, data, TRAIN)
  ((load,),) = np.asarray(loss_of(stage.state, tokens)[1])[None]
  assert np.ptp(load) > 0.05  # an uneven start
  state, metrics = target_step()(fresh(stage.state), data)
  # By the rate and no more: up for the idle experts, down for the busy ones.
  want = TRAIN.bias_update_rate * np.sign(0.25 - load).astype(np.float32)
  np.testing.assert_array_equal(bias_of(state), want)
  assert float(metrics["max_load"]) == pytest.approx(4 * load.max(), rel=1e-5)


def test_the_correction_bias_evens_the_load(trained):
  """From a bias that sends half of the slots to one expert."""
  stage, tokens = target_stage(), held_out()[0]
  state = dataclasses.replace(
    trained, extra=jax.tree.map(lambda b: jnp.array([3.0, 0, 0, 0]), trained.extra)
  )
  balance = jax.jit(stage._balance)
  peaks = []
  for _ in range(600):
    loads = loss_of(state, tokens)[1]
    peaks.append(float(jnp.max(loads)))
    state = dataclasses.replace(state, extra=balance(state.extra, loads))
  assert peaks[0] > 0.49 and min(peaks[-20:]) < 0.36


def test_the_bias_and_the_router_are_float32_whatever_the_compute_dtype():
  stage = target_stage()
  cast = cast_params(stage.state.params, jnp.dtype(jnp.bfloat16))
  names = {
    jax.tree_util.keystr(path): leaf.dtype
    for path, leaf in jax.tree_util.tree_leaves_with_path(cast)
  }
  kept = {name for name, dtype in names.items() if dtype == jnp.float32}
  assert len(kept) == 1 and "'gate'" in kept.pop()
  assert bias_of(stage.state).dtype == np.float32


def test_windows_are_a_function_of_the_step():
  data = jnp.arange(500, dtype=jnp.uint16)
  one = sample_windows(jnp.int32(3), data, TRAIN)
  assert one.shape == (4, 17) and one.dtype == jnp.int32
  np.testing.assert_array_equal(np.diff(one, axis=1), 1)
  np.testing.assert_array_equal(one, sample_windows(jnp.int32(3), data, TRAIN))
  assert np.any(np.asarray(one) != sample_windows(jnp.int32(4), data, TRAIN))
  other = dataclasses.replace(TRAIN, seed=1)
  assert np.any(np.asarray(one) != sample_windows(jnp.int32(3), data, other))
  # All of the text is reached, and nothing beyond it.
  starts = np.concatenate(
    [sample_windows(jnp.int32(i), data, TRAIN)[:, 0] for i in range(200)]
  )
  assert starts.min() < 10 and 470 < starts.max() <= 500 - 17


def test_a_trained_target_has_published_names(trained):
  weights = target_to_state_dict(target_stage().target(trained))
  bias = weights["model.layers.0.mlp.gate.e_score_correction_bias"]
  np.testing.assert_array_equal(bias, bias_of(trained))
  assert weights["model.embed_tokens.weight"].shape == (VOCAB, MODEL.hidden_size)
