from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kdtree_jax.config import ConfigError
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.reference.drafter import draft as reference_draft
from kdtree_jax.reference.rope import rope_table
from kdtree_jax.reference.weights import drafter_weight_shapes, random_drafter_weights
from tests.drafter.fake_target import (
  KIMI_YARN,
  MASK,
  VOCAB,
  make_config,
  make_drafter,
  make_target,
  make_text,
)

SLIDING = {
  "layer_types": ("sliding_attention", "full_attention"),
  "sliding_window": 4,
}
KIMI = SLIDING | {
  "rope_theta": 5e4,
  "rope_scaling": KIMI_YARN,
  "rope_amplitude": 1.416,
}
CACHE = 160  # more than one chunk of the attention loop

# f32 against f64. Each of the 2 layers rounds the residual stream some 20 times
# (norms, projections, RoPE, softmax, MLP), and its sums have at most 170 terms whose
# roundings add up like a random walk: about 20 * 2 * sqrt(170) * 2**-24 < 4e-5 of the
# logits, which lie below 10. A wrong position, mask or norm shows as 1e-2 or more.
TOLERANCE = 4e-4


@jax.jit
def observe(drafter, target, state, tokens, features, start, count):
  return drafter.observe(target, state, tokens, features, start, count)


@jax.jit
def draft(drafter, target, state, root_tokens, lengths):
  return drafter.draft(target, state, root_tokens, lengths, jnp.zeros_like(lengths))


def _observe_all(drafter, target, tokens, features, cache_len=CACHE):
  B, T = tokens.shape
  state = drafter.init_state(B, cache_len)
  return observe(
    drafter, target, state, tokens, features, np.zeros(B, int), np.full(B, T)
  )


@pytest.mark.parametrize(
  "overrides",
  [{}, SLIDING, KIMI, SLIDING | {"causal": "sliding"}, SLIDING | {"causal": "all"}],
  ids=["full", "slide", "kimi", "causal slide", "causal"],
)
def test_injected_keys_and_values_equal_the_concatenated_form(overrides):
  config = make_config(**overrides)
  drafter, target = make_drafter(config), make_target()
  lengths = np.array([0, 1, 37, 150])
  tokens, features = make_text(config, len(lengths), 150)
  state = _observe_all(drafter, target, tokens, features)
  root = np.array([3, 0, VOCAB - 2, 5], np.int32)
  logits = draft(drafter, target, state, root, lengths)
  for b, length in enumerate(lengths):
    expected = reference_draft(
      config,
      random_drafter_weights(config, 1),
      target.state_dict(),
      features[b, :length],
      int(root[b]),
      int(length),
      np.float64,
    )
    np.testing.assert_allclose(logits[b], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_angles_take_the_dtype_that_the_config_names(dtype):
  config = make_config(**KIMI, rope_angle_dtype=dtype)
  state = make_drafter(config).init_state(1, 4096)
  tables = {
    name: rope_table(
      config.head_dim, 4096 + config.block_size, 5e4, KIMI_YARN, name, 1.416
    )
    for name in ("float64", "float32")
  }
  np.testing.assert_array_equal(state.cos, tables[dtype].cos)
  np.testing.assert_array_equal(state.sin, tables[dtype].sin)
  assert (tables["float64"].cos != tables["float32"].cos).any()


@pytest.mark.parametrize(
  "overrides",
  [{}, KIMI, SLIDING | {"causal": "sliding"}],
  ids=["full", "kimi", "causal"],
)
def test_training_form_equals_inference_at_each_anchor(overrides):
  config = make_config(**overrides)
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 2, 30)
  state = _observe_all(drafter, target, tokens, features)
  anchors = np.array([[0, 1, 2, 17, 29], [4, 5, 12, 13, 28]])
  trained = jax.jit(DFlash.block_logits)(drafter, target, features, tokens, anchors)
  assert trained.shape == (2, 5, config.max_depth, VOCAB)
  for a, lengths in enumerate(anchors.T):
    root = tokens[np.arange(2), lengths]
    expected = draft(drafter, target, state, root, lengths)
    np.testing.assert_allclose(trained[:, a], expected, rtol=0, atol=TOLERANCE)


