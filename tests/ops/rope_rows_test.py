from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.ops.norm import rms_norm

B, N, H, R, C, P = 2, 7, 3, 24, 8, 16


@pytest.fixture(scope="module")
def table():
  return ops.rope_table(P, 100, 10000.0, None)


def same_bits(a, b) -> bool:
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def draw(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
  return np.asarray(jnp.asarray(rng.normal(size=shape), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleave", [True, False])
def test_queries_are_the_absorbed_part_beside_the_rotated_one(interleave, dtype, table):
  rng = np.random.default_rng(0)
  absorbed = draw(rng, B, N, H, R, dtype=dtype)
  q = draw(rng, B, N, H, C + P, dtype=dtype)
  positions = rng.integers(0, 100, size=(B, N)).astype(np.int32)
  got = jax.jit(ops.rope_queries, static_argnames="interleave")(
    absorbed, q, positions, *table, interleave=interleave
  )
  assert same_bits(got[..., :R], absorbed)
  for b in range(B):
    pe = reference.rope(q[b, ..., C:], positions[b], table, interleave)
    assert same_bits(got[b, ..., R:], pe)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_are_the_normed_latent_beside_the_rotated_key(dtype, table):
  rng = np.random.default_rng(1)
  kv = draw(rng, B, N, R + P, dtype=dtype)
  weight = draw(rng, R, dtype=dtype)
  positions = rng.integers(0, 100, size=(B, N)).astype(np.int32)
  got = jax.jit(ops.rope_keys, static_argnames=("eps", "interleave"))(
    kv, weight, positions, *table, eps=1e-5, interleave=True
  )
  norm = jax.jit(rms_norm, static_argnames="eps")(kv[..., :R], weight, eps=1e-5)
  assert same_bits(got[..., :R], norm)
  for b in range(B):
    pe = reference.rope(kv[b, :, R:], positions[b], table, True)
    assert same_bits(got[b, :, R:], pe)


def test_frequencies_are_those_of_the_table():
  for angle_dtype in ("float64", "float32"):
    f = ops.RopeFrequencies.create(P, 10000.0, None, angle_dtype, 0.75)
    assert hash(f) == hash(ops.RopeFrequencies(f.values, angle_dtype, 0.75))
    table = ops.rope_table(P, 100, 10000.0, None, angle_dtype, 0.75)
    place = np.arange(100).astype(angle_dtype)[:, None]
    angles = (place * np.asarray(f.values, angle_dtype)).astype(np.float64)
    assert same_bits((np.cos(angles) * f.amplitude).astype(np.float32), table.cos)


def test_errors_name_the_argument(table):
  q, absorbed = jnp.zeros((B, N, H, C + P)), jnp.zeros((B, N, H, R))
  kv, weight = jnp.zeros((B, N, R + P)), jnp.zeros((R,))
  positions = jnp.zeros((B, N), jnp.int32)

  def queries(absorbed=absorbed, q=q, positions=positions, **more):
    return ops.rope_queries(absorbed, q, positions, *table, interleave=True, **more)

  def keys(kv=kv, weight=weight, positions=positions):
    return ops.rope_keys(kv, weight, positions, *table, eps=1e-6, interleave=True)

  with pytest.raises(ValueError, match="q .* must be .B, N, H, C"):
    queries(q=q[0])
  with pytest.raises(ValueError, match="q is float16"):
    queries(q=q.astype(jnp.float16))
  with pytest.raises(ValueError, match="absorbed .* must be .B, N, H, R"):
    queries(absorbed=absorbed[:, :1])
  with pytest.raises(ValueError, match="absorbed bfloat16"):
    queries(absorbed=absorbed.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match="positions must be integers"):
    queries(positions=positions[0])
  with pytest.raises(ValueError, match="frequencies has 3 values; it must have 8"):
    queries(frequencies=ops.RopeFrequencies((1.0, 0.5, 0.25)))
  with pytest.raises(ValueError, match="kv .* must be .B, N, R"):
    keys(kv=kv[..., :P])
  with pytest.raises(ValueError, match="weight is bfloat16"):
    keys(weight=weight.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match="weight is float32 .23,.*must be float32 .24,"):
    keys(weight=weight[1:])
  with pytest.raises(ValueError, match="positions must be integers"):
    keys(positions=positions.astype(jnp.float32))
