from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdtree_jax import reference as ref
from tests.reference.models import KIMI_YARN, random_tokens, target_config

F64 = np.float64

VARIANTS = {
  "kimi": {},
  "one_group": {"n_group": 1, "topk_group": 1},
  "plain_q": {"q_lora_rank": None, "n_shared_experts": 2},
  "half_split": {"rope_interleave": False, "rope_angle_dtype": "float32"},
  "older": {
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "rope_scaling": None,
    "n_shared_experts": 0,
  },
  "all_dense": {"first_k_dense_replace": 3},
  "all_moe": {"first_k_dense_replace": 0},
  "tied": {"tie_word_embeddings": True},
}


def random_tree(seed: int, budget: int = 14, root: int = 5) -> ref.Tree:
  logits = np.random.default_rng(seed).standard_normal((4, 61)).astype(np.float32)
  return ref.build_tree(*ref.log_softmax_topk(5 * logits, budget), budget, root)


def test_logits_of_transformers():
  """DeepseekV3ForCausalLM of transformers 5.24, eager, float64, same parameters."""
  config = target_config(rope_angle_dtype="float32")
  weights = ref.random_weights(config, 1)
  got = ref.forward(config, weights, random_tokens(40, 2), dtype=F64)
  want = [
    [0.511329, 3.274515, -3.123154, -2.399629, 2.181762, -1.481293],
    [-4.40263, -1.293717, 0.783443, 0.719218, 4.425906, -0.541346],
    [0.191191, 2.079263, -4.880863, -0.575813, 0.652129, 6.418806],
    [-0.994477, 0.462337, 2.065547, -2.754286, 2.637299, -0.390434],
  ]
  # Printed digits; norms, softmax and router are float32 on the other side.
  np.testing.assert_allclose(got.logits[[0, 1, 20, 39], :6], want, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_naive_equals_absorbed(variant):
  config = target_config(**VARIANTS[variant])
  weights = ref.random_weights(config, 1)
  tokens = random_tokens(14, 2)
  absorbed = ref.forward(config, weights, tokens, dtype=F64)
  naive = ref.forward(config, weights, tokens, attention="naive", dtype=F64)
  # Some thousand float64 roundings of numbers around 1.
  np.testing.assert_allclose(absorbed.logits, naive.logits, atol=1e-12)
  np.testing.assert_allclose(absorbed.cache, naive.cache, atol=1e-12)
  assert absorbed.logits.dtype == F64
  assert absorbed.cache.shape == (3, 14, 24)


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 6], [11, 1]])
def test_steps_equal_prefill(pieces):
  config = target_config()
  weights = ref.random_weights(config, 1)
  tokens = random_tokens(12, 3)
  whole = ref.forward(config, weights, tokens, taps=(1,), dtype=F64)
  cache = ref.init_cache(config, 15)
  start = 0
  for count in pieces:
    at = np.arange(start, start + count)
    out = ref.forward(
      config, weights, tokens[at], cache=cache, positions=at, taps=(1,), dtype=F64
    )
    np.testing.assert_allclose(out.logits, whole.logits[at], atol=1e-12)
    np.testing.assert_allclose(out.features, whole.features[at], atol=1e-12)
    assert np.all(cache[:, at] == 0)  # the argument is left alone
    cache, start = out.cache, start + count
  np.testing.assert_allclose(cache[:, :12], whole.cache, atol=1e-12)
  assert np.all(cache[:, 12:] == 0)


def test_float32_is_near_float64():
  config = target_config()
  weights = ref.random_weights(config, 1)
  tokens = random_tokens(20, 4)
  exact = ref.forward(config, weights, tokens, dtype=F64).logits
  single = ref.forward(config, weights, tokens).logits
  assert single.dtype == np.float32
  # Three layers of sums of up to 60 terms: some 30 half-ulps (6e-8) of values up
  # to 10. A flipped expert would show as an error above 1e-2.
  assert 0 < np.abs(single - exact).max() < 2e-5