def test_text_observed_in_pieces_equals_text_observed_at_once():
  config = make_config(**SLIDING)
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 2, 40)
  whole = _observe_all(drafter, target, tokens, features)

  # Sequence 0 is committed in steps of 1 .. 5 tokens, sequence 1 in steps of 5 .. 1,
  # each out of a step of 5 rows whose rest is garbage.
  rng = np.random.default_rng(0)
  state, start = drafter.init_state(2, CACHE), np.zeros(2, int)
  while (start < 40).any():
    more = rng.integers(0, 5)
    count = np.minimum([1 + more, 5 - more], 40 - start)
    rows = np.full((2, 5, features.shape[-1]), np.nan, np.float32)
    ids = np.full((2, 5), -7, np.int32)
    for b in range(2):
      rows[b, : count[b]] = features[b, start[b] : start[b] + count[b]]
      ids[b, : count[b]] = tokens[b, start[b] : start[b] + count[b]]
    state = observe(drafter, target, state, ids, rows, start, count)
    start = start + count
  # The products of 5 and of 40 rows may round differently: values below 8, sums of
  # 48 terms at the most.
  for name in ("keys", "values"):
    np.testing.assert_allclose(
      getattr(state, name), getattr(whole, name), rtol=0, atol=8 * 48 * 2**-24
    )


def test_rows_beyond_count_and_beyond_the_cache_leave_no_trace():
  config = make_config()
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 3, 8)
  before = _observe_all(drafter, target, tokens, features, cache_len=12)
  more, garbage = make_text(config, 3, 5, seed=3)
  start, count = np.array([8, 8, 10]), np.array([0, 3, 5])
  garbage[1, 3:] = np.nan
  garbage[0] = np.inf
  after = observe(drafter, target, before, more, garbage, start, count)
  written = np.zeros((3, 12), bool)
  written[1, 8:11] = written[2, 10:12] = True
  for name in ("keys", "values"):
    old, new = np.asarray(getattr(before, name)), np.asarray(getattr(after, name))
    np.testing.assert_array_equal(new[:, ~written], old[:, ~written])
    assert (new[:, written] != old[:, written]).all()
    assert np.isfinite(new).all()


def test_neighbours_do_not_matter():
  config = make_config(**SLIDING)
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 3, 140)
  root, lengths = np.array([1, 2, 3], np.int32), np.array([30, 140, 7])
  state = _observe_all(drafter, target, tokens, features)
  logits = draft(drafter, target, state, root, lengths)
  # The same sequence 0 beside other ones: of other texts and lengths, one of them
  # ended in NaN, in another slot.
  other_tokens, other = make_text(config, 3, 140, seed=9)
  other_tokens[2], other[2] = tokens[0], features[0]
  other[1] = np.nan
  state = _observe_all(drafter, target, other_tokens, other)
  moved = draft(
    drafter, target, state, np.array([8, 8, 1], np.int32), np.array([0, 90, 30])
  )
  np.testing.assert_array_equal(moved[2], logits[0])


def test_a_slot_is_reused_without_its_past():
  config = make_config()
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 1, 50)
  state = _observe_all(drafter, target, tokens, np.full_like(features, np.nan))
  short, short_features = make_text(config, 1, 10, seed=4)
  root, lengths = np.array([1], np.int32), np.array([10])
  start, count = np.array([0]), np.array([10])
  reused = observe(drafter, target, state, short, short_features, start, count)
  fresh = _observe_all(drafter, target, short, short_features)
  np.testing.assert_array_equal(
    draft(drafter, target, reused, root, lengths),
    draft(drafter, target, fresh, root, lengths),
  )


def test_sliding_layers_see_the_window_and_nothing_else():
  config = make_config(
    num_hidden_layers=1, layer_types=("sliding_attention",), sliding_window=4
  )
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 1, 20)
  root, lengths = np.array([1], np.int32), np.array([20])

  def logits(features):
    state = _observe_all(drafter, target, tokens, features)
    return np.asarray(draft(drafter, target, state, root, lengths))[0]

  base = logits(features)
  for position in range(12, 20):
    changed = features.copy()
    changed[0, position] = 1 - changed[0, position]
    differs = (logits(changed) != base).any(axis=-1)
    rows = 20 + 1 + np.arange(config.max_depth)  # positions that the rows are about
    np.testing.assert_array_equal(differs, rows - position < 4)


