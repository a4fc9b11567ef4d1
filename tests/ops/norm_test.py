from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.ops import _library
from tests.ops.custom_calls import assert_same_bits, cuda_text

U = 2.0**-24


def draw(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
  return np.asarray(jnp.asarray(rng.normal(size=shape), dtype))


def check(got: Any, x: np.ndarray, weight: np.ndarray, eps: float, sums: int) -> None:
  """Holds an RMSNorm to float64.

  With u = 2^-24: `sums` roundings of the sum of squares, then the division and the sum
  with eps; half of it of the root. That is rounded itself (to 2 u where it is not the
  nearest), as is the product with it; one more is for second-order terms. Then the
  value is rounded to its dtype, and so is its product with the weight.
  """
  off = ((sums + 2) / 2 + 4) * U
  wide, w = x.astype(np.float64), weight.astype(np.float64)
  mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
  normed = wide / np.sqrt(mean_square + float(np.float32(eps)))
  assert got.dtype == x.dtype and got.shape == x.shape
  have = np.asarray(got).astype(np.float64)
  if x.dtype == np.float32:
    exact = normed * w
    assert np.all(np.abs(have - exact) <= (off + U) * np.abs(exact) + 2.0**-148)
    return

  def rounded(value: np.ndarray) -> np.ndarray:
    once = value.astype(np.float32).astype(x.dtype).astype(np.float32)
    # Exact in float32: 8 bits by 8 bits.
    return (once * weight.astype(np.float32)).astype(x.dtype).astype(np.float64)

  # Both roundings keep the order of values, so the result lies between those of the
  # two ends of what the normed value may be: most often that is one number.
  ends = [rounded(normed * (1 + s * off)) for s in (-1, 1)]
  assert np.all((np.minimum(*ends) <= have) & (have <= np.maximum(*ends)))


def added(h: np.ndarray, out: np.ndarray) -> np.ndarray:
  """The sum, rounded once; in float32 it is exact where the operands are bf16."""
  return (
    (h.astype(np.float64) + out.astype(np.float64)).astype(np.float32).astype(h.dtype)
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_equals_float64(width, dtype):
  rng = np.random.default_rng(width)
  h, out = draw(rng, 2, 5, width, dtype=dtype), draw(rng, 2, 5, width, dtype=dtype)
  weight = draw(rng, width, dtype=dtype)

  @jax.jit
  def run(h, out, weight):
    return ops.rms_norm(h, weight, 1e-5), ops.add_rms_norm(h, out, weight, 1e-5)

  alone, (total, normed) = run(h, out, weight)
  # In no known order: as many roundings as there are squares, and one of each.
  check(alone, h, weight, 1e-5, sums=width + 1)
  check(normed, np.asarray(total), weight, 1e-5, sums=width + 1)
  assert_same_bits(added(h, out), total)


def test_the_sum_in_bf16_is_rounded_before_the_norm():
  """256 + 1 is 256: the norm sees no 1."""
  h = np.full((1, 8), 256, jnp.bfloat16)
  out = np.full((1, 8), 1, jnp.bfloat16)
  out[0, 0] = 4  # 260
  total, normed = jax.jit(ops.add_rms_norm, static_argnames="eps")(
    h, out, np.ones(8, jnp.bfloat16), eps=1e-5
  )
  assert np.asarray(total).astype(int).tolist() == [[260, *[256] * 7]]
  check(normed, np.asarray(total), np.ones(8, jnp.bfloat16), 1e-5, sums=9)


def test_the_derivative_is_that_of_its_parts():
  rng = np.random.default_rng(3)
  h, out = draw(rng, 4, 9, dtype="float32"), draw(rng, 4, 9, dtype="float32")
  weight, seed = draw(rng, 9, dtype="float32"), draw(rng, 4, 9, dtype="float32")

  def fused(h, out, weight):
    total, normed = ops.add_rms_norm(h, out, weight, 1e-5)
    return jnp.sum(seed * (jnp.sin(total) + normed))

  def parts(h, out, weight):
    total = h + out
    scale = 1 / jnp.sqrt(jnp.mean(total**2, -1, keepdims=True) + 1e-5)
    return jnp.sum(seed * (jnp.sin(total) + total * scale * weight))

  grads = [
    jax.jit(jax.grad(f, argnums=(0, 1, 2)))(h, out, weight) for f in (fused, parts)
  ]
  for one, other in zip(*grads, strict=True):
    # Sums of up to 9 terms of size 1, some ten roundings each.
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_errors_name_the_argument(monkeypatch: pytest.MonkeyPatch):
  x, weight = jnp.zeros((2, 4)), jnp.zeros(4)
  for bad in (jnp.zeros(()), jnp.zeros((2, 0)), jnp.zeros((2, 4), jnp.int32)):
    with pytest.raises(ValueError, match=r"^x .* must be floating .* D >= 1"):
      ops.rms_norm(bad, weight, 1e-5)
    with pytest.raises(ValueError, match=r"^h .* must be floating .* D >= 1"):
      ops.add_rms_norm(bad, bad, weight, 1e-5)
  with pytest.raises(ValueError, match=r"weight is float32 \(3,\); with x float32"):
    ops.rms_norm(x, weight[1:], 1e-5)
  with pytest.raises(ValueError, match=r"weight is bfloat16 .* must be float32 \(4,\)"):
    ops.add_rms_norm(x, x, weight.astype(jnp.bfloat16), 1e-5)
  with pytest.raises(ValueError, match=r"out float32 \(1, 4\) must have shape .* of h"):
    ops.add_rms_norm(x, x[:1], weight, 1e-5)
  with pytest.raises(ValueError, match=r"out bfloat16 .* dtype of h float32"):
    ops.add_rms_norm(x, x.astype(jnp.bfloat16), weight, 1e-5)
  monkeypatch.setattr(_library, "why_not", lambda: None)
  half, ones = x.astype(jnp.float16), weight.astype(jnp.float16)
  with pytest.raises(ValueError, match="'cuda' of rms_norm: x is float16; .* float32"):
    ops.rms_norm(half, ones, 1e-5, implementation="cuda")
  assert ops.rms_norm(half, ones, 1e-5).dtype == jnp.float16


def test_the_programs_for_cuda_hold_the_calls():
  x, weight = jnp.zeros((2, 3, 50), jnp.bfloat16), jnp.zeros(50, jnp.bfloat16)
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):

    def run(x, weight, i=implementation):
      one = ops.rms_norm(x, weight, 1e-5, implementation=i)
      return one, ops.add_rms_norm(x, one, weight, 1e-6, implementation=i)

    text = cuda_text(run, x, weight)
    for op in ("rms_norm", "add_rms_norm"):
      assert text.count(f"@kdtree_jax.{op}(") == expected
    if expected:
      assert "eps = 1.000000e-05 : f64" in text and "(tensor<6x50xbf16>" in text
