"""What the golden cases of matrix products share: operands, float64 sums, bounds."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.reference.int4 import dequantize_int4, pack_int4

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)

# Half a unit in the last place, relative to the value.
HALF_ULP = {BF16: 2.0**-8, F32: 2.0**-24}

# A result in float64, and how far from it a kernel may be.
Bounded = tuple[np.ndarray, np.ndarray]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
  """Numbers of size 1."""
  return rng.standard_normal(shape)


def whole(rng: np.random.Generator, *shape: int) -> np.ndarray:
  """Integers of up to 8: sums of up to 2^18 of their products are exact in float32."""
  return rng.integers(-8, 9, shape).astype(np.float64)


def tiles(
  rng: np.random.Generator,
  groups: int,
  depth: int,
  features: int,
  *,
  gated: bool = False,
  exact: bool = False,
) -> np.ndarray:
  """Random int4 weights: u8 [groups, ceil(N / 16), ceil(K / 64), 576].

  They are about as large as makes sums of `depth` terms 1; with `exact`, multiples of
  1/2 up to 16, whose sums with `whole` rows are exact.
  """
  made = []
  for _ in range(groups):
    values = rng.integers(-8, 8, (features, depth))
    scales = rng.uniform(0.5, 1.5, (features, depth // 32)) * depth**-0.5 / 4.6
    if exact:
      scales = rng.choice([0.5, 1.0, 2.0], scales.shape)
    made.append(pack_int4(values, scales.astype(BF16), gated))
  return np.stack(made)


def dequantized(
  packed: np.ndarray, depth: int, features: int, dtype: np.dtype, gated: bool = False
) -> np.ndarray:
  """The weights [G, K, N] that rows of a dtype meet."""
  groups = [dequantize_int4(group, depth, features, gated, dtype) for group in packed]
  return np.stack(groups)


def sums(x: np.ndarray, w: np.ndarray, slack: np.ndarray | float = 0.0) -> Bounded:
  """`x @ w`, where x may differ by `slack`.

  A sum of K terms in float32, in any order, is wrong by less than K 2^-23 of the sum
  of their sizes: twice the unit roundoff, since tensor cores cut bits off.

  Args:
    x: [M, K].
    w: [K, N], exact.
    slack: [M, K].
  """
  x, w = x.astype(np.float64), w.astype(np.float64)
  sizes = (np.abs(x) + slack) @ np.abs(w)
  spread = np.broadcast_to(slack, x.shape) @ np.abs(w)
  return x @ w, x.shape[-1] * 2.0**-23 * sizes + spread


def rounded(value: np.ndarray, bound: np.ndarray, dtype: np.dtype) -> Bounded:
  """The same after one rounding to a dtype."""
  return value, bound + HALF_ULP[dtype] * (np.abs(value) + bound)


def gated(x: np.ndarray, gate_and_up: np.ndarray, dtype: np.dtype) -> Bounded:
  """silu(gate) * up, where each step is rounded to the dtype.

  The slope of silu lies within -0.1 and 1.1; exponential, sum and quotient in float32
  are wrong by some units of the last place each, 16 u in all.
  """
  value, bound = rounded(*sums(x, gate_and_up), dtype)
  gate, up = np.split(value, 2, axis=-1)
  gate_off, up_off = np.split(bound, 2, axis=-1)
  silu = gate / (1 + np.exp(-gate))
  silu, off = rounded(silu, 1.1 * gate_off + 2.0**-20 * np.abs(silu), dtype)
  product = np.abs(silu) * up_off + np.abs(up) * off + off * up_off
  return rounded(silu * up, product, dtype)
