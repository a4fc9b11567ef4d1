"""Golden cases of `rope`: tables, frequencies, both forms of pairs, long contexts."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.config import YarnConfig
from kdtree_jax.reference.golden.case import GoldenCase, bits
from kdtree_jax.reference.rope import AngleDtype, inverse_frequencies, rope_rows, rotate

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)

# Kimi K2's, whose context this is.
LAST = 262_143
YARN = YarnConfig(
  factor=64.0,
  original_max_position_embeddings=4096,
  beta_fast=32.0,
  beta_slow=1.0,
  mscale=1.0,
  mscale_all_dim=1.0,
)


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Angles from tables and from frequencies, in both dtypes.

  Args:
    rng: source of randomness.
    small: fewer tokens.
  """
  made = []
  for dtype in (F32, BF16):
    for interleave in (False, True):
      name = f"{dtype.name}, {'interleaved' if interleave else 'half-split'}"
      made += [
        _table(f"{name}, table", rng, dtype, interleave, tokens=9, heads=3, width=16),
        _frequencies(f"{name}, plain", rng, dtype, interleave, tokens=17, yarn=None),
        _frequencies(f"{name}, yarn", rng, dtype, interleave, tokens=17, yarn=YARN),
      ]
  made += [
    _frequencies("float32 angles", rng, F32, True, 17, YARN, angles="float32"),
    _frequencies("amplitude", rng, F32, False, 17, YARN, amplitude=1.2079441541679836),
    _frequencies("behind copied columns", rng, BF16, True, 7, YARN, heads=4, copied=64),
    _frequencies("odd copied columns", rng, F32, False, 5, None, heads=3, copied=7),
    _table("one pair", rng, F32, True, tokens=5, heads=1, width=2),
    _table("no token", rng, F32, True, tokens=0, heads=2, width=8),
  ]
  if not small:
    # All pairs at positions from the whole context: many angles in one case.
    made += [
      _frequencies("context, plain", rng, F32, False, 400, None),
      _frequencies("context, yarn", rng, F32, False, 400, YARN),
      _frequencies("context, float32", rng, F32, False, 400, YARN, angles="float32"),
    ]
    made.append(_frequencies("queries", rng, BF16, True, 8, YARN, heads=16, copied=512))
  return made


def _features(
  rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
  x = rng.standard_normal(shape)
  # Zeros of either sign, large and tiny numbers.
  rare = rng.random(shape)
  x[rare < 0.02] *= 0.0
  x[(rare > 0.02) & (rare < 0.04)] *= 1e30
  x[(rare > 0.04) & (rare < 0.06)] *= 1e-30
  return x.astype(dtype)


def _table(
  name: str,
  rng: np.random.Generator,
  dtype: np.dtype,
  interleave: bool,
  tokens: int,
  heads: int,
  width: int,
) -> GoldenCase:
  """Angles from tables, as a caller makes them."""
  length = 40
  cos, sin = rope_rows(np.arange(length), width, 10000.0, None)
  positions = rng.integers(length, size=tokens).astype(np.int32)
  positions[:2] = (0, length - 1)[: len(positions)]
  x = _features(rng, (tokens, heads, width), dtype)
  outputs = {"out": rotate(x, cos[positions], sin[positions], interleave)}
  return GoldenCase(
    op="rope",
    name=name,
    attributes={"interleave": interleave},
    inputs={"x": x, "positions": positions, "cos": cos, "sin": sin},
    outputs=outputs,
    compare=bits(outputs),
  )


def _frequencies(
  name: str,
  rng: np.random.Generator,
  dtype: np.dtype,
  interleave: bool,
  tokens: int,
  yarn: YarnConfig | None,
  *,
  heads: int = 1,
  copied: int = 0,
  angles: AngleDtype = "float64",
  amplitude: float = 1.0,
) -> GoldenCase:
  """Angles formed by the kernel; `copied` columns lie in front of the rotated ones."""
  width, theta = 64, 50000.0
  positions = rng.integers(LAST, size=tokens).astype(np.int32)
  positions[:5] = (0, 1, 4095, LAST // 2, LAST)
  frequencies = inverse_frequencies(width, theta, yarn, angles)
  cos, sin = rope_rows(positions, width, theta, yarn, angles, amplitude)
  x = _features(rng, (tokens, heads, width), dtype)
  out = rotate(x, cos, sin, interleave)
  inputs = {"x": x, "positions": positions}
  if copied:
    inputs["copied"] = _features(rng, (tokens, heads, copied), dtype)
    out = np.concatenate([inputs["copied"], out], axis=-1)
  inputs["frequencies"] = frequencies.astype(np.float64)
  outputs = {"out": out}
  return GoldenCase(
    op="rope",
    name=name,
    attributes={
      "interleave": interleave,
      "length": LAST + 1,
      "float32_angles": angles == "float32",
      "amplitude": amplitude,
    },
    inputs=inputs,
    outputs=outputs,
    compare=bits(outputs),
  )
