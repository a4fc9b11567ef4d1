"""The XLA forms of the matrix products, their arguments, and programs for CUDA."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.ops.matmul import einsum, gated_matmul, head_matmul, matmul
from tests.ops import products
from tests.ops.custom_calls import cuda_text, need_library

BF16 = ml_dtypes.bfloat16
dtypes = pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])

product = jax.jit(matmul)


def random(shape: tuple[int, ...], seed: int, dtype=np.float32) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_same_bits(got, want) -> None:
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype and got.shape == want.shape
  np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_float32_product_is_a_true_one():
  x, w = random((7, 200), 0), random((200, 31), 1)
  exact = x.astype(np.float64) @ w.astype(np.float64)
  # Sums of 200 products, rounded one by one: 7 sqrt(200) 2^-24 of the terms'
  # magnitudes but for a chance of e^-24 (Higham & Mary 2019). The inputs alone
  # rounded to TF32 add sqrt(200) 2^-11 of a term, ten times as much.
  bound = 7 * 200**0.5 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w))
  got = product(x, w)
  assert got.dtype == np.float32
  assert np.all(np.abs(got - exact) <= bound)
  assert np.any(product(x.astype(BF16), w.astype(BF16)) - exact > bound)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
def test_bf16_product_is_the_float32_one_rounded_once(rows):
  """Upcast first, as on a CPU: every row, the last ones too."""
  x, w = random((rows, 200), 2, BF16), random((200, 31), 3, BF16)
  wide = product(x.astype(np.float32), w.astype(np.float32))
  got = product(x, w)
  assert_same_bits(got, np.asarray(wide).astype(BF16))


def test_bf16_sums_are_not_rounded_on_the_way():
  """Integers, so that float32 sums are exact: any other rounding would show."""
  rng = np.random.default_rng(4)
  x = rng.integers(-8, 9, (9, 640)).astype(BF16)
  w = rng.integers(-8, 9, (640, 24)).astype(BF16)
  exact = x.astype(np.int64) @ w.astype(np.int64)
  assert np.mean(exact != exact.astype(BF16).astype(np.int64)) > 0.2
  assert_same_bits(product(x, w), exact.astype(np.float32).astype(BF16))
  assert_same_bits(
    jax.jit(lambda x, w: einsum("nk,km->nm", x, w))(x, w), exact.astype(np.float32)
  )


def test_einsum_of_bf16_rounds_to_the_dtype_that_is_asked_for():
  x, w = random((2, 5, 3, 16), 5, BF16), random((3, 16, 8), 6, BF16)
  wide = np.einsum("bnhc,hcr->bnhr", x.astype(np.float64), w.astype(np.float64))
  single = jax.jit(lambda x, w: einsum("bnhc,hcr->bnhr", x, w))(x, w)
  narrow = jax.jit(lambda x, w: einsum("bnhc,hcr->bnhr", x, w, BF16))(x, w)
  assert single.dtype == np.float32
  np.testing.assert_allclose(single, wide, rtol=0, atol=17 * 2.0**-24 * 40)
  assert_same_bits(narrow, np.asarray(single).astype(BF16))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_are_independent(dtype):
  """At a fixed number of rows, a row's bits follow it to any place."""
  x, w = random((33, 96), 7, dtype), random((96, 50), 8, dtype)
  straight = np.asarray(product(x, w))
  rng = np.random.default_rng(9)
  for _ in range(5):
    order = rng.permutation(33)
    assert_same_bits(product(x[order], w), straight[order])
  # The other rows' content does not matter, were it not a number.
  other = np.full_like(x, np.nan)
  for row in (0, 15, 32):
    other[row] = x[row]
    assert_same_bits(product(other, w)[row], straight[row])


def test_leading_axes_are_rows():
  x, w = random((2, 3, 4, 16), 10), random((16, 5), 11)
  flat = product(x.reshape(24, 16), w)
  assert_same_bits(product(x, w), np.asarray(flat).reshape(2, 3, 4, 5))


@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("out", [np.float32, BF16], ids=["to f32", "to bf16"])
@pytest.mark.parametrize(
  ("kind", "of_w"), [(np.float32, np.float32), (BF16, BF16), (BF16, np.float32)]
)
def test_matmul_equals_float64(kind, of_w, out, by_feature):
  """Also bf16 rows with float32 weights, as of a router."""
  x, w = random((2, 9, 70), 12, kind), random((70, 13), 13, of_w)
  run = jax.jit(functools.partial(matmul, out_dtype=out, by_feature=by_feature))
  got = run(x, w.T.copy() if by_feature else w)
  assert got.dtype == out
  products.check(got, *products.rounded(*products.sums(x, w), out))


