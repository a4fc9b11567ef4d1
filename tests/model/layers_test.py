from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kdtree_jax import reference
from kdtree_jax.model.cache import LatentCache, round_up
from kdtree_jax.model.layers import SwiGLU
from kdtree_jax.ops.norm import rms_norm
from kdtree_jax.ops.silu import silu_times
from tests.model.families import family_config

BF16 = ml_dtypes.bfloat16

norm = jax.jit(rms_norm, static_argnames="eps")


def random(shape: tuple[int, ...], seed: int, dtype=np.float32) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def test_rms_norm_equals_the_reference():
  x, weight = 5 * random((3, 7, 64), 0), 1 + random((64,), 1) / 5
  want = reference.rms_norm(x.astype(np.float64), weight, 1e-5)
  # One sum of 64 squares (half of its error counts, under the root) and some four
  # roundings, relative to each value: 36 * 2^-24 at worst.
  np.testing.assert_allclose(norm(x, weight, eps=1e-5), want, rtol=36 * 2.0**-24)


def test_epsilon_is_added_to_the_mean_square():
  x = np.full((1, 16), 1e-3, np.float32)
  got = norm(x, np.ones(16, np.float32), eps=1e-6)
  np.testing.assert_allclose(got, np.full((1, 16), 0.5**0.5), rtol=1e-6)


def test_rms_norm_in_bf16_rounds_before_the_weight():
  """As published code does; a product in float32, rounded once, has other bits."""
  x, weight = random((40, 64), 2, BF16), (1 + random((64,), 3) / 5).astype(BF16)
  got = np.asarray(norm(x, weight, eps=1e-5))
  assert got.dtype == BF16
  want = reference.rms_norm(x, weight, 1e-5)
  # The statistics may differ in the last float32 bit, and a normed value then falls
  # to the other side of a rounding boundary once in 2^15.
  assert np.mean(got != want) < 0.002
  wide = x.astype(np.float32)
  wide /= np.sqrt(np.mean(wide * wide, -1, keepdims=True) + np.float32(1e-5))
  fused = (wide * weight.astype(np.float32)).astype(BF16)
  assert np.mean(got != fused) > 0.1


def test_silu_in_bf16_is_rounded_once():
  gate, up = random((50, 64), 4, BF16), random((50, 64), 5, BF16)
  got = np.asarray(jax.jit(silu_times)(gate, up))
  assert got.dtype == BF16
  wide = gate.astype(np.float64)
  want = (wide / (1 + np.exp(-wide))).astype(np.float32).astype(BF16) * up
  assert np.mean(got != want) < 0.002
  # jax.nn.silu rounds the sigmoid first.
  assert np.mean(np.asarray(jax.nn.silu(jnp.asarray(gate)) * up) != want) > 0.1


def test_silu_of_large_inputs():
  gate = np.array([-1e4, -100.0, 0.0, 100.0, 1e4], np.float32)
  got = silu_times(jnp.asarray(gate), jnp.ones(5))
  np.testing.assert_array_equal(got, [0, got[1], 0, 100, 1e4])
  assert -1e-30 < got[1] <= 0


@pytest.mark.parametrize("inner", [24, 40])
def test_swiglu_takes_its_gate_from_the_front(inner):
  layer = SwiGLU(16, inner, jnp.dtype(np.float32), nnx.Rngs(0))
  gate_up, down = layer.gate_up.kernel[...], layer.down.kernel[...]
  gate, up = np.asarray(gate_up[:, :inner]).T, np.asarray(gate_up[:, inner:]).T
  x = random((5, 16), 6)
  want = reference.swiglu(x.astype(np.float64), gate, up, np.asarray(down).T)
  np.testing.assert_allclose(layer(x), want, rtol=0, atol=2e-5)


def test_an_empty_cache_holds_whole_chunks():
  config = family_config("kimi")
  cache = LatentCache.empty(config, 3, 129, jnp.dtype(jnp.bfloat16))
  assert cache.data.shape == (2, 3, 256, config.kv_lora_rank + config.qk_rope_head_dim)
  assert cache.data.dtype == jnp.bfloat16 and cache.capacity == 256
  np.testing.assert_array_equal(cache.lengths, [0, 0, 0])
  assert LatentCache.empty(config, 1, 128, jnp.dtype(np.float32)).capacity == 128
  assert [round_up(n, 8) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
