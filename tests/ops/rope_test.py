from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.config import YarnConfig
from kdtree_jax.reference.rope import rope_rows

# Kimi K2's values: theta 50,000 and YaRN to 262,144 positions.
KIMI = YarnConfig(
  factor=64,
  original_max_position_embeddings=4096,
  beta_fast=32,
  beta_slow=1,
  mscale=1.0,
  mscale_all_dim=1.0,
)
P, S = 64, 2048

rope = jax.jit(ops.rope, static_argnames="interleave")


@pytest.fixture(scope="module")
def table():
  return ops.rope_table(P, S, 50000.0, KIMI)


def same_bits(a, b) -> bool:
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleave", [True, False])
def test_equals_the_reference_to_the_bit(interleave, dtype, table):
  rng = np.random.default_rng(0)
  # Exact zeros and wide ranges, so that sums cancel and round in every way.
  x = rng.normal(size=(2, 33, 5, P)) * rng.choice([0, 1e-3, 1, 100], size=(2, 33, 5, 1))
  x = np.asarray(jnp.asarray(x, dtype))
  positions = rng.integers(0, S, size=(2, 33)).astype(np.int32)
  got = rope(x, positions[..., None], *table, interleave=interleave)
  assert got.dtype == x.dtype and got.shape == x.shape
  for b in range(2):
    expected = reference.rope(x[b], positions[b], table, interleave)
    assert same_bits(got[b], expected)
  # Features without heads.
  keys = rope(x[:, :, 0], positions, *table, interleave=interleave)
  assert same_bits(keys, got[:, :, 0])


def test_long_positions():
  rng = np.random.default_rng(1)
  positions = np.sort(rng.integers(0, 262144, size=500))
  positions[-1] = 262143
  rows = rope_rows(positions, P, 50000.0, KIMI)
  x = rng.normal(size=(500, P)).astype(np.float32)
  got = rope(x, np.arange(500), *rows, interleave=True)
  expected = reference.rope(x, np.arange(500), rows, True)
  assert same_bits(got, expected)


def test_products_stay_rounded_inside_a_larger_program(table):
  # Neighbours that a compiler could fuse with, and positions known to it.
  rng = np.random.default_rng(2)
  x = rng.normal(size=(33, P)).astype(np.float32)
  cos, sin = table

  @jax.jit
  def program(x):
    y = ops.rope(x * 0.5, jnp.arange(33), cos, sin, interleave=False)
    return y * 2 + 0.0, ops.rope(y, jnp.arange(33), cos, sin, interleave=True)

  once = reference.rope(x * np.float32(0.5), np.arange(33), table, False)
  twice = reference.rope(once, np.arange(33), table, True)
  got = program(x)
  np.testing.assert_array_equal(got[0], once * 2)
  assert same_bits(got[1], twice)


def test_a_fused_multiply_add_would_be_seen(table):
  # The exact sum rounded once, which is what contraction of one product gives up to
  # the other's rounding, differs from the reference in many places: so the tests
  # above can fail.
  rng = np.random.default_rng(3)
  x = rng.normal(size=(33, P)).astype(np.float32)
  cos, sin = (t[:33].astype(np.float64) for t in table)
  first, second = x[:, : P // 2].astype(np.float64), x[:, P // 2 :]
  fused = (first * cos - (second * sin).astype(np.float32)).astype(np.float32)
  expected = reference.rope(x, np.arange(33), table, False)[:, : P // 2]
  assert np.mean(fused != expected) > 0.05


def test_rows_are_independent(table):
  rng = np.random.default_rng(4)
  x = rng.normal(size=(16, P)).astype(np.float32)
  positions = rng.integers(0, S, size=16)
  order = rng.permutation(16)
  straight = np.asarray(rope(x, positions, *table, interleave=True))
  permuted = rope(x[order], positions[order], *table, interleave=True)
  assert same_bits(straight[order], permuted)


def test_not_a_number_stays_one(table):
  x = np.ones((2, P), np.float32)
  x[0, 0], x[1, 1] = np.nan, np.inf
  got = np.asarray(rope(x, np.array([3, 3]), *table, interleave=False))
  expected = reference.rope(x, np.array([3, 3]), table, False)
  np.testing.assert_array_equal(got, expected)


def test_errors_name_the_argument(table):
  with pytest.raises(ValueError, match=r"x has 32 features"):
    ops.rope(jnp.zeros((1, 32)), jnp.zeros((1,), jnp.int32), *table, interleave=True)
