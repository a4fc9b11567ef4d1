from __future__ import annotations

import numpy as np
import pytest

from kdtree_jax import reference as ref
from kdtree_jax.reference.drafter import visible_keys
from tests.reference.models import (
  KIMI_YARN,
  drafter_config,
  random_tokens,
  target_config,
)

F64 = np.float64
TARGET = target_config()
TARGET_WEIGHTS = ref.random_weights(TARGET, 1)
ROOT, LENGTH = 17, 11
FEATURES = ref.forward(
  TARGET, TARGET_WEIGHTS, random_tokens(LENGTH, 20), taps=(0, 1), dtype=F64
).features


def draft(config, features=FEATURES, root=ROOT, dtype=F64, **weights):
  parameters = ref.random_drafter_weights(config, 3) | weights
  return ref.draft(
    config, parameters, TARGET_WEIGHTS, features, root, len(features), dtype
  )


@pytest.mark.parametrize(
  ("config", "row0", "row3"),
  # Made with the layers of Qwen3 in transformers 5.24 arranged as z-lab/dflash
  # does, in float64 (angles in float32), with a two-sided window in the mask.
  [
    (
      drafter_config(),
      [-0.502317, 4.793006, -3.264138, 4.767663, -1.220277, 0.117095],
      [-1.441179, 4.504582, -0.665113, 2.384242, -3.032787, 0.169701],
    ),
    (
      drafter_config(
        rope_scaling=KIMI_YARN,
        layer_types=("full_attention", "sliding_attention"),
        sliding_window=7,
        head_dim=16,
      ),
      [-0.646282, -1.163335, -0.88244, -1.214015, 2.372637, 0.929597],
      [-0.846324, -1.552112, -1.783794, 0.464697, 2.268091, 2.925998],
    ),
  ],
  ids=["plain", "yarn"],
)
def test_logits_of_the_published_form(config, row0, row3):
  got = draft(config)
  assert got.shape == (4, 61) and got.dtype == F64
  # Printed digits, and float32 angles up to 16 radians on the other side.
  np.testing.assert_allclose(got[[0, 3], :6], [row0, row3], atol=5e-6)


def test_float32_is_near_float64():
  got = draft(drafter_config(), dtype=np.float32)
  assert got.dtype == np.float32
  # Two layers of sums of up to 64 terms, values up to 10.
  assert 0 < np.abs(got - draft(drafter_config())).max() < 2e-5


def test_causal_layers_see_no_later_row():
  config = drafter_config(causal="sliding")
  got = visible_keys(config, 0, np.arange(8))
  want = [
    [1, 1, 1, 1, 0, 0, 0, 0],
    [0, 1, 1, 1, 1, 0, 0, 0],
    [0, 0, 1, 1, 1, 1, 0, 0],
    [0, 0, 0, 1, 1, 1, 1, 0],
    [0, 0, 0, 0, 1, 1, 1, 1],
  ]
  np.testing.assert_array_equal(got, np.array(want, bool))
  assert visible_keys(config, 1, np.arange(8)).all()
  config = drafter_config(causal="all")
  got = visible_keys(config, 1, np.arange(8))
  np.testing.assert_array_equal(got, np.tri(5, 8, 3, dtype=bool))


def test_window_is_two_sided():
  config = drafter_config()
  got = visible_keys(config, 0, np.arange(8))
  want = [
    [1, 1, 1, 1, 1, 1, 1, 0],  # position 3: 0 is 3 away, 7 is 4 away
    [0, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 1, 1, 1, 1],
  ]
  np.testing.assert_array_equal(got, np.array(want, bool))
  assert visible_keys(config, 1, np.arange(8)).all()


def test_keys_outside_every_window_leave_no_trace():
  config = drafter_config(layer_types=("sliding_attention",) * 2)
  base = draft(config)
  far = FEATURES.copy()
  far[: LENGTH - 3] += 1.0  # at least 4 away from the root at position 11
  np.testing.assert_array_equal(draft(config, far), base)
  near = FEATURES.copy()
  near[LENGTH - 3] += 1.0
  # Position 8 reaches the root, and over it, a layer later, three rows more.
  changed = np.any(draft(config, near) != base, axis=-1)
  assert changed.tolist() == [True, True, True, False]
  # With a full layer the same rows do count.
  full = drafter_config()
  assert np.any(draft(full, far) != draft(full))


def test_every_row_sees_the_root():
  config = drafter_config(layer_types=("full_attention",) * 2, sliding_window=None)
  changed = draft(config, root=18) != draft(config)
  assert np.all(np.any(changed, axis=-1))


def test_context_order_matters():
  """The keys are rotated to their positions; otherwise the context were a set."""
  config = drafter_config(layer_types=("full_attention",) * 2, sliding_window=None)
  assert np.abs(draft(config, FEATURES[::-1]) - draft(config)).max() > 0.1


def test_empty_context():
  config = drafter_config()
  got = draft(config, np.zeros((0, 64)))
  assert got.shape == (4, 61) and np.all(np.isfinite(got))


def test_amplitude_scales_the_keys_and_queries():
  """Factor a on cos and sin of q and k multiplies the attention logits by a^2."""
  a = 1.25
  config = drafter_config(rope_amplitude=a)
  weights = ref.random_drafter_weights(config, 3)
  norms = ("q_norm.weight", "k_norm.weight")
  scaled = {name: a * w for name, w in weights.items() if name.endswith(norms)}
  got = draft(config)
  # The float32 cosines are rounded after the factor here, before it there.
  np.testing.assert_allclose(got, draft(drafter_config(), **scaled), atol=2e-6)
  assert np.abs(got - draft(drafter_config())).max() > 1e-3


def test_bad_arguments_are_named():
  config = drafter_config()
  weights = ref.random_drafter_weights(config, 3)
  with pytest.raises(ValueError, match=r"context_features.*\(11, 63\).*\(11, 64\)"):
    draft(config, FEATURES[:, 1:])
  with pytest.raises(ValueError, match=r"context_features"):
    ref.draft(config, weights, TARGET_WEIGHTS, FEATURES, ROOT, LENGTH + 1)
  with pytest.raises(ValueError, match="root_token = 61"):
    draft(config, root=61)
  del weights["layers.1.self_attn.k_norm.weight"]
  with pytest.raises(ValueError, match="layers.1.self_attn.k_norm.weight.*missing"):
    ref.draft(config, weights, TARGET_WEIGHTS, FEATURES, ROOT, LENGTH)
