"""The routed experts: all XLA forms against the reference, int4 against floats."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.checkpoint import quantize
from kdtree_jax.ops import _routed_experts_xla as xla
from kdtree_jax.ops import int4_weight
from kdtree_jax.ops.grouped_matmul import max_chunks
from tests.ops.custom_calls import cuda_text, need_library
from tests.ops.matmul_test import call_in

BF16 = ml_dtypes.bfloat16


def weights_of(E: int, D: int, F: int, seed: int = 0):
  rng = np.random.default_rng(seed)
  gate_up = rng.normal(size=(E, D, 2 * F)) * D**-0.5
  down = rng.normal(size=(E, F, D)) * F**-0.5
  return gate_up.astype(np.float32), down.astype(np.float32)


def int4_of(E: int, D: int, F: int, seed: int = 0):
  gate_up, down = weights_of(E, D, F, seed)

  def pack(weight, gated):
    packed = int4_weight.pack(quantize(weight.swapaxes(1, 2)), gated)
    return jax.tree.map(jnp.asarray, packed)

  return pack(gate_up, True), pack(down, False)


def rows_of(T: int, D: int, E: int, k: int, dtype=np.float32, seed: int = 1):
  """Tokens, their experts (some favoured, none twice in a row) and weights."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(T, D)).astype(dtype)
  order = np.argsort(rng.uniform(size=(T, E)) * (1 + np.arange(E) / E), axis=-1)
  weights = rng.uniform(0.1, 1.0, (T, k)).astype(np.float32)
  return x, order[:, :k].astype(np.int32), weights


@functools.cache
def jitted(axis: int = 0):
  return jax.jit(functools.partial(ops.routed_experts, experts_axis=axis))


@pytest.mark.parametrize("T", [1, 2, 13])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_form_equals_the_reference(T, axis):
  E, D, F, k = 9, 48, 20, 3
  gate_up, down = weights_of(E, D, F)
  x, experts, weights = rows_of(T, D, E, k)
  want = reference.routed_experts(
    *(a.astype(np.float64) for a in (x,)),
    experts,
    weights.astype(np.float64),
    gate_up.astype(np.float64),
    down.astype(np.float64),
  )
  got = jitted(axis)(x, experts, weights, np.moveaxis(gate_up, 0, axis), down)
  assert got.shape == (T, D) and got.dtype == np.float32
  # Sums of 48 and 20 terms of about 0.15, a sum of 3 of up to 4: some ten roundings of
  # 2^-24 of at most 4.
  np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)
  assert np.abs(want).max() > 1


def test_the_form_for_other_devices_equals_the_reference():
  E, D, F, k = 24, 32, 16, 4
  gate_up, down = weights_of(E, D, F)
  x, experts, weights = rows_of(7, D, E, k)
  outputs = jax.jit(xla._grouped)(x, experts, gate_up, down)
  want = reference.routed_experts(x, experts, weights, gate_up, down)
  got = reference.combine(np.asarray(outputs), weights)
  np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)


# Few experts, which become floats at once, and many; ends inside of a tile.
INT4 = [(8, 128, 64, 3), (5, 32, 96, 2), (24, 96, 32, 5), (40, 64, 160, 8)]


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("E", "D", "F", "k"), INT4)
def test_int4_has_the_bits_of_its_floats(E, D, F, k, dtype):
  gate_up, down = int4_of(E, D, F)
  axis = int(E <= xla.DENSE_EXPERTS)
  float_gate_up = jnp.moveaxis(int4_weight.dequantize(gate_up, dtype), 0, axis)
  float_down = int4_weight.dequantize(down, dtype)
  for T in (1, 2, 17):
    x, experts, weights = rows_of(T, D, E, k, dtype)
    got = np.asarray(jitted()(x, experts, weights, gate_up, down))
    want = np.asarray(jitted(axis)(x, experts, weights, float_gate_up, float_down))
    assert got.dtype == dtype
    bits = np.uint32 if dtype == np.float32 else np.uint16
    np.testing.assert_array_equal(got.view(bits), want.view(bits))
    assert np.abs(want.astype(np.float32)).max() > 0.5


