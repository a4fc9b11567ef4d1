"""Golden cases of `rope_keys`, with the error that each normed feature may have."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.config import YarnConfig
from kdtree_jax.reference.golden.case import GoldenCase, rounded_up
from kdtree_jax.reference.golden.rope import LAST, YARN
from kdtree_jax.reference.rope import AngleDtype, inverse_frequencies, rope_rows, rotate

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
U = 2.0**-24  # unit roundoff of float32
EPS = 1e-6


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Latents of all widths, angles from tables and from frequencies.

  Args:
    rng: source of randomness.
    small: fewer tokens.
  """
  made = []
  for dtype in (F32, BF16):
    for interleave in (False, True):
      name = f"{dtype.name}, {'interleaved' if interleave else 'half-split'}"
      made += [
        _case(f"{name}, table", rng, dtype, interleave, 9, 24, 16),
        _case(f"{name}, plain", rng, dtype, interleave, 5, 64, 64, from_table=False),
        _case(
          f"{name}, yarn", rng, dtype, interleave, 5, 512, 64, YARN, from_table=False
        ),
      ]
    # Widths that fill no pack, that fill packs but no chunk, and two chunks a thread.
    made += [
      _case(f"{dtype.name}, one feature, one pair", rng, dtype, True, 3, 1, 2),
      _case(f"{dtype.name}, odd widths", rng, dtype, False, 3, 7, 6),
      _case(f"{dtype.name}, half a chunk", rng, dtype, True, 3, 36, 12),
      _case(f"{dtype.name}, wide", rng, dtype, True, 3, 1100, 40),
      _case(f"{dtype.name}, 128 pairs", rng, dtype, True, 2, 40, 256),
      _case(f"{dtype.name}, not finite", rng, dtype, True, 6, 64, 16, finite=False),
    ]
  made += [
    _case("large eps", rng, F32, True, 5, 24, 16, eps=0.1),
    _case("float32 angles", rng, F32, True, 5, 16, 64, YARN, False, angles="float32"),
    _case("amplitude", rng, F32, True, 5, 16, 64, YARN, False, amplitude=0.75),
    _case("no token", rng, F32, True, 0, 24, 16),
  ]
  if not small:
    for dtype in (F32, BF16):
      made += [
        _case(f"{dtype.name}, Kimi's", rng, dtype, True, 200, 512, 64, YARN, False),
        _case(f"{dtype.name}, 2048 features", rng, dtype, True, 20, 2048, 64),
        *(
          _random(f"{dtype.name}, random {i}", rng, dtype, i % 2 == 0)
          for i in range(10)
        ),
      ]
  return made


def _random(
  name: str, rng: np.random.Generator, dtype: np.dtype, interleave: bool
) -> GoldenCase:
  latent, width = int(rng.integers(1, 700)), 2 * int(rng.integers(1, 129))
  return _case(name, rng, dtype, interleave, 8, latent, width)


def _case(
  name: str,
  rng: np.random.Generator,
  dtype: np.dtype,
  interleave: bool,
  tokens: int,
  latent: int,
  width: int,
  yarn: YarnConfig | None = None,
  from_table: bool = True,
  *,
  angles: AngleDtype = "float64",
  amplitude: float = 1.0,
  eps: float = EPS,
  finite: bool = True,
) -> GoldenCase:
  """Rows of several magnitudes, positions at both ends among them."""
  length, theta = (40 if from_table else LAST + 1), 50000.0
  positions = rng.integers(length, size=tokens).astype(np.int32)
  positions[:3] = (0, length - 1, length // 2)[:tokens]
  kv = rng.standard_normal((tokens, latent + width))
  kv *= np.resize([1.0, 1e-3, 0.0, 100.0, 1e15], (tokens, 1))
  kv = kv.astype(dtype)
  if not finite:
    kv[0, 3], kv[1, latent + 1], kv[2, 5:7] = np.nan, np.nan, (np.inf, np.nan)
    kv[3, latent - 1], kv[4, -1] = np.inf, -np.inf
  weight = (1 + 0.5 * rng.standard_normal(latent)).astype(dtype)

  inputs = {"kv": kv, "weight": weight, "positions": positions}
  attributes: dict[str, int | float | bool] = {"interleave": interleave, "eps": eps}
  cos, sin = rope_rows(positions, width, theta, yarn, angles, amplitude)
  if from_table:
    table = rope_rows(np.arange(length), width, theta, yarn, angles, amplitude)
    inputs |= {"cos": table.cos, "sin": table.sin}
  else:
    frequencies = inverse_frequencies(width, theta, yarn, angles)
    inputs["frequencies"] = frequencies.astype(np.float64)
    attributes |= {
      "length": length,
      "float32_angles": angles == "float32",
      "amplitude": amplitude,
    }

  with np.errstate(invalid="ignore"):
    golden, bound = norm_and_bound(kv[:, :latent], weight, eps)
    rotated = rotate(kv[:, latent:], cos, sin, interleave).astype(np.float32)
  # Rotated columns have no error.
  return GoldenCase(
    op="rope_keys",
    name=name,
    attributes=attributes,
    inputs=inputs,
    outputs={"out": np.concatenate([golden, rotated], axis=-1)},
    compare={"out": "bound"},
    bounds={"out": np.concatenate([bound, np.zeros_like(rotated)], axis=-1)},
  )


def norm_and_bound(
  x: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
  """An RMSNorm of exact statistics, and how far from it a kernel may be.

  With u = 2^-24: a thread sums n squares, eight for each 1024 features, by fused
  multiply-adds; warps and block add 8 more sums; then the division and the sum with
  eps: n + 10 roundings of the mean square, half as many of its root. That is rounded
  itself, as is the product with it: (n + 10) / 2 + 2 roundings until the value is
  rounded to its dtype. One more is for second-order terms and another sum's order.

  In float32 the product with the weight is rounded once more. In bfloat16 both
  roundings keep the order of values: the result lies between those of the two ends of
  what the normed value may be. Most often that is one number, and the bound is 0.

  Args:
    x: [T, R] bf16 or f32.
    weight: [R] of the same dtype.
    eps: added to the mean square, as float32.

  Returns:
    golden and bound, f32[T, R].
  """
  wide, w = x.astype(np.float64), weight.astype(np.float64)
  mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
  normed = wide / np.sqrt(mean_square + float(np.float32(eps)))
  squares = 8 * -(-x.shape[-1] // 1024)
  off = ((squares + 10) / 2 + 3) * U

  if x.dtype == np.float32:
    exact = normed * w
    golden = exact.astype(np.float32)
    bound = (off + U) * np.abs(exact) + 2.0**-149 + np.abs(golden - exact)
  else:

    def rounded(value: np.ndarray) -> np.ndarray:
      once = value.astype(np.float32).astype(x.dtype).astype(np.float32)
      # Exact in float32: 8 bits by 8 bits.
      return (once * weight.astype(np.float32)).astype(x.dtype).astype(np.float32)

    golden = rounded(normed)
    ends = [np.abs(rounded(normed * (1 + s * off)) - golden) for s in (-1, 1)]
    bound = np.maximum(*ends)
  # NaN equals NaN, whatever the bound.
  return golden, np.where(bound > 0, rounded_up(bound), 0).astype(np.float32)
