"""The custom call of matmul_chain: the bits of its ops, at every number of rows.

Its kernels start before the one before has ended. A read that came too early would see
what the call before left in memory: so each number of rows is replayed with other rows
in between.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.ops.matmul_chain import _one_by_one
from tests.ops.custom_calls import assert_same_bits, replayed

pytestmark = pytest.mark.gpu

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 160)


def chains(dtype: Any) -> dict[str, tuple[int, list[tuple[Any, ...]]]]:
  """Width of the rows, and steps without residuals."""
  rng = np.random.default_rng(0)

  def draw(*shape: int) -> jax.Array:
    fan_in = shape[-2] if len(shape) > 1 else 1
    return jnp.asarray(rng.normal(size=shape) * fan_in**-0.5, dtype)

  return {
    # As an attention layer's queries: K in eight parts, then in one.
    "queries": (
      2048,
      [
        ("matmul", draw(2048, 384)),
        ("rms_norm", draw(384), 1e-6),
        ("matmul", draw(384, 16 * 48)),
        ("head_matmul", draw(16, 32, 128)),
      ],
    ),
    "output": (
      16 * 128,
      [
        ("head_matmul", draw(16, 128, 32)),
        ("matmul", draw(512, 2048)),
        ("add_rms_norm", None, draw(2048), 1e-5),
      ],
    ),
    "swiglu": (2048, [("gated_matmul", draw(2048, 512)), ("matmul", draw(256, 2048))]),
    "norms": (
      256,
      [
        ("add_rms_norm", None, draw(256), 1e-5),
        ("rms_norm", draw(256), 1e-6),
        ("gated_matmul", draw(256, 8192)),
        ("matmul", draw(4096, 64)),
        ("rms_norm", draw(64), 1e-6),
      ],
    ),
  }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["queries", "output", "swiglu", "norms"])
def test_the_bits_of_the_ops_one_by_one(name, dtype):
  width, steps = chains(dtype)[name]
  rng = np.random.default_rng(1)
  for rows in ROWS:
    x, h = (
      jnp.asarray(rng.normal(size=(2, rows, w)), dtype)
      for w in (width, {"output": 2048}.get(name, width))
    )

    def with_residual(h, steps=steps):
      return [(s[0], h, *s[2:]) if s[0] == "add_rms_norm" else s for s in steps]

    def run(x, h):
      return ops.matmul_chain(x, with_residual(h), "cuda")

    def apart(x, h):
      chain = with_residual(h)
      names = [s[0] for s in chain]
      arrays = [s[1:-1] if "norm" in s[0] else s[1:] for s in chain]
      eps = [s[-1] if "norm" in s[0] else 0.0 for s in chain]
      return tuple(_one_by_one(names, eps, "cuda", x, arrays))

    want = jax.jit(jax.vmap(lambda x, h: (x, h)))(x, h)  # Two sets of rows.
    chained, alone = jax.jit(run), jax.jit(apart)
    sets = [(want[0][i], want[1][i]) for i in range(2)]
    expected = [jax.device_get(alone(*s)) for s in sets]
    for _ in range(4):
      for s, e in zip(sets, expected, strict=True):
        assert_same_bits(e, jax.device_get(chained(*s)), f"{rows} rows")
    if rows in (1, 17):
      assert_same_bits(expected[0], replayed(run)(*sets[0]), f"{rows} rows, replayed")


def test_no_rows():
  width, steps = chains(BF16)["swiglu"]
  got = functools.partial(ops.matmul_chain, implementation="cuda")(
    jnp.zeros((3, 0, width), BF16), steps
  )
  assert [o.shape for o in got] == [(3, 0, 256), (3, 0, 2048)]