def test_int4_equals_the_reference_in_bf16():
  E, D, F, k = 24, 96, 64, 4
  gate_up, down = int4_of(E, D, F)
  x, experts, weights = rows_of(6, D, E, k, BF16)
  got = np.asarray(jitted()(x, experts, weights, gate_up, down)).astype(np.float32)
  want = reference.routed_experts(
    x.astype(np.float64),
    experts,
    weights.astype(np.float64),
    np.asarray(int4_weight.dequantize(gate_up, np.float32), np.float64),
    np.asarray(int4_weight.dequantize(down, np.float32), np.float64),
  )
  # Weights, gate, up, silu, their product and the outputs are rounded to 2^-9 of their
  # size: sums of 96 and 64 terms average that to below 1 % of the typical output.
  np.testing.assert_allclose(got, want, rtol=0, atol=0.06)
  assert np.sqrt(np.mean((got - want) ** 2)) < 0.01 * np.std(want)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("E", [8, 24])
def test_rows_are_independent(E, dtype):
  D, F, k = 64, 32, 3
  x, experts, weights = rows_of(9, D, E, k, dtype)
  order = np.random.default_rng(5).permutation(9)
  kinds = [int4_of(E, D, F), tuple(w.astype(dtype) for w in weights_of(E, D, F))]
  for kernels in kinds:
    straight = np.asarray(jitted()(x, experts, weights, *kernels))
    permuted = jitted()(x[order], experts[order], weights[order], *kernels)
    np.testing.assert_array_equal(permuted, straight[order])


def test_int4_of_many_experts_never_becomes_floats_at_once():
  """The largest array of the program is that of one expert, or the tiles."""
  E, D, F, k, T = 40, 64, 96, 4, 8
  arguments = (*rows_of(T, D, E, k), *int4_of(E, D, F))
  text = str(jax.make_jaxpr(ops.routed_experts)(*arguments))
  assert f"f32[1,{D},{2 * F}]" in text
  assert f"f32[{E}," not in text and f"f32[{T * k},{D}," not in text
  assert f"u8[{T * k},12,1,576]" not in text


@pytest.mark.parametrize("form", ["few", "few one row", "many", "one axis"])
def test_ids_out_of_range_add_nothing(form):
  E, D, F, k = (24 if form == "many" else 8), 32, 32, 3
  T = 1 if "one row" in form else 6
  x, experts, weights = rows_of(T, D, E, k)
  if form == "one axis":
    gate_up, down = weights_of(E, D, F)
    gate_up = gate_up.swapaxes(0, 1)
  else:
    gate_up, down = int4_of(E, D, F)
  run = jitted(int(form == "one axis"))
  for bad in (-1, -(2**31), E, 2**31 - 1):
    wrong = experts.copy()
    wrong[:, 1] = bad
    silent = weights.copy()
    silent[:, 1] = 0
    got = run(x, wrong, weights, gate_up, down)
    np.testing.assert_array_equal(got, run(x, experts, silent, gate_up, down))
  # Where a row has its experts does not change its bits if others have none.
  nobody = np.full_like(experts, E)
  np.testing.assert_array_equal(
    run(x, nobody, weights, gate_up, down), np.zeros((T, D))
  )


def test_an_expert_may_be_chosen_twice():
  gate_up, down = int4_of(24, 32, 32)
  x, experts, weights = rows_of(4, 32, 24, 2)
  experts[:, 1] = experts[:, 0]
  floats = [int4_weight.dequantize(w, np.float32) for w in (gate_up, down)]
  want = reference.routed_experts(x, experts, weights, *map(np.asarray, floats))
  got = jitted()(x, experts, weights, gate_up, down)
  np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)


def test_experts_are_summed_in_slot_order():
  """1e8 swallows a 1 that is added to it, and does not if it is gone before."""
  slots = np.array(
    [[1e8, 1, -1e8, 0], [1e8, -1e8, 1, 0], [1, 1e8, -1e8, 0], [-1e8, 1e8, 0, 1]],
    np.float32,
  )
  outputs = slots[..., None].repeat(3, -1)
  got = jax.jit(xla.combine)(outputs, np.ones((4, 4), np.float32))
  np.testing.assert_array_equal(got, np.tile([[0], [1], [0], [1]], 3))


