"""The CUDA forms of rope, rope_queries and rope_keys."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import deepseek_v3, kimi_k2_6
from kdtree_jax import ops, reference
from kdtree_jax.ops import _library

KIMI = kimi_k2_6.get_config().model
V3 = deepseek_v3.get_config().model

needs_library = pytest.mark.skipif(
  _library.why_not() is not None, reason=str(_library.why_not())
)


def same_bits(a, b) -> bool:
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def draw(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
  """Normal numbers of several magnitudes per row, some rows zero."""
  scale = rng.choice([0, 1e-3, 1, 100], size=(*shape[:-1], 1))
  return np.array(jnp.asarray(rng.normal(size=shape) * scale, dtype))


def cuda_text(function, *arguments) -> str:
  lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
  return lowered.as_text()


# What can be seen without a GPU.


@needs_library
@pytest.mark.parametrize("angle_dtype", ["float64", "float32"])
def test_frequencies_travel_exactly_and_replace_the_tables(angle_dtype):
  f = ops.RopeFrequencies.create(64, 50000.0, KIMI.rope_scaling, angle_dtype, 0.75)
  cos, sin = ops.rope_table(64, 77, 50000.0, KIMI.rope_scaling, angle_dtype, 0.75)
  text = cuda_text(
    functools.partial(ops.rope, interleave=True, frequencies=f),
    jnp.zeros((2, 3, 5, 64)),
    jnp.zeros((2, 3, 1), jnp.int32),
    cos,
    sin,
  )
  # Positions once per token, not per head; no table among the operands.
  assert re.search(r"@kdtree_jax\.rope\(%\d+, %\d+\)", text)
  assert "(tensor<6x5x64xf32>, tensor<6xi32>) -> tensor<6x5x64xf32>" in text
  (values,) = re.findall(r"frequencies = dense<\[(.*?)\]> : tensor<32xf64>", text)
  assert tuple(map(float, values.split(","))) == f.values
  assert f"float32_angles = {int(angle_dtype == 'float32')} : i64" in text
  assert "amplitude = 7.500000e-01 : f64" in text
  assert "length = 77 : i64" in text and "interleave = 1 : i64" in text


@needs_library
def test_tables_are_operands_without_frequencies():
  cos, sin = ops.rope_table(64, 77, 50000.0, None)
  text = cuda_text(
    functools.partial(ops.rope, interleave=False),
    jnp.zeros((9, 64), jnp.bfloat16),
    jnp.zeros((9,), jnp.int32),
    cos,
    sin,
  )
  operands = "tensor<9x1x64xbf16>, tensor<9xi32>, tensor<77x32xf32>, tensor<77x32xf32>"
  assert f"({operands}) -> tensor<9x1x64xbf16>" in text
  assert "frequencies" not in text and "interleave = 0 : i64" in text


@needs_library
def test_fused_calls():
  f = ops.RopeFrequencies.create(64, 50000.0, None)
  cos, sin = ops.rope_table(64, 77, 50000.0, None)
  positions = jnp.zeros((2, 3), jnp.int32)
  text = cuda_text(
    functools.partial(ops.rope_queries, interleave=True, frequencies=f),
    jnp.zeros((2, 3, 8, 512)),
    jnp.zeros((2, 3, 8, 192)),
    positions,
    cos,
    sin,
  )
  assert "@kdtree_jax.rope_queries" in text and "offset = 128 : i64" in text
  assert "tensor<2x3x8x576xf32>" in text
  text = cuda_text(
    functools.partial(ops.rope_keys, eps=1e-6, interleave=True),
    jnp.zeros((2, 3, 576), jnp.bfloat16),
    jnp.ones((512,), jnp.bfloat16),
    positions,
    cos,
    sin,
  )
  assert "@kdtree_jax.rope_keys" in text
  (eps,) = re.findall(r"eps = (\S+) : f64", text)
  assert float(eps) == 1e-6


@needs_library
def test_wide_heads_take_the_xla_form():
  cos, sin = ops.rope_table(258, 5, 50000.0, None)
  arguments = (jnp.zeros((2, 258)), jnp.zeros((2,), jnp.int32), cos, sin)
  text = cuda_text(functools.partial(ops.rope, interleave=True), *arguments)
  assert "kdtree_jax" not in text
  with pytest.raises(ValueError, match="x has 258 rotated features.*at most 256"):
    ops.rope(*arguments, interleave=True, implementation="cuda")


@needs_library
def test_gradients_and_vmap_lower_for_cuda():
  cos, sin = ops.rope_table(64, 77, 50000.0, None)
  x, positions = jnp.ones((2, 3, 64)), jnp.zeros((2, 3), jnp.int32)
  rope = functools.partial(
    ops.rope, cos=cos, sin=sin, interleave=True, implementation="cuda"
  )
  text = cuda_text(jax.grad(lambda x: rope(x, positions).sum()), x)
  assert "@kdtree_jax.rope" not in text  # linear: the derivative needs no primal
  assert "@kdtree_jax.rope" in cuda_text(jax.vmap(rope), x, positions)


def test_errors_name_the_argument():
  cos, sin = ops.rope_table(64, 77, 50000.0, None)
  x, positions = jnp.zeros((4, 64)), jnp.zeros((4,), jnp.int32)
  rope = functools.partial(ops.rope, interleave=True)
  with pytest.raises(ValueError, match="x is float16; it must be float32 or bfloat16"):
    rope(x.astype(jnp.float16), positions, cos, sin)
  with pytest.raises(ValueError, match=r"positions must be integers.*\(4,\)"):
    rope(x, jnp.zeros((3,), jnp.int32), cos, sin)
  with pytest.raises(ValueError, match="positions must be integers.*float32"):
    rope(x, jnp.zeros((4,)), cos, sin)
  with pytest.raises(ValueError, match="frequencies has 1 values; it must have 32"):
    rope(x, positions, cos, sin, frequencies=ops.RopeFrequencies((1.0,)))
  with pytest.raises(ValueError, match="cos and sin must be float32"):
    rope(x, positions, cos.astype(np.float64), sin)


# What needs a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("angle_dtype", ["float64", "float32"])
@pytest.mark.parametrize(
  ("theta", "yarn"),
  [
    pytest.param(KIMI.rope_theta, KIMI.rope_scaling, id="kimi-yarn"),
    pytest.param(KIMI.rope_theta, None, id="kimi-plain"),
    pytest.param(V3.rope_theta, V3.rope_scaling, id="v3-yarn"),
    pytest.param(V3.rope_theta, None, id="v3-plain"),
  ],
)
def test_every_angle_below_262144(theta, yarn, angle_dtype):
  """A pair (1, 0) turns into (cos, sin), whose bits must be the table's."""
  length = 262144
  table = ops.rope_table(64, length, theta, yarn, angle_dtype)
  f = ops.RopeFrequencies.create(64, theta, yarn, angle_dtype)

  @jax.jit
  def turned(cos, sin):
    x = jnp.broadcast_to(jnp.arange(64) < 32, (length, 64)).astype(jnp.float32)
    positions = jnp.arange(length)
    rope = functools.partial(ops.rope, interleave=False, implementation="cuda")
    formed = rope(x, positions, cos, sin, frequencies=f)
    gathered = rope(x, positions, cos, sin)
    return formed, gathered

  expected = np.concatenate(table, axis=-1)
  formed, gathered = map(np.asarray, turned(*table))
  differing = np.argwhere(formed.view(np.int32) != expected.view(np.int32))
  assert len(differing) == 0, f"{len(differing)} values, first at {differing[:5]}"
  assert same_bits(gathered, expected)