@dtypes
def test_gated_matmul_equals_float64(dtype):
  x, w = random((2, 9, 70), 14, dtype), random((70, 26), 15) / 8
  got = jax.jit(gated_matmul)(x, w.astype(dtype))
  assert got.dtype == dtype
  products.check(got, *products.gated(x, w.astype(dtype), dtype))


@dtypes
def test_head_matmul_equals_float64(dtype):
  x, w = random((2, 9, 3, 24), 16, dtype), random((3, 20, 5), 17, dtype)
  x[..., 20:] = np.nan  # Not read.
  got = jax.jit(head_matmul)(x, w)
  assert got.shape == (2, 9, 3, 5) and got.dtype == dtype
  for head in range(3):
    value, bound = products.sums(x[:, :, head, :20], w[head])
    products.check(got[:, :, head], *products.rounded(value, bound, dtype))


@dtypes
def test_rows_of_the_others_are_independent(dtype):
  x, w = random((17, 3, 32), 18, dtype), random((3, 32, 24), 19, dtype)
  order = np.random.default_rng(20).permutation(17)
  for run, rows, weights in (
    (jax.jit(head_matmul), x, w),
    (jax.jit(gated_matmul), x[:, 0], w[0]),
  ):
    straight = np.asarray(run(rows, weights))
    assert_same_bits(run(rows[order], weights), straight[order])


def test_silu_is_that_of_the_rounded_gate():
  """256 + 1 is 256 in bf16: a gate that is not rounded would be 257."""
  x = np.array([[1, 1]], BF16)
  w = np.array([[256, 1], [1, 0]], BF16)
  assert float(jax.jit(gated_matmul)(x, w)[0, 0]) == 256
  assert float(jax.jit(matmul)(x, w)[0, 0]) == 256
  assert float(matmul(x, w, out_dtype=np.float32)[0, 0]) == 257


def test_vmap_is_one_by_one():
  x, w = random((4, 6, 16), 21), random((4, 16, 8), 22)
  heads = random((4, 6, 2, 16), 23), random((4, 2, 16, 8), 24)
  for op, arguments in ((matmul, (x, w)), (gated_matmul, (x, w)), (head_matmul, heads)):
    got = jax.jit(jax.vmap(lambda x, w, op=op: op(x, w)))(*arguments)
    want = [jax.jit(op)(*(a[i] for a in arguments)) for i in range(4)]
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-5, atol=1e-5)


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
  return np.zeros(shape, dtype)


half = functools.partial(zeros, dtype=np.float16)
narrow = functools.partial(zeros, dtype=BF16)


@pytest.mark.parametrize(
  ("op", "x", "w", "more", "says"),
  [
    (matmul, half(2, 4), zeros(4, 3), {}, "x is float16; it must be float32 or"),
    (matmul, zeros(2, 4), zeros(4), {}, r"w must have 2 axes.* float32 \[4\]"),
    (matmul, zeros(2, 4), zeros(4, 0), {}, r"w must have 2 axes.* float32 \[4, 0\]"),
    (matmul, zeros(2, 4), narrow(4, 3), {}, "w must .* in float32 .* it is bfloat16"),
    (matmul, zeros(2, 5), zeros(4, 3), {}, r"x \[2, 5\] must be \[..., 4\] to fit w"),
    (matmul, zeros(), zeros(4, 3), {}, r"x \[\] must be"),
    (matmul, zeros(2, 4), zeros(4, 3), {"by_feature": True}, r"x \[2, 4\] must be"),
    (
      matmul,
      zeros(2, 4),
      zeros(4, 3),
      {"out_dtype": "float16"},
      "out_dtype = 'float16'",
    ),
    (matmul, zeros(2, 4), zeros(4, 3), {"implementation": "x"}, "implementation = 'x'"),
    (gated_matmul, half(2, 4), half(4, 6), {}, "x is float16"),
    (gated_matmul, zeros(2, 4), zeros(4, 3), {}, r"w float32 \[4, 3\] must be .* 2F"),
    (gated_matmul, narrow(2, 4), zeros(4, 6), {}, "in the dtype of x, bfloat16"),
    (gated_matmul, zeros(2, 4), zeros(5, 6), {}, r"x \[2, 4\] must be \[..., 5\]"),
    (gated_matmul, zeros(2, 4), zeros(1, 4, 6), {}, "w must have 2 axes"),
    (head_matmul, zeros(2, 3, 4), zeros(3, 5, 6), {}, r"x .* \[..., 3, 5 or more\]"),
    (head_matmul, zeros(2, 2, 5), zeros(3, 5, 6), {}, r"x .* must be \[..., 3"),
    (head_matmul, zeros(5), zeros(3, 5, 6), {}, r"x float32 \[5\] must be"),
    (head_matmul, narrow(2, 3, 5), zeros(3, 5, 6), {}, "in the dtype of w, float32"),
    (head_matmul, zeros(2, 3, 5), zeros(5, 6), {}, "w must have 3 axes"),
  ],
)
def test_bad_arguments_are_named(op, x, w, more, says):
  with pytest.raises(ValueError, match=says):
    op(x, w, **more)