def test_every_row_depends_on_the_mask_embedding_and_the_root():
  config = make_config()
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 1, 20)
  assert MASK not in tokens
  state = _observe_all(drafter, target, tokens, features)
  lengths = np.array([20])

  def logits(target, root=1):
    return np.asarray(draft(drafter, target, state, np.array([root]), lengths))[0]

  def zeroed(token):
    return type(target)(target.table.at[token].set(0.0), target.kernel)

  base = logits(target)
  assert (np.abs(logits(zeroed(MASK)) - base).max(axis=-1) > 1e-2).all()
  assert (np.abs(logits(target, root=2) - base).max(axis=-1) > 1e-2).all()
  np.testing.assert_array_equal(logits(zeroed(2)), base)  # no other row is read


def test_taps_keep_their_order():
  config = make_config()
  drafter = make_drafter(config)
  assert drafter.feature_layers == config.target_layer_ids == (1, 3)
  _, features = make_text(config, 1, 4)
  swapped = np.concatenate(np.split(features, 2, axis=-1)[::-1], axis=-1)
  difference = drafter.context_features(features) - drafter.context_features(swapped)
  assert np.abs(difference).max() > 0.1


def test_bf16_follows_f32():
  config = make_config(**SLIDING)
  weights = {
    name: np.asarray(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32))
    for name, w in random_drafter_weights(config, 1).items()
  }
  target = make_target()
  tokens, features = make_text(config, 2, 30)
  root, lengths = np.array([1, 2], np.int32), np.array([30, 11])
  results = {}
  for dtype in (jnp.float32, jnp.bfloat16):
    drafter = DFlash.from_state_dict(config, weights, dtype)
    state = _observe_all(drafter, target, tokens, features)
    assert state.keys.dtype == state.values.dtype == dtype
    results[dtype] = draft(drafter, target, state, root, lengths)
    assert results[dtype].dtype == jnp.float32
  error = np.abs(results[jnp.float32] - results[jnp.bfloat16])
  # Some 40 roundings of 2**-9 like a random walk: 1.3 % of logits below 10.
  assert 1e-4 < error.max() < 0.25


def test_state_keeps_its_structure_in_a_compiled_loop():
  config = make_config()
  drafter, target = make_drafter(config), make_target()
  tokens, features = make_text(config, 2, 5)

  @jax.jit
  def rounds(drafter, target, state):
    def body(step, carry):
      state, root = carry
      lengths = jnp.full(2, 5 * step)
      logits = drafter.draft(target, state, root, lengths, lengths)
      root = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
      count = jnp.full(2, 5)
      state = drafter.observe(target, state, tokens, features, lengths, count)
      return state, root

    return jax.lax.fori_loop(0, 3, body, (state, jnp.zeros(2, jnp.int32)))

  state, _ = rounds(drafter, target, drafter.init_state(2, 20))
  assert (np.asarray(state.keys)[:, :, :15] != 0).all()
  assert (np.asarray(state.keys)[:, :, 15:] == 0).all()


def test_published_names_round_trip():
  config = make_config()
  weights = random_drafter_weights(config, 1)
  drafter = DFlash.from_state_dict(config, weights)
  out = drafter.to_state_dict()
  assert out.keys() == drafter_weight_shapes(config).keys()
  assert len(out) == 11 * config.num_hidden_layers + 3
  for name, value in weights.items():
    np.testing.assert_array_equal(out[name], value)


def test_other_weights_are_refused():
  config = make_config()
  weights = random_drafter_weights(config, 1)
  with pytest.raises(ConfigError, match="lack 'norm.weight'"):
    DFlash.from_state_dict(config, {k: v for k, v in weights.items() if k[0] != "n"})
  with pytest.raises(ConfigError, match="hold 'markov.weight'"):
    DFlash.from_state_dict(config, weights | {"markov.weight": np.zeros(1)})
  transposed = weights | {"fc.weight": weights["fc.weight"].T}
  with pytest.raises(ConfigError, match="'fc.weight' has shape"):
    DFlash.from_state_dict(config, transposed)


def test_initial_values_follow_the_rngs():
  config = make_config()
  first, same, other = (
    DFlash(config, rngs=nnx.Rngs(seed)).to_state_dict() for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(first["fc.weight"], same["fc.weight"])
  assert (first["fc.weight"] != other["fc.weight"]).any()
  assert (first["norm.weight"] == 1).all()