# Widths that take 16 bytes at once and widths that cannot; P = 256 is the widest.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("P", [2, 6, 16, 64, 72, 256])
def test_rope_equals_the_reference_to_the_bit(P, dtype):
  rng = np.random.default_rng(P)
  length = 3000
  table = ops.rope_table(P, length, 50000.0, None, amplitude=0.75)
  f = ops.RopeFrequencies.create(P, 50000.0, None, amplitude=0.75)
  shapes = [(1, 1), (1, 64), (33, 5), (700, 33), (5000, 1)]
  xs = [draw(rng, *shape, P, dtype=dtype) for shape in shapes]
  places = [rng.integers(0, length, size=s[0]).astype(np.int32) for s in shapes]

  @jax.jit
  def program(xs, places, cos, sin):
    rope = functools.partial(ops.rope, implementation="cuda")
    return [
      [
        rope(x, p[:, None], cos, sin, interleave=interleave, frequencies=source)
        for interleave in (True, False)
        for source in (f, None)
      ]
      for x, p in zip(xs, places, strict=True)
    ]

  for x, place, outs in zip(xs, places, program(xs, places, *table), strict=True):
    for i, out in enumerate(outs):
      assert same_bits(out, reference.rope(x, place, table, interleave=i < 2))


@pytest.mark.gpu
def test_positions_outside_the_tables_are_the_nearest_inside():
  table = ops.rope_table(64, 50, 50000.0, None)
  f = ops.RopeFrequencies.create(64, 50000.0, None)
  x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
  places = np.array([-1, -(2**31), 50, 2**31 - 1], np.int32)
  expected = reference.rope(x, np.array([0, 0, 49, 49]), table, True)
  for source in (f, None):
    rope = functools.partial(ops.rope, interleave=True, frequencies=source)
    assert same_bits(rope(x, places, *table, implementation="cuda"), expected)
  assert same_bits(ops.rope(x, places, *table, interleave=True), expected)


