from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.ops import int4_weight
from kdtree_jax.ops.grouped_matmul import max_chunks
from tests.ops import products
from tests.ops.custom_calls import cuda_text
from tests.ops.int4_weight_test import random_tensor
from tests.ops.matmul_test import call_in

BF16 = ml_dtypes.bfloat16
K, N = 24, 10

product = jax.jit(ops.grouped_matmul)


def arrays(sizes: list[int], seed: int, dtype=np.float32):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(sum(sizes), K)).astype(dtype)
  weights = rng.normal(size=(len(sizes), K, N)).astype(dtype)
  return x, weights, np.array(sizes, np.int32)


SIZES = {
  "even": [3, 3, 3],
  "empty ones": [0, 4, 0, 0, 5, 0],
  "first only": [9, 0, 0],
  "last only": [0, 0, 9],
  "one row each": [1] * 9,
  "one group": [9],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_the_reference(sizes):
  x, weights, group_sizes = arrays(sizes, 0)
  exact = reference.grouped_matmul(
    x.astype(np.float64), weights.astype(np.float64), group_sizes
  )
  # Worst case of sums of K terms, each rounded once per addition and product.
  magnitude = reference.grouped_matmul(np.abs(x), np.abs(weights), group_sizes)
  got = product(x, weights, group_sizes)
  assert got.dtype == np.float32 and got.shape == (9, N)
  assert np.all(np.abs(got - exact) <= (K + 1) * 2.0**-24 * magnitude)


def test_bf16_is_rounded_once():
  """Integers, so that float32 sums are exact."""
  rng = np.random.default_rng(1)
  group_sizes = np.array([5, 0, 4, 7], np.int32)
  x = rng.integers(-16, 17, (16, K)).astype(BF16)
  weights = rng.integers(-16, 17, (4, K, N)).astype(BF16)
  exact = reference.grouped_matmul(
    x.astype(np.float64), weights.astype(np.float64), group_sizes
  )
  want = exact.astype(BF16)
  assert np.mean(want.astype(np.float64) != exact) > 0.2
  got = product(x, weights, group_sizes)
  assert got.dtype == BF16
  np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_are_independent(dtype):
  """A row's bits depend on the row and its group, wherever the row lies."""
  x, weights, group_sizes = arrays([4, 3, 0, 9], 2, dtype)
  groups = np.repeat(np.arange(4), group_sizes)
  before = np.asarray(product(x, weights, group_sizes))
  rng = np.random.default_rng(3)
  # Within the groups.
  order = np.lexsort((rng.random(16), groups))
  after = np.asarray(product(x[order], weights, group_sizes))
  np.testing.assert_array_equal(
    after.view(np.uint8), before[order].view(np.uint8), strict=True
  )
  # Among other rows, with groups of other sizes: row 5, of group 1, lies at 1.
  other = rng.normal(size=x.shape).astype(dtype)
  other[1] = x[5]
  after = np.asarray(product(other, weights, np.array([0, 12, 4, 0], np.int32)))
  np.testing.assert_array_equal(after[1].view(np.uint8), before[5].view(np.uint8))


def test_group_sizes_are_run_time_values():
  x, weights, _ = arrays([4, 4], 4)
  for sizes in ([8, 0], [0, 8], [3, 5]):
    got = product(x, weights, np.array(sizes, np.int32))
    want = reference.grouped_matmul(x, weights, np.array(sizes))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"x": jnp.zeros((3, 5))}, r"\(3, 5\) and \(2, 4, 6\)"),
    ({"x": jnp.zeros((1, 3, 4))}, r"x must be \[M, K\]"),
    ({"weights": jnp.zeros((4, 6))}, r"weights \[G, K, N\]"),
    ({"group_sizes": jnp.zeros((3,), jnp.int32)}, r"group_sizes must be \[2\]"),
    ({"x": jnp.zeros((3, 4), jnp.bfloat16)}, "x is bfloat16 but weights are float32"),
    ({"x": jnp.zeros((3, 4), jnp.float16)}, "x is float16; it must be float32 or"),
    ({"group_sizes": jnp.zeros(2)}, "group_sizes must be integers"),
    ({"implementation": "triton"}, "implementation = 'triton'"),
    (
      {"weights": jnp.zeros((8193, 4, 6)), "group_sizes": np.zeros(8193, int)}
      | {"implementation": "cuda"},
      "implementation='cuda' of grouped_matmul: weights have 8193 groups; at most 8192",
    ),
    (
      {"weights": int4_weight.Int4Weight(jnp.zeros((2, 1, 1, 576)), 4, 6)},
      "weights: depth = 4 is not allowed",
    ),
    (
      {"weights": int4_weight.Int4Weight(jnp.zeros((2, 1, 1, 500)), 32, 6)},
      r"weights.tiles is float32 \[2, 1, 1, 500\]",
    ),
    (
      {"weights": int4_weight.pack(random_tensor(2, 6, 32))},
      r"\(3, 4\) and \(2, 32, 6",
    ),
    (
      {"x": jnp.zeros((3, 32)), "weights": int4_weight.pack(random_tensor(3, 6, 32))},
      r"group_sizes must be \[3\]",
    ),
    (
      {
        "x": jnp.zeros((3, 32)),
        "weights": int4_weight.pack(random_tensor(2, 6, 32), gated=True),
      },
      "weights.gated = True is not allowed",
    ),
  ],
)
def test_errors_name_the_argument(changes, says):
  arguments = {
    "x": jnp.zeros((3, 4)),
    "weights": jnp.zeros((2, 4, 6)),
    "group_sizes": jnp.array([1, 2]),
  }
  with pytest.raises(ValueError, match=says):
    ops.grouped_matmul(**(arguments | changes))


