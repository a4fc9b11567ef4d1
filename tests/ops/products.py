"""What the tests of matrix products share: float64 results, bounds, rows in company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tests.ops.custom_calls import assert_same_bits

BF16 = ml_dtypes.bfloat16
F32 = np.dtype(np.float32)

# Half a unit in the last place, relative to the value.
HALF_ULP = {np.dtype(BF16): 2.0**-8, F32: 2.0**-24}


def normal(rng: np.random.Generator, *shape: int, dtype: Any = F32) -> np.ndarray:
  return rng.normal(size=shape).astype(dtype)


def whole(rng: np.random.Generator, *shape: int, dtype: Any = F32) -> np.ndarray:
  """Integers of up to 8: sums of up to 2^18 of their products are exact in fp32."""
  return rng.integers(-8, 9, shape).astype(dtype)


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
  return [np.asarray(x).astype(np.float64) for x in arrays]


def sums(
  x: np.ndarray, w: np.ndarray, slack: Any = 0.0
) -> tuple[np.ndarray, np.ndarray]:
  """`x @ w` in float64, and what a sum in fp32 may differ by.

  A sum of K terms in fp32, in any order, is wrong by less than K 2^-23 of the sum of
  their sizes: twice the unit roundoff, since tensor cores cut bits off.

  Args:
    x: [..., K], and `slack` what it may differ by itself.
    w: [K, N], exact.
  """
  x, w = wide(x, w)
  sizes = (np.abs(x) + slack) @ np.abs(w)
  return x @ w, x.shape[-1] * 2.0**-23 * sizes + np.asarray(slack + 0 * x) @ np.abs(w)


def rounded(
  value: np.ndarray, bound: np.ndarray, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
  """The same after one rounding to a dtype."""
  return value, bound + HALF_ULP[np.dtype(dtype)] * (np.abs(value) + bound)


def gated(
  x: np.ndarray, gate_and_up: np.ndarray, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
  """silu(gate) * up in float64 and its bound; each step is rounded to the dtype."""
  both = rounded(*sums(x, gate_and_up), dtype)
  (gate, up), (dgate, dup) = (np.split(part, 2, axis=-1) for part in both)
  sigmoid = 1 / (1 + np.exp(-gate))
  silu = gate * sigmoid
  # The slope of silu lies within -0.1 and 1.1; exp, sum and quotient in fp32 are wrong
  # by some units of the last place each.
  silu, dsilu = rounded(silu, 1.1 * dgate + 2.0**-20 * np.abs(silu), dtype)
  product = np.abs(silu) * dup + np.abs(up) * dsilu + dsilu * dup
  return rounded(silu * up, product, dtype)


def check(got: Any, value: np.ndarray, bound: np.ndarray) -> None:
  got = np.asarray(got).astype(np.float64)
  assert got.shape == value.shape
  worst = np.max(np.abs(got - value) / (bound + 1e-300), initial=0)
  assert worst <= 1, f"{worst} times the bound"


def in_company(
  f: Callable[..., Any], parts: Sequence[Any], *shared: Any
) -> tuple[Any, ...]:
  """`f(part, *shared)` for each part, in one program that holds nothing else."""

  @jax.jit
  def run(parts, shared):
    return [f(part, *shared) for part in parts]

  return tuple(jax.device_get(run(list(parts), shared)))


def check_every_number_of_rows(
  f: Callable[..., Any], x: np.ndarray, *shared: Any
) -> np.ndarray:
  """Rows have their bits in every company: the last 1 .. all, others' places, many.

  Returns:
    `f(x, *shared)`.
  """
  M = len(x)
  order = np.random.default_rng(1).permutation(M)
  many = np.arange(13 * M + 5) % M
  places = [np.arange(M)[-n:] for n in range(1, M + 1)] + [order, many]
  found = in_company(f, [x[rows] for rows in places], *shared)
  everything = found[M - 1]
  for rows, some in zip(places, found, strict=True):
    assert_same_bits(everything[rows], some, f"of {len(rows)} rows,")
  return everything
