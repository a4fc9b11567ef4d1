from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import reference as ref
from tests.reference.models import target_config


def config(**changes):
  return target_config(**({"n_group": 1, "topk_group": 1} | changes))


def brute_force_route(cfg, logits, bias):
  """One token, with Python's sort: pairs (expert, weight) from the best down."""
  scores = [1 / (1 + np.exp(-x)) for x in logits]
  choice = [s + b for s, b in zip(scores, bias, strict=True)]
  size = len(choice) // cfg.n_group
  groups = [range(g * size, (g + 1) * size) for g in range(cfg.n_group)]

  def group_score(g):
    best = sorted((choice[e] for e in groups[g]), reverse=True)
    return best[0] + best[1]

  kept = sorted(range(cfg.n_group), key=lambda g: (-group_score(g), g))
  allowed = [e for g in kept[: cfg.topk_group] for e in groups[g]]
  chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: cfg.num_experts_per_tok]
  total = sum(scores[e] for e in chosen) + 1e-20
  scale = cfg.routed_scaling_factor / total
  return [(e, scores[e] * scale) for e in chosen]


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (2, 1), (4, 4)])
def test_route_equals_brute_force(n_group, topk_group):
  cfg = config(
    n_routed_experts=16, num_experts_per_tok=4, n_group=n_group, topk_group=topk_group
  )
  rng = np.random.default_rng(0)
  # Coarse logits and biases, so that ties are common, within and between groups.
  logits = rng.integers(-3, 4, (200, 16)).astype(np.float64)
  bias = rng.integers(-1, 2, 16) / 4
  ids, weights = ref.route(cfg, logits, bias)
  for token in range(200):
    want = brute_force_route(cfg, logits[token], bias)
    assert [e for e, _ in want] == ids[token].tolist()
    np.testing.assert_allclose(weights[token], [w for _, w in want], rtol=1e-12)


def test_ties_go_to_the_lowest_expert():
  ids, _ = ref.route(config(), np.zeros((1, 8), np.float32), np.zeros(8, np.float32))
  assert ids.tolist() == [[0, 1, 2]]


def test_bias_selects_and_does_not_weigh():
  cfg = config(num_experts_per_tok=2, routed_scaling_factor=1.0)
  logits = np.linspace(-2, 2, 8)[None]
  bias = np.zeros(8)
  bias[0] = 10.0
  ids, weights = ref.route(cfg, logits, bias)
  assert ids.tolist() == [[0, 7]]
  scores = 1 / (1 + np.exp(-logits[0, [0, 7]]))
  np.testing.assert_allclose(weights[0], scores / scores.sum(), rtol=1e-12)


def test_masked_groups_lose_to_negative_choices():
  """A group left out stays out, even where all kept choices are below zero."""
  cfg = config(n_group=2, topk_group=1, num_experts_per_tok=4)
  bias = np.array([-2.0] * 4 + [-3.0] * 4)
  ids, _ = ref.route(cfg, np.zeros((1, 8)), bias)
  assert ids.tolist() == [[0, 1, 2, 3]]


def test_group_score_is_the_sum_of_two_not_the_maximum():
  cfg = config(n_group=2, topk_group=1, num_experts_per_tok=2)
  bias = np.array([0.5, 0.0, 0.0, 0.0, 0.4, 0.4, 0.0, 0.0])
  ids, _ = ref.route(cfg, np.zeros((1, 8)), bias)
  assert ids.tolist() == [[4, 5]]


