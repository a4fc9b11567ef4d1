from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kdtree_jax.config import YarnConfig
from kdtree_jax.reference.rope import (
  inverse_frequencies,
  rope,
  rope_rows,
  rope_table,
  yarn_band,
)
from tests.reference.models import KIMI_YARN, target_config

K2_YARN = dataclasses.replace(KIMI_YARN, factor=32.0, beta_fast=1.0)
V3_YARN = dataclasses.replace(KIMI_YARN, factor=40.0)


@pytest.mark.parametrize(
  ("yarn", "theta", "band"),
  [
    (KIMI_YARN, 50000.0, (8, 20)),  # raw edges 8.914, 19.165
    (V3_YARN, 10000.0, (10, 23)),  # 10.47, 22.51
    (K2_YARN, 50000.0, (19, 20)),  # 19.165 twice
    # The lower clamp, and the upper one: at head_dim - 1, not at the last pair.
    (dataclasses.replace(KIMI_YARN, beta_fast=2000.0), 50000.0, (0, 20)),
    (dataclasses.replace(KIMI_YARN, beta_slow=1e-9), 50000.0, (8, 63)),
  ],
)
def test_yarn_band_of_published_models(yarn, theta, band):
  assert yarn_band(64, theta, yarn) == band


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
  plain = inverse_frequencies(64, 50000.0, None)
  np.testing.assert_allclose(plain, [50000.0 ** (-i / 32) for i in range(32)], 1e-15)
  ratio = inverse_frequencies(64, 50000.0, KIMI_YARN) / plain
  ramp = np.clip((np.arange(32) - 8) / 12, 0, 1)
  np.testing.assert_allclose(ratio, 1 - ramp + ramp / 64, rtol=1e-14)
  # Equal betas: a hard step between pairs 19 and 20.
  step = inverse_frequencies(64, 50000.0, K2_YARN) / plain
  np.testing.assert_allclose(step, [1.0] * 20 + [1 / 32] * 12, rtol=1e-14)


def test_equal_band_edges_do_not_divide_by_zero():
  # Both edges clamp to 0 with a tiny original context.
  yarn = dataclasses.replace(KIMI_YARN, original_max_position_embeddings=2)
  assert yarn_band(8, 10000.0, yarn) == (0, 0)
  ratio = inverse_frequencies(8, 10000.0, yarn) / inverse_frequencies(8, 1e4, None)
  np.testing.assert_allclose(ratio, [1, 1 / 64, 1 / 64, 1 / 64], rtol=1e-14)


@pytest.mark.parametrize(
  ("position", "low", "high"),
  # Largest deviation of float32 angles over all pairs, in radians, as measured
  # on the published code: 1.6e-4 at 4096, 2e-3 at 32K, 6e-3 at 128K to 256K.
  [(4096, 1e-5, 2e-4), (32768, 1e-4, 2.5e-3), (262143, 1e-3, 2e-2)],
)
def test_float32_angles_deviate_as_the_published_code_does(position, low, high):
  cos32, sin32 = rope_rows(np.array([position]), 64, 50000.0, KIMI_YARN, "float32")
  cos64, sin64 = rope_rows(np.array([position]), 64, 50000.0, KIMI_YARN, "float64")
  chord = np.hypot(cos32 - cos64, sin32 - sin64)
  assert low < chord.max() < high


def test_float32_angles_are_one_float32_product():
  frequencies = inverse_frequencies(64, 50000.0, KIMI_YARN, "float32")
  assert frequencies.dtype == np.float32
  table = rope_table(64, 3000, 50000.0, KIMI_YARN, "float32")
  angle = np.float32(2999) * frequencies
  assert angle.dtype == np.float32
  np.testing.assert_array_equal(table.cos[2999], np.cos(np.float64(angle)).astype("f4"))


def test_table_rows_do_not_depend_on_the_table():
  table = rope_table(8, 100, 10000.0, KIMI_YARN, amplitude=1.25)
  positions = np.array([99, 0, 41])
  rows = rope_rows(positions, 8, 10000.0, KIMI_YARN, amplitude=1.25)
  np.testing.assert_array_equal(rows.cos, table.cos[positions])
  np.testing.assert_array_equal(rows.sin, table.sin[positions])
  assert table.cos.dtype == np.float32 and table.cos.shape == (100, 4)
  np.testing.assert_allclose(table.cos[0], 1.25)


@pytest.mark.parametrize("interleave", [True, False])
def test_rotation_is_a_complex_product(interleave):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((5, 3, 8))
  positions = np.array([7, 2, 0, 31, 5])
  table = rope_table(8, 32, 10000.0, None)
  got = rope(x, positions, table, interleave)
  z = x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., :4] + 1j * x[..., 4:]
  angles = positions[:, None] * 10000.0 ** (-np.arange(4) / 4)
  want = z * np.exp(1j * angles)[:, None]
  # The table holds float32 cosines.
  np.testing.assert_allclose(
    got, np.concatenate([want.real, want.imag], axis=-1), atol=5e-7
  )
  assert got.dtype == np.float64


def test_float32_products_are_rounded_separately():
  rng = np.random.default_rng(1)
  x = rng.standard_normal((50, 8), dtype=np.float32)
  table = rope_table(8, 50, 10000.0, None)
  got = rope(x, np.arange(50), table, interleave=False)
  for t in range(50):
    for i in range(4):
      a, b, c, s = x[t, i], x[t, 4 + i], table.cos[t, i], table.sin[t, i]
      assert got[t, i] == np.float32(np.float32(a * c) - np.float32(b * s))
      assert got[t, 4 + i] == np.float32(np.float32(b * c) + np.float32(a * s))


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="head_dim = 7"):
    rope_table(7, 4, 10000.0, None)
  with pytest.raises(ValueError, match="length = -1"):
    rope_table(8, -1, 10000.0, None)
  with pytest.raises(ValueError, match="table covers 0 to 3"):
    rope(np.zeros((1, 8)), np.array([4]), rope_table(8, 4, 10000.0, None), True)
  with pytest.raises(ValueError, match="positions run from -1"):
    rope(np.zeros((1, 8)), np.array([-1]), rope_table(8, 4, 10000.0, None), True)


@pytest.mark.parametrize(
  ("factor", "mscale", "scale"),
  [
    (64.0, 1.0, 0.1446796),  # Kimi K2-0905 to K2.6
    (32.0, 1.0, 0.1308608),  # Kimi K2-Instruct
    (40.0, 1.0, 0.1352338),  # DeepSeek-V3
    (40.0, 0.707, 0.1147214),  # DeepSeek-V2-Lite
    (None, None, 0.0721688),  # Moonlight
  ],
)
def test_softmax_scale_of_published_models(factor, mscale, scale):
  yarn = None
  if factor is not None:
    yarn = YarnConfig(
      factor=factor,
      original_max_position_embeddings=4096,
      beta_fast=32.0,
      beta_slow=1.0,
      mscale=mscale,
      mscale_all_dim=mscale,
    )
  config = target_config(
    qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=yarn, rope_theta=5e4
  )
  assert math.isclose(config.softmax_scale, scale, rel_tol=1e-6)
  assert config.rope_amplitude == 1.0
