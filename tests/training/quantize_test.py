from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kdtree_jax.checkpoint.int4 import dequantize, quantize
from kdtree_jax.config import ModelConfig
from kdtree_jax.model import target_from_state_dict, target_to_state_dict
from kdtree_jax.reference import random_weights
from kdtree_jax.training.quantize import fake_int4, fake_int4_experts
from tests.model.families import KIMI


def weights(seed: int) -> np.ndarray:
  """[40, 96]: rows of all sizes, zeros, groups of zeros, and halves of a step."""
  rng = np.random.default_rng(seed)
  w = rng.normal(size=(40, 96)) * 10.0 ** rng.integers(-7, 3, (40, 1))
  w[rng.random(w.shape) < 0.05] = 0
  w[3, :32] = 0
  w[4] = rng.integers(-14, 15, 96) * 0.5  # ties between two steps of size 1
  w[4, ::32] = 7
  return w.astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("axis", [0, 1])
def test_the_forward_value_is_what_is_stored(axis, seed):
  w = weights(seed)
  want = dequantize(quantize(w))
  assert np.any(want != w)
  if axis == 0:
    w, want = w.T, want.T
  # Jitted as in training: a compiler may keep what eager code rounds.
  for run in (fake_int4, jax.jit(fake_int4, static_argnums=1)):
    got = np.asarray(run(jnp.asarray(w), axis))
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_quantised_weights_stay_as_they_are():
  once = dequantize(quantize(weights(5)))
  np.testing.assert_array_equal(fake_int4(jnp.asarray(once), 1), once)


def test_the_gradient_passes_straight_through():
  w, coefficients = weights(4), np.random.default_rng(6).normal(size=(40, 96))
  gradient = jax.grad(lambda w: jnp.sum(fake_int4(w, 1) * coefficients))(w)
  np.testing.assert_array_equal(gradient, coefficients.astype(np.float32))


@pytest.mark.parametrize("experts", [4, 20])
def test_experts_are_quantised_as_they_are_saved(experts):
  """Per expert and along the input features, in both layouts, and nothing else."""
  config = ModelConfig(
    **(
      KIMI
      | {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
      }
    )
  )
  weights = random_weights(config, 1)
  target = target_from_state_dict(config, weights)
  assert target.layers[1].mlp.experts.dense == (experts == 4)
  graph, params, rest = nnx.split(target, nnx.Param, ...)
  quantised = jax.jit(fake_int4_experts, static_argnums=1)(params, experts == 4)
  got = target_to_state_dict(nnx.merge(graph, quantised, rest))
  changed = 0
  for name, array in weights.items():
    want = array
    if ".experts." in name and "shared" not in name:
      want = dequantize(quantize(array))
      changed += np.any(want != array)
    np.testing.assert_array_equal(got[name], want, err_msg=name)
  assert changed == 3 * experts