@pytest.mark.parametrize("variant", ["kimi", "plain_q", "half_split", "tied"])
def test_verified_nodes_equal_their_paths_alone(variant):
  config = target_config(**VARIANTS[variant])
  weights = ref.random_weights(config, 1)
  prompt = random_tokens(7, 5)
  tree = random_tree(6)
  assert tree.depths.max() >= 3 and np.sum(tree.depths == 1) >= 3
  start = ref.forward(config, weights, prompt, cache=ref.init_cache(config, 9))
  out = ref.verify(config, weights, start.cache, 7, tree, taps=(0, 2), dtype=F64)
  paths = ref.ancestors(tree, int(tree.depths.max()))
  # The committed rows are float32 here: give the paths the same ones.
  prefix = start.cache.astype(F64)
  for node, depth in enumerate(tree.depths):
    path = paths[node, : depth + 1]
    room = np.concatenate([prefix[:, :7], np.zeros((3, depth + 1, 24))], axis=1)
    alone = ref.forward(
      config,
      weights,
      tree.token_ids[path],
      cache=room,
      positions=7 + np.arange(depth + 1),
      taps=(0, 2),
      dtype=F64,
    )
    np.testing.assert_allclose(out.logits[node], alone.logits[-1], atol=1e-12)
    np.testing.assert_allclose(out.features[node], alone.features[-1], atol=1e-12)
    np.testing.assert_allclose(out.tree_keys[:, path], alone.cache[:, 7:], atol=1e-12)


def test_compacted_path_equals_a_plain_cache():
  config = target_config()
  weights = ref.random_weights(config, 1)
  prompt = random_tokens(6, 7)
  tree = random_tree(8)
  start = ref.forward(
    config, weights, prompt, cache=ref.init_cache(config, 12), dtype=F64
  )
  out = ref.verify(config, weights, start.cache, 6, tree, dtype=F64)
  deepest = int(np.argmax(tree.depths))
  depth = int(tree.depths[deepest])
  path = ref.ancestors(tree, depth)[deepest]
  cache = [
    ref.compact(rows, keys, path, depth + 1, 6)
    for rows, keys in zip(start.cache, out.tree_keys, strict=True)
  ]
  text = np.concatenate([prompt, tree.token_ids[path]])
  plain = ref.forward(config, weights, text, dtype=F64)
  np.testing.assert_allclose(np.stack(cache)[:, : len(text)], plain.cache, atol=1e-12)


def test_padding_nodes_change_nothing():
  config = target_config()
  weights = ref.random_weights(config, 1)
  table = np.log(np.array([[0.7, 0.3]], np.float32)), np.array([[4, 9]], np.int32)
  small, padded = (ref.build_tree(*table, budget, 5) for budget in (2, 8))
  assert padded.size == small.size == 3
  start = ref.forward(config, weights, random_tokens(5, 9), dtype=F64)
  one = ref.verify(config, weights, start.cache, 5, small, dtype=F64)
  two = ref.verify(config, weights, start.cache, 5, padded, dtype=F64)
  np.testing.assert_allclose(two.logits[:3], one.logits, atol=1e-12)
  assert np.all(np.isfinite(two.logits))