def rows(rng, B, N, H, R, C, P, dtype):
  """Operands of both fused ops: absorbed, q, kv, weight, positions."""
  weight = rng.normal(size=R) * 0.5 + 1
  return (
    draw(rng, B, N, H, R, dtype=dtype),
    draw(rng, B, N, H, C + P, dtype=dtype),
    draw(rng, B, N, R + P, dtype=dtype),
    np.asarray(jnp.asarray(weight, dtype)),
    rng.integers(0, 5000, size=(B, N)).astype(np.int32),
  )


def fused(absorbed, q, kv, weight, positions, cos, sin, *, interleave, frequencies):
  more = {
    "interleave": interleave,
    "frequencies": frequencies,
    "implementation": "cuda",
  }
  return (
    ops.rope_queries(absorbed, q, positions, cos, sin, **more),
    ops.rope_keys(kv, weight, positions, cos, sin, eps=1e-5, **more),
  )


# Kimi's widths, the demo's, and widths that do not fill packs.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("B", "N", "H", "R", "C", "P"),
  [
    (1, 1, 64, 512, 128, 64),
    (3, 33, 8, 512, 128, 64),
    (2, 5, 4, 64, 16, 16),
    (2, 3, 3, 7, 5, 6),
    (1, 9, 9, 1100, 8, 40),
    (1, 2, 1, 1, 1, 2),
  ],
)
def test_fused_rows(B, N, H, R, C, P, dtype):
  rng = np.random.default_rng(R)
  table = ops.rope_table(P, 5000, 50000.0, None)
  f = ops.RopeFrequencies.create(P, 50000.0, None)
  arguments = rows(rng, B, N, H, R, C, P, dtype)
  absorbed, q, kv, weight, positions = arguments

  @jax.jit
  def program(*arguments):
    return [
      fused(*arguments, *table, interleave=interleave, frequencies=source)
      for interleave in (True, False)
      for source in (f, None)
    ]

  for i, (queries, keys) in enumerate(program(*arguments)):
    queries, keys = np.asarray(queries), np.asarray(keys)
    assert same_bits(queries[..., :R], absorbed)
    for b in range(B):
      turn = functools.partial(reference.rope, table=table, interleave=i < 2)
      assert same_bits(queries[b, ..., R:], turn(q[b, ..., C:], positions[b]))
      assert same_bits(keys[b, :, R:], turn(kv[b, :, R:], positions[b]))
    check_norm(keys[..., :R], kv[..., :R], weight, 1e-5)


def check_norm(got: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float) -> None:
  """Holds an RMSNorm to float64.

  With u = 2^-24: a thread sums at most 16 squares (width 2048 or less), warps and
  block add 8 more sums, then a division and the sum with a rounded eps: 27 u of the
  mean square, half of it of its root, which is rounded itself, as is the product with
  it: less than 16 u before the result is rounded to its dtype.
  """
  wide, u = x.astype(np.float64), 2.0**-24
  scale = 1 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
  w = weight.astype(np.float64)
  if got.dtype == np.float32:
    exact = wide * scale * w
    # One more rounding, that of the product with the weight. 2^-149 for denormals.
    assert np.all(np.abs(got - exact) <= 17 * u * np.abs(exact) + 2.0**-149)
    return
  normed = (wide * scale).astype(np.float32).astype(got.dtype)
  want = (normed.astype(np.float32) * weight.astype(np.float32)).astype(got.dtype)
  error = np.abs(got.astype(np.float64) - wide * scale * w)
  # Two roundings to bf16, u = 2^-8 each.
  assert np.all(error <= 1.01 * 2.0**-7 * np.abs(wide * scale * w))
  # The first rounding differs where 16 u straddles the middle of two bf16, of which
  # one lies in every 2^-8: less than 16 x 2^-24 x 2^8 x 2 = 5e-4 of all values.
  assert np.mean(got != want) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_depend_on_the_row_alone(dtype):
  rng = np.random.default_rng(5)
  table = ops.rope_table(64, 5000, 50000.0, None)
  f = ops.RopeFrequencies.create(64, 50000.0, None)
  run = jax.jit(
    lambda *a: fused(*a, *table, interleave=True, frequencies=f),
  )
  absorbed, q, kv, weight, positions = rows(rng, 2, 130, 20, 512, 128, 64, dtype)
  queries, keys = map(np.asarray, run(absorbed, q, kv, weight, positions))
  order = rng.permutation(130)
  moved = run(
    absorbed[:, order], q[:, order], kv[:, order], weight, positions[:, order]
  )
  assert same_bits(moved[0], queries[:, order]) and same_bits(moved[1], keys[:, order])
  swapped = run(absorbed[::-1], q[::-1], kv[::-1], weight, positions[::-1])
  assert same_bits(swapped[0], queries[::-1]) and same_bits(swapped[1], keys[::-1])
  # Other numbers of rows, heads and sequences; other blocks.
  few = run(
    absorbed[:1, 7:10, :3], q[:1, 7:10, :3], kv[:1, 7:10], weight, positions[:1, 7:10]
  )
  assert same_bits(few[0], queries[:1, 7:10, :3]) and same_bits(few[1], keys[:1, 7:10])