def test_the_sum_is_rounded_once():
  """In bf16 256 + 1 is 256: a sum that is rounded on the way stays there."""
  slots = np.array([[256, 1, 1, 2], [1, 1, 2, 256]], np.float32).astype(BF16)
  outputs = slots[..., None].repeat(3, -1)
  got = np.asarray(jax.jit(xla.combine)(outputs, np.ones((2, 4), np.float32)))
  assert got.dtype == BF16
  np.testing.assert_array_equal(got.astype(np.float32), np.full((2, 3), 260))


def test_weights_are_not_rounded_to_bf16():
  weights = np.array([[1 + 2.0**-12, -1.0]] * 2, np.float32)
  got = np.asarray(jax.jit(xla.combine)(np.ones((2, 2, 3), BF16), weights))
  np.testing.assert_array_equal(got.astype(np.float32), np.full((2, 3), 2.0**-12))


GOOD = dict(zip(("gate_up", "down"), int4_of(4, 64, 32), strict=True)) | dict(
  zip(("x", "experts", "weights"), rows_of(3, 64, 4, 2), strict=True)
)
FLOATS = dict(zip(("gate_up", "down"), weights_of(4, 64, 32), strict=True))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"x": np.zeros(64, np.float32)}, r"x must be \[T, D\]"),
    ({"x": np.zeros((3, 64), np.float16)}, "x must be .* float16"),
    ({"x": np.zeros((3, 32), np.float32)}, r"down must be \[E, F, 32\]"),
    ({"experts": np.zeros((2, 2), np.int32)}, r"experts must be \[3, k\]"),
    ({"experts": np.zeros((3, 0), np.int32)}, r"experts must be \[3, k\]"),
    ({"experts": np.zeros((3, 2), np.float32)}, "experts must be integers"),
    ({"weights": np.zeros((3, 1), np.float32)}, r"weights must be float32 \[3, 2\]"),
    ({"weights": np.zeros((3, 2), BF16)}, "weights must be float32 .* bfloat16"),
    ({"experts_axis": 2}, "experts_axis = 2 is not allowed"),
    ({"experts_axis": 1}, "experts_axis = 1 is not allowed with int4"),
    ({"down": FLOATS["down"]}, "gate_up is Int4Weight, down is ndarray"),
    ({"gate_up": GOOD["down"]}, "gate_up.gated = False is not allowed"),
    ({"down": GOOD["gate_up"]}, "down.gated = True is not allowed"),
    ({"gate_up": int4_of(4, 32, 32)[0]}, r"gate_up must be \[4, 64, 64\]"),
    ({"gate_up": int4_of(5, 64, 32)[0]}, r"gate_up must be \[4, 64, 64\]"),
    (FLOATS | {"x": np.zeros((3, 64), BF16)}, "gate_up must be .* bfloat16"),
    (FLOATS | {"experts_axis": 1}, r"gate_up must be \[64, 4, 64\]"),
    (FLOATS | {"down": FLOATS["down"][0]}, "down must be of three axes"),
    (FLOATS | {"down": FLOATS["down"][:3]}, r"gate_up must be \[3, 64, 64\]"),
    ({"implementation": "fast"}, "implementation = 'fast'"),
  ],
)
def test_bad_arguments_are_named(changes, message):
  arguments = GOOD | changes
  rows = [arguments.pop(name) for name in ("x", "experts", "weights")]
  kernels = [arguments.pop(name) for name in ("gate_up", "down")]
  with pytest.raises(ValueError, match=message):
    ops.routed_experts(*rows, *kernels, **arguments)


def test_vmap_is_one_by_one():
  gate_up, down = weights_of(9, 48, 20)
  x, experts, weights = rows_of(10, 48, 9, 3)
  halves = [a.reshape(2, 5, *a.shape[1:]) for a in (x, experts, weights)]
  batch = [np.stack([kernel, -kernel]) for kernel in (gate_up, down)]
  got = jax.jit(jax.vmap(ops.routed_experts))(*halves, *batch)
  for i, sign in enumerate((1, -1)):
    own = [a[i] for a in halves]
    want = jitted()(*own, sign * gate_up, sign * down)
    np.testing.assert_allclose(got[i], want, atol=4e-6)