@pytest.mark.parametrize("mscale_all_dim", [1.0, 0.5])
def test_cache_rows_are_normed_latent_and_roped_key(mscale_all_dim):
  """Layer 0, by hand: the row is `[norm(c) | rope(k_pe)]`, halves split."""
  yarn = dataclasses.replace(KIMI_YARN, mscale_all_dim=mscale_all_dim)
  config = target_config(rope_scaling=yarn)
  weights = ref.random_weights(config, 1)
  tokens = random_tokens(6, 10)
  cache = ref.forward(config, weights, tokens, dtype=F64).cache

  def norm(x, name, eps):
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * weights[f"model.layers.0.{name}.weight"]

  x = weights["model.embed_tokens.weight"][tokens].astype(F64)
  x = norm(x, "input_layernorm", config.rms_norm_eps)
  kv = x @ weights["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].T
  latent = norm(kv[:, :16], "self_attn.kv_a_layernorm", config.latent_norm_eps)
  np.testing.assert_allclose(cache[0, :, :16], latent, atol=1e-12)
  frequencies = ref.inverse_frequencies(8, config.rope_theta, config.rope_scaling)
  pairs = kv[:, 16::2] + 1j * kv[:, 17::2]
  turned = pairs * np.exp(1j * np.arange(6)[:, None] * frequencies)
  # 0.1 * mscale * ln(factor) + 1, as a ratio: 1 where both are equal.
  turned *= (0.1 * np.log(64) + 1) / (0.1 * mscale_all_dim * np.log(64) + 1)
  want = np.concatenate([turned.real, turned.imag], axis=-1)
  np.testing.assert_allclose(cache[0, :, 16:], want, atol=2e-6)  # float32 cosines


def test_angle_dtype_of_the_config_counts():
  """In layer 0 the roped keys are all that can differ, by the angle's rounding."""
  tokens, at = random_tokens(2, 10), np.array([4000, 4001])
  rows = {}
  for angle_dtype in ("float64", "float32"):
    config = target_config(rope_angle_dtype=angle_dtype)
    weights = ref.random_weights(config, 1)
    cache = ref.init_cache(config, 4002)
    out = ref.forward(config, weights, tokens, cache=cache, positions=at)
    rows[angle_dtype] = out.cache[0, at, 16:]
  difference = np.abs(rows["float64"] - rows["float32"]).max()
  assert 1e-6 < difference < 1e-3


def test_taps_are_the_residual_stream_after_a_layer():
  config = target_config()
  weights = ref.random_weights(config, 1)
  tokens = random_tokens(6, 11)
  out = ref.forward(config, weights, tokens, taps=(2, 0), dtype=F64)
  assert out.features.shape == (6, 64)
  last = out.features[:, :32]
  final = ref.rms_norm(last, weights["model.norm.weight"], config.rms_norm_eps)
  np.testing.assert_allclose(final @ weights["lm_head.weight"].T, out.logits, 1e-12)
  # A target cut off after layer 0 ends with the second tap.
  short = target_config(num_hidden_layers=1)
  first = ref.forward(short, weights, tokens, taps=(0,), dtype=F64).features
  np.testing.assert_array_equal(first, out.features[:, 32:])


def test_tied_head_is_the_embedding():
  config = target_config(tie_word_embeddings=True)
  weights = ref.random_weights(config, 1)
  assert "lm_head.weight" not in weights
  out = ref.forward(config, weights, random_tokens(4, 12), taps=(2,), dtype=F64)
  final = ref.rms_norm(out.features, weights["model.norm.weight"], 1e-5)
  want = final @ weights["model.embed_tokens.weight"].T
  np.testing.assert_allclose(out.logits, want, atol=1e-12)


def test_each_norm_uses_its_own_epsilon():
  weights = ref.random_weights(target_config(), 1)
  tokens = random_tokens(4, 13)

  def logits(**changes):
    return ref.forward(target_config(**changes), weights, tokens, dtype=F64).logits

  base = logits()
  assert np.abs(logits(latent_norm_eps=1e-5) - base).max() > 1e-6
  assert np.abs(logits(rms_norm_eps=1e-6) - base).max() > 1e-6


def test_random_weights_are_lively():
  config = target_config()
  weights = ref.random_weights(config, 1)
  assert {name: w.shape for name, w in weights.items()} == ref.weight_shapes(config)
  assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
  logits = ref.forward(config, weights, random_tokens(60, 14)).logits
  assert 1.5 < logits.std() < 4
  assert len(set(logits.argmax(axis=-1))) > 15
  again = ref.random_weights(config, 1)
  assert all(np.array_equal(weights[name], again[name]) for name in weights)
  assert not np.array_equal(weights["model.norm.weight"], np.ones(32))


def test_bad_arguments_are_named():
  config = target_config()
  weights = ref.random_weights(config, 1)
  tokens = random_tokens(4, 15)
  missing = dict(weights)
  del missing["model.layers.2.mlp.experts.7.up_proj.weight"]
  with pytest.raises(ValueError, match=r"layers.2.mlp.experts.7.up_proj.*missing"):
    ref.forward(config, missing, tokens)
  bad = weights | {"model.norm.weight": np.ones(31, np.float32)}
  with pytest.raises(ValueError, match=r"model.norm.weight.*\(31,\).*\(32,\)"):
    ref.forward(config, bad, tokens)
  with pytest.raises(ValueError, match="allowed are 0 to 60"):
    ref.forward(config, weights, np.array([3, 61]))
  with pytest.raises(ValueError, match="one sequence"):
    ref.forward(config, weights, tokens[None])
  cache = ref.init_cache(config, 5)
  with pytest.raises(ValueError, match="holds 0 to 4"):
    ref.forward(config, weights, tokens, cache=cache, positions=np.arange(2, 6))
  with pytest.raises(ValueError, match="consecutive"):
    ref.forward(config, weights, tokens[:2], cache=cache, positions=np.array([0, 2]))