@pytest.mark.gpu
def test_not_a_number_stays_in_its_row():
  rng = np.random.default_rng(6)
  table = ops.rope_table(64, 5000, 50000.0, None)
  run = jax.jit(lambda *a: fused(*a, *table, interleave=True, frequencies=None))
  absorbed, q, kv, weight, positions = rows(rng, 1, 4, 2, 512, 128, 64, "float32")
  queries, keys = map(np.asarray, run(absorbed, q, kv, weight, positions))
  q[0, 1, 0, 130], kv[0, 2, 3], kv[0, 3, 600 - 64] = np.nan, np.inf, np.nan
  bad_queries, bad_keys = map(np.asarray, run(absorbed, q, kv, weight, positions))
  assert np.isnan(bad_queries[0, 1, 0, 512:]).sum() == 2
  assert same_bits(bad_queries[0, 1, 1], queries[0, 1, 1])
  assert np.isnan(bad_keys[0, 2, 3]) and not np.isnan(bad_keys[0, 2, 512:]).any()
  assert np.isnan(bad_keys[0, 3, 512:]).sum() == 2
  assert same_bits(bad_keys[0, 3, :512], keys[0, 3, :512])
  assert same_bits(bad_keys[0, :2], keys[0, :2])


@pytest.mark.gpu
@pytest.mark.parametrize("given", [True, False])
def test_replayed_in_a_captured_region(given):
  rng = np.random.default_rng(7)
  table = ops.rope_table(64, 5000, 50000.0, None)
  f = ops.RopeFrequencies.create(64, 50000.0, None) if given else None
  up = jnp.asarray(rng.normal(size=(8, 128, 512)) * 0.1, jnp.float32)
  _, q, kv, weight, positions = rows(rng, 2, 9, 8, 512, 128, 64, "float32")

  @jax.jit
  def program(q, kv, positions, up):
    # Products between the calls, so that no two operations become one.
    for _ in range(3):
      absorbed = jnp.einsum("bnhc,hcr->bnhr", q[..., :128], up)
      queries, keys = fused(
        absorbed, q, kv, weight, positions, *table, interleave=True, frequencies=f
      )
      q = ops.rope(
        queries[..., 512:],
        positions[..., None],
        *table,
        interleave=False,
        frequencies=f,
        implementation="cuda",
      )
      q = jnp.concatenate([jnp.einsum("bnhr,hcr->bnhc", queries[..., :512], up), q], -1)
      kv = keys
      positions = positions + 1
    return queries, keys, q

  # The first call runs as it is, the second is captured, later ones are replayed.
  first, *others = [jax.device_get(program(q, kv, positions, up)) for _ in range(4)]
  for other in others:
    assert all(map(same_bits, first, other))
  changed = jax.device_get(program(q, kv, positions + 1, up))
  assert not same_bits(changed[1], first[1])
  assert np.all(np.isfinite(first[1]))


@pytest.mark.gpu
def test_gradients_are_those_of_the_xla_form():
  rng = np.random.default_rng(8)
  table = ops.rope_table(64, 50, 50000.0, None)
  f = ops.RopeFrequencies.create(64, 50000.0, None)
  x = jnp.asarray(rng.normal(size=(9, 4, 64)), jnp.float32)
  weight = jnp.asarray(rng.normal(size=(9, 4, 64)), jnp.float32)
  positions = jnp.arange(9)[:, None]

  def loss(x, implementation):
    y = ops.rope(
      x,
      positions,
      *table,
      interleave=True,
      frequencies=f,
      implementation=implementation,
    )
    return jnp.sum(y * weight)

  grads = [jax.jit(jax.grad(loss), static_argnums=1)(x, i) for i in ("cuda", "xla")]
  assert same_bits(*grads)
