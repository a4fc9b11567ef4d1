from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kdtree_jax import reference
from kdtree_jax.config import ModelConfig
from kdtree_jax.model import moe as moe_module
from kdtree_jax.model import target_from_state_dict
from kdtree_jax.model.moe import (
  DENSE_EXPERTS,
  Experts,
  Int4Tiles,
  MoE,
  Router,
  Routing,
)
from kdtree_jax.ops.int4_weight import dequantize
from tests.model.families import family_config, family_weights

BF16 = ml_dtypes.bfloat16
FLOAT = jnp.dtype(jnp.float32)


def random(shape: tuple[int, ...], seed: int, dtype=np.float32) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def make_router(config: ModelConfig, kernel: np.ndarray, bias=None) -> Router:
  router = nnx.eval_shape(lambda: Router(config, nnx.Rngs(0)))
  router.kernel.set_value(jnp.asarray(kernel))
  if bias is not None:
    router.e_score_correction_bias.set_value(jnp.asarray(bias, jnp.float32))
  return router


def routed(config: ModelConfig, logits: np.ndarray, bias=None) -> Routing:
  """The router's choice for given logits [T, E] (a kernel of ones and zeros)."""
  E = config.n_routed_experts
  x = np.zeros((len(logits), config.hidden_size), np.float32)
  x[:, :E] = logits
  kernel = np.eye(config.hidden_size, E, dtype=np.float32)
  router = make_router(config, kernel, bias)
  return jax.tree.map(np.asarray, jax.jit(lambda r, x: r(x))(router, x))


