"""The custom calls of rms_norm and add_rms_norm against float64, and their bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.custom_calls import assert_same_bits, replayed
from tests.ops.norm_test import added, check, draw

pytestmark = pytest.mark.gpu

EPS = 1e-5
CUDA = {"eps": EPS, "implementation": "cuda"}


def both(h, out, weight):
  return (
    ops.rms_norm(h, weight, **CUDA),
    ops.add_rms_norm(h, out, weight, **CUDA),
  )


def sums(width: int) -> int:
  """Roundings: of eight squares a thread per 8,192 features, in a warp, in a block."""
  return 8 * -(-width // 8192) + 5 + 5


# Below a chunk, a warp and a block, and beyond; widths that fill no pack; the models'.
WIDTHS = [1, 3, 8, 12, 100, 256, 257, 1536, 2052, 7168, 8192, 8193, 8200, 20000]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_equals_float64(width, dtype):
  rng = np.random.default_rng(width)
  h, out = (draw(rng, 3, 7, width, dtype=dtype) for _ in range(2))
  weight = draw(rng, width, dtype=dtype)
  # From rows of which eps is most to rows of which it is nothing.
  scales = np.logspace(-5, 8, 7).astype(h.dtype)[:, None]
  h, out = h * scales, out * scales
  alone, (total, normed) = replayed(both)(h, out, weight)
  check(alone, h, weight, EPS, sums(width))
  assert_same_bits(added(h, out), total)
  check(normed, total, weight, EPS, sums(width))
  # Both forms of the kernel.
  again, _ = jax.jit(both)(total, out, weight)
  assert_same_bits(normed, again)


@pytest.mark.parametrize(
  ("width", "dtype"), [(7168, "bfloat16"), (1536, "float32"), (257, "bfloat16")]
)
def test_any_number_of_rows_gives_the_bits_of_a_row_alone(width, dtype):
  """1 to 160 rows, in one program: the last ones of 160."""
  rng = np.random.default_rng(5)
  h, out = (draw(rng, 160, width, dtype=dtype) for _ in range(2))
  weight = draw(rng, width, dtype=dtype)

  @jax.jit
  def run(h, out, weight):
    everything = jax.tree.leaves(both(h, out, weight))
    equal = []
    for rows in range(1, 160):
      some = jax.tree.leaves(both(h[-rows:], out[-rows:], weight))
      same = [jnp.all(x == y[-rows:]) for x, y in zip(some, everything, strict=True)]
      equal.append(jnp.stack(same))
    return everything, jnp.stack(equal)

  everything, equal = jax.device_get(run(h, out, weight))
  assert equal.shape == (159, 3) and equal.all(), np.argwhere(~equal)
  order = rng.permutation(160)
  moved = jax.jit(both)(h[order], out[order], weight)
  assert_same_bits([x[order] for x in everything], jax.tree.leaves(moved))
  alone = jax.jit(both)
  for row in range(0, 160, 23):
    at = slice(row, row + 1)
    assert_same_bits(
      [x[at] for x in everything], jax.tree.leaves(alone(h[at], out[at], weight))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_finite_stays_in_its_row(dtype):
  rng = np.random.default_rng(6)
  width = 300
  h, out = (np.array(draw(rng, 8, width, dtype=dtype)) for _ in range(2))
  weight = np.ones(width, h.dtype)
  run = jax.jit(both)
  before = jax.device_get(jax.tree.leaves(run(h, out, weight)))
  h[1, 299], h[3, 0], out[5, 17] = np.nan, np.inf, -np.inf
  h[6], out[6] = 0, 0
  h[7], out[7] = 1e30, 0  # Its squares overflow: the scale is 0.
  alone, (total, normed) = jax.device_get(run(h, out, weight))
  assert np.isnan(alone[1]).all() and np.isnan(normed[[1]]).all()
  # Finite values are divided by infinity, the infinite one too.
  assert np.isnan(alone[3, 0]) and not alone[3, 1:].any()
  assert np.isnan(normed[5, 17]) and total[5, 17] == -np.inf
  assert not alone[6].any() and not normed[6].any()
  assert not alone[7].any() and not normed[7].any()
  untouched = [0, 2, 4]
  after = [alone, total, normed]
  assert_same_bits([x[untouched] for x in before], [x[untouched] for x in after])
  assert_same_bits(before[0][5], alone[5])


def test_rows_of_zeros_without_eps():
  """0 times infinity, as in the XLA form; then in a batch of none, nothing."""
  x, weight = jnp.zeros((2, 16)), jnp.ones(16)
  for implementation in ("cuda", "xla"):
    assert np.isnan(ops.rms_norm(x, weight, 0.0, implementation)).all()
    assert ops.rms_norm(x[:0], weight, 0.0, implementation).shape == (0, 16)


def test_gradients_are_those_of_the_xla_form():
  rng = np.random.default_rng(8)
  h, out, seed = (draw(rng, 9, 64, dtype="float32") for _ in range(3))
  weight = draw(rng, 64, dtype="float32")

  def loss(h, out, weight, implementation):
    total, normed = ops.add_rms_norm(h, out, weight, EPS, implementation)
    return jnp.sum(seed * (jnp.sin(total) + normed))

  grads = [
    jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(h, out, weight, i)
    for i in ("cuda", "xla")
  ]
  assert_same_bits(*grads)