def test_softmax_router_of_the_older_family():
  cfg = config(
    scoring_func="softmax",
    topk_method="greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
  )
  logits = np.array([[0.0, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
  # A greedy router has no correction; one that is there must not count.
  ids, weights = ref.route(cfg, logits, np.array([9.0] + [0.0] * 7))
  assert ids.tolist() == [[1, 3, 2]]
  want = np.exp([3.0, 2.0, 1.0]) / np.exp(logits).sum()
  np.testing.assert_allclose(weights[0], want, rtol=1e-12)


def test_norm_of_vanishing_scores_is_finite():
  ids, weights = ref.route(config(), np.full((1, 8), -200, np.float32), None)
  assert ids.dtype == np.int32 and weights.dtype == np.float32
  np.testing.assert_array_equal(weights, 0)


def test_combine_is_in_slot_order_with_one_cast():
  rng = np.random.default_rng(1)
  outputs = rng.standard_normal((30, 4, 16)).astype(ml_dtypes.bfloat16)
  weights = rng.random((30, 4), np.float32)
  got = ref.combine(outputs, weights)
  wide = outputs.astype(np.float32)
  total = weights[:, :1] * wide[:, 0]
  for slot in (1, 2, 3):
    total = total + weights[:, slot, None] * wide[:, slot]
  np.testing.assert_array_equal(got, total.astype(ml_dtypes.bfloat16))
  # In float32 the order of the slots shows.
  np.testing.assert_array_equal(ref.combine(wide, weights), total)
  assert np.any(total != ref.combine(wide[:, ::-1], weights[:, ::-1]))


@pytest.mark.parametrize("shared", [0, 2])
def test_moe_is_the_weighted_sum_of_its_experts(shared):
  cfg = target_config(n_shared_experts=shared)
  weights = ref.random_weights(cfg, 0)
  prefix = "model.layers.1.mlp"
  x = np.random.default_rng(2).standard_normal((9, 32))
  got = ref.moe(cfg, weights, prefix, x)
  bias = weights[f"{prefix}.gate.e_score_correction_bias"]
  ids, gates = ref.route(cfg, x @ weights[f"{prefix}.gate.weight"].T, bias)

  def expert(name, row):
    w = [weights[f"{prefix}.{name}.{part}_proj.weight"] for part in ("gate", "up")]
    gate, up = (m.astype(np.float64) @ row for m in w)
    return weights[f"{prefix}.{name}.down_proj.weight"] @ (
      gate / (1 + np.exp(-gate)) * up
    )

  for t, row in enumerate(x):
    chosen = zip(ids[t], gates[t], strict=True)
    want = sum(gate * expert(f"experts.{e}", row) for e, gate in chosen)
    if shared:
      want = want + expert("shared_experts", row)
    np.testing.assert_allclose(got[t], want, atol=1e-11)


def test_random_weights_route_to_all_experts_and_bias_matters():
  cfg = target_config()
  weights = ref.random_weights(cfg, 0)
  prefix = "model.layers.1.mlp.gate"
  x = np.random.default_rng(3).standard_normal((400, 32)).astype(np.float32)
  logits = x @ weights[f"{prefix}.weight"].T
  bias = weights[f"{prefix}.e_score_correction_bias"]
  ids, _ = ref.route(cfg, logits, bias)
  assert set(ids.ravel()) == set(range(8))
  plain, _ = ref.route(cfg, logits, None)
  assert np.mean(np.sort(ids) != np.sort(plain)) > 0.05


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0], [7, 0, 0], [1, 1, 1]])
def test_grouped_matmul(sizes):
  rng = np.random.default_rng(4)
  rows = rng.standard_normal((7, 5))
  weights = rng.standard_normal((3, 5, 6))
  got = ref.grouped_matmul(rows, weights, np.array(sizes))
  group = np.repeat([0, 1, 2], sizes)
  for i, row in enumerate(rows):
    want = row @ weights[group[i]] if i < len(group) else np.zeros(6)
    np.testing.assert_allclose(got[i], want, atol=1e-12)


def test_grouped_matmul_names_bad_sizes():
  rows, weights = np.zeros((2, 3)), np.zeros((2, 3, 4))
  for sizes in ([2, 1], [-1, 1]):
    with pytest.raises(ValueError, match="group_sizes"):
      ref.grouped_matmul(rows, weights, np.array(sizes))


def test_config_of_a_token_per_expert():
  """k = E: all experts, ordered by choice."""
  cfg = dataclasses.replace(config(), num_experts_per_tok=8)
  logits = np.random.default_rng(5).standard_normal((4, 8))
  ids, weights = ref.route(cfg, logits, np.zeros(8))
  np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1))
  np.testing.assert_allclose(weights.sum(axis=-1), 2.5)