def call_in(text: str) -> tuple[str, dict[str, int], str]:
  """Target, attributes and types of the one custom call of a program for CUDA."""
  (line,) = [x for x in text.splitlines() if "stablehlo.custom_call" in x]
  (target,) = re.findall(r"custom_call @kdtree_jax\.(\w+)\(", line)
  attributes = dict(re.findall(r"(\w+) = (\d+) : i64", line))
  types = line.split(" : ")[-1].replace("tensor", "")
  return target, {k: int(v) for k, v in attributes.items()}, types


PLAIN = {"by_feature": 0, "gated": 0}


@pytest.mark.parametrize(
  ("f", "x", "w", "says"),
  [
    (matmul, (2, 3, 48), (48, 40), ("matmul", PLAIN, "<6x48> <48x40> <6x40>")),
    # K up to a multiple of 16, N of 8, in bf16 alone.
    (matmul, (6, 50), (50, 31), ("matmul", PLAIN, "<6x64> <64x32> <6x32>")),
    (
      functools.partial(matmul, by_feature=True),
      (6, 48),
      (31, 48),
      ("matmul", {"by_feature": 1, "gated": 0}, "<6x48> <31x48> <6x31>"),
    ),
    (
      gated_matmul,
      (6, 48),
      (48, 80),
      ("matmul", {"by_feature": 0, "gated": 1}, "<6x48> <48x80> <6x40>"),
    ),
    # Gate and up each; 80 columns would be no odd number either.
    (
      gated_matmul,
      (6, 50),
      (50, 40),
      ("matmul", {"by_feature": 0, "gated": 1}, "<6x64> <64x48> <6x24>"),
    ),
    (
      head_matmul,
      (2, 3, 5, 32),
      (5, 16, 8),
      ("head_matmul", {}, "<6x5x32> <5x16x8> <6x5x8>"),
    ),
    (
      head_matmul,
      (6, 5, 27),
      (5, 20, 9),
      ("head_matmul", {}, "<6x5x32> <5x32x16> <6x5x16>"),
    ),
  ],
)
def test_programs_for_cuda(f, x, w, says):
  """One call; nothing is copied where sizes are whole multiples, or in float32."""
  target, attributes, padded = says
  text = cuda_text(f, zeros(*x, dtype=BF16), zeros(*w, dtype=BF16))
  found = call_in(text)
  assert found[:2] == (target, attributes)
  assert re.findall(r"<[\dx]+(?=xbf16>)", found[2]) == [
    part.rstrip(">") for part in padded.split()
  ]
  whole = str(w[-1]) in padded and f"x{x[-1]}>" in padded
  assert ("stablehlo.pad" not in text) is whole
  text = cuda_text(f, zeros(*x), zeros(*w))
  assert call_in(text)[:2] == (target, attributes)
  for copy in ("pad", "slice", "concatenate", "convert", "transpose", "dot_general"):
    assert f"stablehlo.{copy}" not in text
  for implementation, count in (("xla", 0), ("cuda", 1)):
    form = functools.partial(f, implementation=implementation)
    assert cuda_text(form, zeros(*x), zeros(*w)).count("custom_call @kdtree") == count


def test_programs_for_cuda_of_mixed_dtypes():
  """A router's: no weight is rounded, no row widened beforehand."""
  f = functools.partial(matmul, out_dtype=jnp.float32)
  text = cuda_text(f, zeros(6, 50, dtype=BF16), zeros(50, 31))
  assert "(<6x50xbf16>, <50x31xf32>) -> <6x31xf32>" in call_in(text)[2]
  assert "stablehlo.convert" not in text and "stablehlo.pad" not in text


def test_cuda_needs_arrays_on_a_gpu():
  need_library()
  with jax.default_device(jax.devices("cpu")[0]):
    for op, w in ((matmul, zeros(4, 6)), (gated_matmul, zeros(4, 6))):
      with pytest.raises(NotImplementedError, match="needs its arrays on an NVIDIA"):
        op(zeros(2, 4), w, "cuda")