KIMI = family_config("kimi", n_routed_experts=8, num_experts_per_tok=3)
GROUPS = family_config(
  "kimi", n_routed_experts=24, num_experts_per_tok=4, n_group=8, topk_group=3
)
SOFTMAX = family_config("v2_lite", n_routed_experts=8, num_experts_per_tok=3)
NO_NORM = family_config("kimi", norm_topk_prob=False)
CONFIGS = {"kimi": KIMI, "groups": GROUPS, "softmax": SOFTMAX, "no_norm": NO_NORM}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_router_equals_the_reference(config):
  logits = 2 * random((200, config.n_routed_experts), 0)
  bias = None
  if config.topk_method == "noaux_tc":
    bias = 0.3 * random((config.n_routed_experts,), 1)
  got = routed(config, logits, bias)
  experts, weights = reference.route(config, logits, bias)
  assert got.experts.dtype == np.int32 and got.weights.dtype == np.float32
  np.testing.assert_array_equal(got.experts, experts)
  # exp within a few ulp, then a sum and a quotient.
  np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
  kind = reference.softmax if config.scoring_func == "softmax" else None
  scores = kind(logits) if kind else 1 / (1 + np.exp(-logits))
  np.testing.assert_allclose(got.scores, scores, rtol=2e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ties_go_to_the_lowest_id(config):
  """Scores from a few values: thousands of ties among experts and among groups."""
  rng = np.random.default_rng(2)
  logits = rng.choice([-1.0, 0.0, 1.0], (300, config.n_routed_experts))
  logits[0] = 0.0
  bias = None
  if config.topk_method == "noaux_tc":
    bias = np.zeros(config.n_routed_experts, np.float32)
  got = routed(config, logits.astype(np.float32), bias)
  want, _ = reference.route(config, logits.astype(np.float32), bias)
  np.testing.assert_array_equal(got.experts, want)
  np.testing.assert_array_equal(got.experts[0], np.arange(config.num_experts_per_tok))


def test_the_bias_selects_and_does_not_weigh():
  logits = np.zeros((1, 8), np.float32)
  logits[0, :4] = [2.0, 1.0, 0.5, -3.0]
  bias = np.zeros(8, np.float32)
  assert routed(KIMI, logits, bias).experts[0].tolist() == [0, 1, 2]
  bias[3] = 5.0  # the worst expert comes first now
  got = routed(KIMI, logits, bias)
  assert got.experts[0].tolist() == [3, 0, 1]
  scores = 1 / (1 + np.exp(-logits[0, [3, 0, 1]].astype(np.float64)))
  want = KIMI.routed_scaling_factor * scores / scores.sum()
  np.testing.assert_allclose(got.weights[0], want, rtol=1e-6)
  np.testing.assert_allclose(got.scores[0, 3], scores[0], rtol=1e-6)


def test_the_bias_is_not_rounded():
  """Two experts a bf16 ulp apart: a bias in bf16 would choose the other one."""
  config = family_config("kimi", num_experts_per_tok=1)
  bias = np.zeros(8, np.float32)
  bias[2], bias[5] = 1.0, 1.0 + 2.0**-10
  assert routed(config, np.zeros((1, 8), np.float32), bias).experts[0, 0] == 5


def test_router_products_are_true_float32_in_a_bf16_model():
  """Logits that differ by 2^-12 of their size: TF32 and bf16 have 2^-11 and 2^-8."""
  config = family_config("kimi", num_experts_per_tok=1)
  x = np.ones((1, config.hidden_size), BF16)
  kernel = np.zeros((config.hidden_size, 8), np.float32)
  kernel[0], kernel[0, 6] = 1.0, 1.0 + 2.0**-12
  router = make_router(config, kernel, np.zeros(8))
  assert np.asarray(jax.jit(lambda r, x: r(x))(router, x).experts).item() == 6


def test_experts_outside_the_best_groups_are_never_taken():
  """All choices below 0: a mask of 0 instead of -inf would win."""
  config = family_config(
    "kimi", n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=4
  )
  logits = np.zeros((1, 8), np.float32)
  bias = np.array([-2, -9, -3, -4, -5, -5.5, -4, -3.5], np.float32)
  # Groups score -11, -7, -10.5 and -7.5, each plus the scores' 1: 1 and 3 stay.
  got = routed(config, logits, bias)
  assert got.experts[0].tolist() == [2, 7, 3, 6]


def test_a_group_is_scored_by_its_two_best():
  config = family_config(
    "kimi", n_routed_experts=6, n_group=2, topk_group=1, num_experts_per_tok=2
  )
  bias = np.array([1.0, 0.0, 0.0, 0.6, 0.6, -5.0], np.float32)
  # Two best: 1.0 and 1.2 (by the best alone: 1.0; by all three: -3.8).
  got = routed(config, np.zeros((1, 6), np.float32), bias)
  assert got.experts[0].tolist() == [3, 4]


@functools.cache
def make_layer(grouped: bool, dtype: str = "float32") -> MoE:
  """The MoE layer of the Kimi-like family, with the experts in either layout."""
  experts = moe_module.DENSE_EXPERTS
  moe_module.DENSE_EXPERTS = 0 if grouped else DENSE_EXPERTS
  try:
    target = target_from_state_dict(
      family_config("kimi"), family_weights("kimi"), dtype=jnp.dtype(dtype)
    )
    assert target.layers[1].mlp.experts.dense is not grouped
  finally:
    moe_module.DENSE_EXPERTS = experts
  return target.layers[1].mlp


def run_layer(x: np.ndarray, form: str, monkeypatch) -> np.ndarray:
  grouped = form == "grouped"
  layer = make_layer(grouped, str(x.dtype))
  if grouped:
    monkeypatch.setattr(moe_module, "DENSE_EXPERTS", 0)
  graph, state = nnx.split(layer)

  def run(state, x):
    return nnx.merge(graph, state)(x, training=form == "training")[0]

  if form == "one row":
    return np.concatenate([jax.jit(run)(state, x[t : t + 1]) for t in range(len(x))])
  return np.asarray(jax.jit(run)(state, x))


@pytest.mark.parametrize("form", ["dense", "one row", "grouped", "training"])
def test_all_forms_equal_the_reference(form, monkeypatch):
  x = random((9, 32), 3)
  config, weights = family_config("kimi"), family_weights("kimi")
  want = reference.moe(config, weights, "model.layers.1.mlp", x.astype(np.float64))
  got = run_layer(x, form, monkeypatch)
  assert got.dtype == np.float32
  # Two products of 32 and 24 terms, a SwiGLU between, a sum of four terms of up to
  # 5: some 10 roundings of 2^-24 each.
  np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
  assert np.abs(want).max() > 3


@pytest.mark.parametrize("form", ["dense", "grouped"])
def test_rows_of_a_layer_are_independent(form, monkeypatch):
  for dtype in (np.float32, BF16):
    x = random((9, 32), 4, dtype)
    order = np.random.default_rng(5).permutation(9)
    straight = run_layer(x, form, monkeypatch)
    permuted = run_layer(x[order], form, monkeypatch)
    assert straight.dtype == dtype
    np.testing.assert_array_equal(permuted, straight[order])


def test_initial_values_keep_the_scale_of_their_input():
  config = family_config("kimi")
  experts = Experts(config, FLOAT, nnx.Rngs(3))
  assert np.std(experts.gate_up[...]) == pytest.approx(32**-0.5, rel=0.05)
  assert np.std(experts.down[...]) == pytest.approx(24**-0.5, rel=0.05)
  router = Router(config, nnx.Rngs(3))
  assert np.std(router.kernel[...]) == pytest.approx(32**-0.5, rel=0.2)
  np.testing.assert_array_equal(router.e_score_correction_bias[...], np.zeros(8))


def int4_layer(**changes) -> MoE:
  config = family_config("kimi", moe_intermediate_size=64, **changes)
  return MoE(config, FLOAT, nnx.Rngs(4), int4_experts=True)


def test_initial_int4_values_keep_the_scale_of_their_input():
  experts = int4_layer(n_routed_experts=24, hidden_size=96).experts
  assert isinstance(experts.gate_up, Int4Tiles)
  for weight, fan_in in zip(experts.kernels(), (96, 64), strict=True):
    # 5 % of the square of a scale drawn from 0.75 to 1.25.
    assert np.std(dequantize(weight, FLOAT)) == pytest.approx(fan_in**-0.5, rel=0.05)


def test_int4_experts_are_nothing_that_is_trained_or_cast():
  layer = int4_layer()
  names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
  assert names == {"kernel"}  # of router and shared experts
  x = jnp.asarray(random((5, 32), 8))
  routing = layer.gate(x)
  with pytest.raises(ValueError, match="int4 experts cannot be trained"):
    layer.experts.training_form(x, routing)
  # Whole sequences can still be scored, and what precedes can have gradients.
  np.testing.assert_array_equal(layer(x, training=True)[0], layer(x)[0])
  slope = jax.grad(lambda x: jnp.sum(layer.experts(x, routing) ** 2))(x)
  floats = Experts(layer.config, FLOAT, nnx.Rngs(0))
  gate_up, down = (dequantize(w, FLOAT) for w in layer.experts.kernels())
  floats.gate_up.set_value(jnp.swapaxes(gate_up, 0, 1))
  floats.down.set_value(down)
  want = jax.grad(lambda x: jnp.sum(floats(x, routing) ** 2))(x)
  # 2^-24 of the largest terms, summed over the 3 * 64 inner features.
  np.testing.assert_allclose(slope, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_int4_modules_split_and_merge():
  layer = int4_layer()
  graph, state = nnx.split(layer)
  leaves = jax.tree.leaves(state)
  assert sum(leaf.dtype == jnp.uint8 for leaf in leaves) == 2
  x = jnp.asarray(random((4, 32), 9))
  got = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])(state, x)
  np.testing.assert_array_equal(got, jax.jit(lambda m, x: m(x)[0])(layer, x))
  shapes = nnx.eval_shape(int4_layer)
  assert jax.tree.map(lambda a: (a.shape, a.dtype), nnx.state(shapes)) == jax.tree.map(
    lambda a: (a.shape, a.dtype), nnx.state(layer)
  )


def test_shared_experts_are_added_with_weight_one():
  """Also where the routed experts' weights are 0."""
  x = random((5, 32), 6)
  graph, state = nnx.split(make_layer(False))
  silent = nnx.merge(graph, state)
  silent.experts.down.set_value(jnp.zeros_like(silent.experts.down[...]))
  shared = [
    family_weights("kimi")[f"model.layers.1.mlp.shared_experts.{name}_proj.weight"]
    for name in ("gate", "up", "down")
  ]
  want = reference.swiglu(x.astype(np.float64), *shared)
  np.testing.assert_allclose(silent(x)[0], want, rtol=0, atol=2e-6)


def test_leading_axes_are_rows():
  layer = make_layer(False)
  x = random((2, 3, 32), 7)
  run = jax.jit(lambda layer, x: layer(x))
  out, routing = run(layer, x)
  flat, flat_routing = run(layer, x.reshape(6, 32))
  np.testing.assert_array_equal(out, np.asarray(flat).reshape(2, 3, 32))
  np.testing.assert_array_equal(routing.experts, flat_routing.experts)
  assert routing.experts.shape == (6, 3)
