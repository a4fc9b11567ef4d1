"""Golden cases of `rope_keys`, with the error that each normed feature may have."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.config import YarnConfig
from kdtree_jax.reference.golden.case import GoldenCase
from kdtree_jax.reference.golden.norm import norm_and_bound
from kdtree_jax.reference.golden.rope import LAST, YARN
from kdtree_jax.reference.rope import AngleDtype, inverse_frequencies, rope_rows, rotate

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
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
    # A thread sums eight squares for each 1024 features, then five and three more sums
    # bring warps and block together.
    sums = 8 * -(-latent // 1024) + 8
    golden, bound = norm_and_bound(kv[:, :latent], weight, eps, sums)
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