def test_numpy_arrays_do():
  x, weights, group_sizes = arrays([2, 0, 3], 5)
  got = ops.grouped_matmul(x, weights, group_sizes)
  np.testing.assert_array_equal(got, product(x, weights, group_sizes))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
def test_int4_has_the_bits_of_its_floats(dtype):
  weight = int4_weight.pack(random_tensor(3, 21, 96))
  floats = np.asarray(int4_weight.dequantize(weight, dtype))
  rng = np.random.default_rng(6)
  x = rng.normal(size=(11, 96)).astype(dtype)
  group_sizes = np.array([4, 0, 5], np.int32)
  got = np.asarray(product(x, weight, group_sizes))
  want = np.asarray(product(x, floats, group_sizes))
  assert got.dtype == dtype and got.shape == (11, 21)
  np.testing.assert_array_equal(got, want)
  assert not got[9:].any()
  for rows, g in ((slice(0, 4), 0), (slice(4, 9), 2)):
    sums = products.sums(x[rows], floats[g])
    products.check(got[rows], *products.rounded(*sums, dtype))


def test_rows_beyond_the_groups_become_zeros():
  x, weights, _ = arrays([4, 4], 7)
  for sizes in ([3, 2], [0, 0], [0, 7]):
    got = np.asarray(product(x, weights, np.array(sizes, np.int32)))
    used = sum(sizes)
    want = reference.grouped_matmul(x[:used], weights, np.array(sizes))
    np.testing.assert_allclose(got[:used], want, atol=1e-5)
    assert not got[used:].any()


def test_vmap_is_one_by_one():
  x, weights, group_sizes = arrays([4, 0, 3], 8)
  batch = np.stack([x, x[::-1]]), np.stack([weights, -weights])
  sizes = np.stack([group_sizes, group_sizes[::-1]])
  got = jax.jit(jax.vmap(ops.grouped_matmul))(*batch, sizes)
  for i in range(2):
    want = product(batch[0][i], batch[1][i], sizes[i])
    np.testing.assert_allclose(got[i], want, atol=1e-5)


def test_more_groups_than_cuda_takes_have_the_xla_form():
  arguments = (
    jnp.zeros((3, 1)),
    jnp.zeros((8193, 1, 1)),
    jnp.zeros(8193, jnp.int32),
  )
  assert "custom_call @kdtree_jax" not in cuda_text(ops.grouped_matmul, *arguments)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64, 65, 160])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_any_sizes_have_room_for_their_chunks(rows, kind):
  """As many chunks as the worst sizes need, each of a full chunk but for the last."""
  chunk = {"float32": 64, "bfloat16": 64, "int4": 16}[kind]
  if kind != "float32":
    chunk = next((c for c in (8, 16, 32, 64) if rows <= c), chunk)
    chunk = min(chunk, 16) if kind == "int4" else max(chunk, 16)
  for groups in (1, 2, 7, 200):
    rng = np.random.default_rng(groups)
    most = 0
    for _ in range(50):
      sizes = np.bincount(rng.integers(0, groups, rows), minlength=groups)
      most = max(most, int(np.sum(-(-sizes // chunk))))
    assert most <= max_chunks(rows, groups, kind, rows) <= 2 * rows


@pytest.mark.parametrize(
  ("dtype", "K", "N", "types"),
  [
    (BF16, 48, 40, "<30x48xbf16>, <3x48x40xbf16>, <3xi32>) -> (<30x40xbf16>"),
    (BF16, 50, 31, "<30x64xbf16>, <3x64x32xbf16>, <3xi32>) -> (<30x32xbf16>"),
    (np.float32, 50, 31, "<30x50xf32>, <3x50x31xf32>, <3xi32>) -> (<30x31xf32>"),
  ],
)
def test_programs_for_cuda(dtype, K, N, types):
  x, weights = np.zeros((30, K), dtype), np.zeros((3, K, N), dtype)
  text = cuda_text(ops.grouped_matmul, x, weights, np.zeros(3, np.int32))
  target, attributes, found = call_in(text)
  assert (target, attributes) == ("grouped_matmul", {})
  chunks = max_chunks(30, 3, np.dtype(dtype).name, 30)
  assert found == f"({types}, <{chunks}x5xi32>, <1xi32>)"
  assert ("stablehlo.pad" in text) is (dtype == BF16 and K == 50)
  assert "stablehlo.dot_general" not in text and "ragged" not in text


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_programs_for_cuda_read_the_tiles(dtype):
  weight = int4_weight.pack(random_tensor(3, 21, 96))
  x = jnp.zeros((30, 96), {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype])
  text = cuda_text(ops.grouped_matmul, x, weight, np.zeros(3, np.int32))
  assert f"(<30x96x{dtype}>, <3x2x2x576xui8>, <3xi32>) -> (<30x21x" in call_in(text)[2]
  for copy in ("pad", "slice", "convert", "dot_general"):
    assert f"stablehlo.{copy}" not in text
