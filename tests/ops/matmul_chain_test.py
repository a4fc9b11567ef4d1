"""Chains of products and norms: equal to their ops, errors, the custom call's text."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.custom_calls import assert_same_bits, cuda_text

BF16, F32 = jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(0)


def draw(*shape: int, dtype: Any = F32) -> np.ndarray:
  return RNG.normal(size=shape).astype(dtype)


def steps(dtype: Any) -> list[tuple[Any, ...]]:
  """Each kind of step, on rows [2, 3, 16]."""
  return [
    ("gated_matmul", draw(16, 64, dtype=dtype)),
    ("matmul", draw(32, 48, dtype=dtype)),
    ("rms_norm", draw(48, dtype=dtype), 1e-6),
    ("head_matmul", draw(3, 16, 16, dtype=dtype)),
    ("add_rms_norm", draw(2, 3, 48, dtype=dtype), draw(48, dtype=dtype), 1e-5),
    ("matmul", draw(48, 8, dtype=dtype)),
  ]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_chain_is_its_ops_one_by_one(dtype):
  x, chain = draw(2, 3, 16, dtype=dtype), steps(dtype)

  @jax.jit
  def one_by_one(x):
    gated = ops.gated_matmul(x, chain[0][1], "xla")
    out = ops.matmul(gated, chain[1][1], "xla")
    normed = ops.rms_norm(out, *chain[2][1:], "xla")
    heads = ops.head_matmul(normed.reshape(2, 3, 3, 16), chain[3][1], "xla")
    h, weight, eps = chain[4][1:]
    total, again = ops.add_rms_norm(h, heads.reshape(2, 3, 48), weight, eps, "xla")
    return (
      gated,
      out,
      normed,
      heads,
      total,
      again,
      ops.matmul(again, chain[5][1], "xla"),
    )

  got = jax.jit(lambda x: ops.matmul_chain(x, chain))(x)
  assert [o.shape for o in got] == [
    (2, 3, 32),
    (2, 3, 48),
    (2, 3, 48),
    (2, 3, 3, 16),
    (2, 3, 48),
    (2, 3, 48),
    (2, 3, 8),
  ]
  assert_same_bits(one_by_one(x), got)


def test_columns_that_a_head_does_not_read():
  x, w = draw(5, 2 * 7), draw(2, 4, 3)
  (got,) = ops.matmul_chain(x, [("head_matmul", w)])
  assert_same_bits(ops.head_matmul(x.reshape(5, 2, 7), w), got)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (16,)])
def test_no_row_and_one_row_without_an_axis(shape):
  got = ops.matmul_chain(
    draw(*shape), [("matmul", draw(16, 8)), ("matmul", draw(8, 4))]
  )
  assert [o.shape for o in got] == [(*shape[:-1], 8), (*shape[:-1], 4)]


def test_no_row_through_each_kind_of_step():
  chain = [
    s if s[0] != "add_rms_norm" else (s[0], s[1][:0], *s[2:]) for s in steps(F32)
  ]

  def run(x):
    return ops.matmul_chain(x, chain)

  x = draw(0, 3, 16)
  for got in (run(x), jax.jit(run)(x)):  # The program for CUDA is traced, too.
    assert [o.shape[0] for o in got] == [0] * 7


W = draw(16, 8)
ONES = np.ones(16, np.float32)


@pytest.mark.parametrize(
  ("chain", "message"),
  [
    ([], "steps must be a sequence of 1 or more"),
    ("matmul", "steps must be a sequence of 1 or more"),
    (
      [("product", W)],
      r"steps\[0\] is 'product'; it must begin with one of \('matmul'",
    ),
    ([("matmul", W), W], r"steps\[1\] is of ndarray; it must begin with one"),
    ([("matmul",)], r"steps\[0\] has 0 operands; 'matmul' takes w"),
    ([("rms_norm", ONES)], r"steps\[0\] has 1 operands; 'rms_norm' takes weight, eps"),
    ([("rms_norm", ONES, "a")], "eps = 'a' is not allowed"),
    ([("matmul", draw(15, 8))], r"x \[2, 16\] must be \[..., 15\] to fit w"),
    ([("matmul", W), ("matmul", W)], r"x \[2, 8\] must be \[..., 16\] to fit w"),
    ([("head_matmul", draw(3, 5, 2))], r"x float32 \[2, 16\] must be \[..., 3, 5"),
    (
      [("add_rms_norm", W, ONES, 1e-6)],
      r"h of 'add_rms_norm' is \[16, 8\]; it must be as the rows, \[2, 16\]",
    ),
    ([("matmul", W.astype(BF16))], r"w of steps\[0\] is bfloat16; .* of x, float32"),
    ([("matmul", W[0])], "w must have 2 axes, none empty"),
    ([("matmul", W[:, :0])], "w must have 2 axes, none empty"),
    ([("head_matmul", W)], "w must have 3 axes, none empty"),
    ([("rms_norm", W, 1e-6)], r"weight is float32 \(16, 8\)"),
    ([("gated_matmul", W[:, :7])], r"w float32 \[16, 7\] must be \[K, 2F\]"),
  ],
)
def test_what_no_chain_is(chain, message):
  with pytest.raises(ValueError, match=message):
    ops.matmul_chain(draw(2, 16), chain)


@pytest.mark.parametrize("implementation", ["xla", "cuda"])
def test_either_form_refuses_the_same(implementation):
  def chain(*steps):
    return lambda x: ops.matmul_chain(x, steps, implementation)

  with pytest.raises(ValueError, match=r"x \[2, 8\] must be \[..., 16\] to fit w"):
    cuda_text(chain(("matmul", W), ("matmul", W)), draw(2, 16))
  with pytest.raises(ValueError, match=r"x must be .* it is int32 \[2, 16\]"):
    cuda_text(chain(("matmul", W)), np.ones((2, 16), np.int32))


def test_one_dtype_throughout():
  """A product of bf16 rows with f32 weights exists, but not within a chain."""
  with pytest.raises(ValueError, match=r"w of steps\[0\] is float32; .* x, bfloat16"):
    ops.matmul_chain(draw(2, 16, dtype=BF16), [("matmul", W)])


def test_the_program_for_cuda_has_one_call():
  x, chain = draw(2, 3, 16, dtype=BF16), steps(BF16)
  text = cuda_text(lambda x: ops.matmul_chain(x, chain, "cuda"), x)
  assert text.count("stablehlo.custom_call @kdtree_jax.") == 1
  assert "kinds = dense<[1, 0, 3, 2, 4, 0]> : tensor<6xi64>" in text
  (eps,) = re.findall(r"eps = dense<\[(.*?)\]> : tensor<6xf64>", text)
  assert [float(e) for e in eps.split(",")] == [0, 0, 1e-6, 0, 1e-5, 0]
  assert (
    "tensor<6x32xbf16>, tensor<6x48xbf16>, tensor<6x48xbf16>, tensor<6x3x16xbf16>"
    in (text)
  )


def test_sizes_that_the_call_does_not_take_are_calls_of_their_own():
  """bf16 kernels are padded to whole multiples, so each product has its own call."""
  x = draw(4, 20, dtype=BF16)
  chain = [("matmul", draw(20, 6, dtype=BF16)), ("matmul", draw(6, 4, dtype=BF16))]
  text = cuda_text(lambda x: ops.matmul_chain(x, chain, "cuda"), x)
  assert text.count("stablehlo.custom_call @kdtree_jax.matmul(") == 2
  assert "matmul_chain" not in text