def test_gradients_of_all_that_is_floating():
  """Against differences of the reference in float64."""
  E, D, F, k = 3, 8, 4, 2
  gate_up, down = weights_of(E, D, F)
  x, experts, weights = rows_of(5, D, E, k)
  seed = np.random.default_rng(7).normal(size=(5, D))
  floating = (x, weights, gate_up, down)

  def loss(x, weights, gate_up, down):
    return jnp.sum(ops.routed_experts(x, experts, weights, gate_up, down) * seed)

  def exact(x, weights, gate_up, down):
    return np.sum(reference.routed_experts(x, experts, weights, gate_up, down) * seed)

  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*floating)
  rng = np.random.default_rng(8)
  for i, grad in enumerate(grads):
    wide = [a.astype(np.float64) for a in floating]
    along = rng.normal(size=wide[i].shape) * 1e-4
    up, down_ = (
      [*wide[:i], wide[i] + sign * along, *wide[i + 1 :]] for sign in (1, -1)
    )
    slope = (exact(*up) - exact(*down_)) / 2e-4
    # Sums of some 300 terms of size 1, in float32.
    assert np.sum(grad * along) * 1e4 == pytest.approx(slope, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
  ("kind", "axis"), [("f32", 0), ("f32", 1), ("bf16", 0), ("bf16", 1), ("int4", 0)]
)
def test_programs_for_cuda(kind, axis):
  E, D, F, k, T = 5, 64, 32, 2, 7
  dtype, element = (np.float32, "f32") if kind == "f32" else (BF16, "bf16")
  if kind == "int4":
    kernels = int4_of(E, D, F)
    weights = "<5x4x1x576xui8>, <5x4x1x576xui8>"
  else:
    kernels = [w.astype(dtype) for w in weights_of(E, D, F)]
    kernels[0] = np.moveaxis(kernels[0], 0, axis)
    first = "64x5x64" if axis else "5x64x64"
    weights = f"<{first}x{element}>, <5x32x64x{element}>"
  x, experts, slots = rows_of(T, D, E, k, dtype)

  def run(*arguments):
    return ops.routed_experts(*arguments, experts_axis=axis)

  text = cuda_text(run, x, experts, slots, *kernels)
  target, attributes, types = call_in(text)
  assert (target, attributes) == ("routed_experts", {"experts_axis": axis})
  given, results = types.split(" -> ")
  assert given == f"(<7x64x{element}>, <7x2xi32>, <7x2xf32>, {weights})"
  name = {"f32": "float32", "bf16": "bfloat16"}.get(kind, kind)
  chunks = max_chunks(T * k, E, name, T)
  assert results == (
    f"(<7x64x{element}>, <2x14xi32>, <{chunks}x5xi32>, <1xi32>, "
    f"<14x32x{element}>, <14x64x{element}>)"
  )
  for form in ("pad", "slice", "gather", "sort", "dot_general", "while", "convert"):
    assert f"stablehlo.{form}" not in text


@pytest.mark.parametrize(
  ("E", "D", "F", "dtype", "says"),
  [
    (3, 24, 16, BF16, r"down is \[E, 16, 24\]; in bfloat16 both sizes .* of 16"),
    (3, 32, 24, BF16, r"down is \[E, 24, 32\]; in bfloat16"),
    (8193, 1, 1, np.float32, "down has 8193 experts; at most 8192"),
  ],
)
def test_what_cuda_does_not_take(E, D, F, dtype, says):
  """Forced, an error that says so; else it has the XLA form."""
  need_library()
  x, experts, weights = rows_of(3, D, 4, 2, dtype)
  kernels = np.zeros((E, D, 2 * F), dtype), np.zeros((E, F, D), dtype)
  says = f"implementation='cuda' of routed_experts: {says}"
  with pytest.raises(ValueError, match=says):
    ops.routed_experts(x, experts, weights, *kernels, implementation="cuda")
  text = cuda_text(ops.routed_experts, x, experts, weights, *kernels)
  assert "custom_call @kdtree_jax" not in text
