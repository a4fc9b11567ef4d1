"""Golden cases of `rms_norm` and `add_rms_norm`, and the error that a norm may have."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, Rule, rounded_up

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
U = 2.0**-24  # unit roundoff of float32


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Rows of all widths, alone and after a residual sum.

  Args:
    rng: source of randomness.
    small: fewer and shorter rows.
  """
  made = []
  for dtype in (F32, BF16):
    # One feature; no vectors; vectors but no whole chunk; one warp and several; two
    # chunks a thread.
    for rows, width in ((3, 1), (5, 7), (9, 36), (65, 64), (4, 1100), (2, 8200)):
      made += _both(f"{dtype.name}, D = {width}", rng, dtype, rows, width)
    made += _both(f"{dtype.name}, not finite", rng, dtype, 6, 64, finite=False)
    made += _both(f"{dtype.name}, large eps", rng, dtype, 5, 24, eps=0.1)
    made += _both(f"{dtype.name}, no row", rng, dtype, 0, 24)
    if not small:
      made += _both(f"{dtype.name}, Kimi's", rng, dtype, 65, 7168)
      made += _both(f"{dtype.name}, three chunks a thread", rng, dtype, 3, 20_003)
      for i in range(6):
        width = int(rng.integers(1, 10_000))
        made += _both(f"{dtype.name}, random {i}", rng, dtype, 8, width)
  return made


def _both(
  name: str,
  rng: np.random.Generator,
  dtype: np.dtype,
  rows: int,
  width: int,
  *,
  eps: float = 1e-6,
  finite: bool = True,
) -> list[GoldenCase]:
  """Rows of several magnitudes, without and with a sum before the norm."""
  x, added = rng.standard_normal((2, rows, width))
  sizes = np.resize([1.0, 1e-3, 0.0, 100.0, 1e15], (rows, 1))
  x, added = (x * sizes).astype(dtype), (added * sizes).astype(dtype)
  if not finite:
    x[0, 3], x[1, 5:7], x[2, -1] = np.nan, (np.inf, np.nan), -np.inf
    added[3, 9], added[4, 0] = np.inf, np.nan
  weight = (1 + 0.5 * rng.standard_normal(width)).astype(dtype)
  # A thread sums eight squares for each 8,192 features, then come five sums of a warp
  # and five of the warps.
  sums = 8 * -(-width // 8192) + 10
  made = []
  for op in ("rms_norm", "add_rms_norm"):
    inputs = {"x": x, "weight": weight}
    outputs: dict[str, np.ndarray] = {}
    compare: dict[str, Rule] = {"out": "bound"}
    bounds: dict[str, np.ndarray] = {}
    total = x
    with np.errstate(invalid="ignore"):
      if op == "add_rms_norm":
        inputs["added"] = added
        # bf16: as the kernel does, in float32 and then rounded.
        total = x.astype(np.float32) + added.astype(np.float32)
        total = outputs["sum"] = total.astype(dtype)
        compare["sum"] = "bits"
        if not finite:  # Which bits NaN has is not defined.
          compare["sum"] = "bound"
          bounds["sum"] = np.zeros(total.shape, np.float32)
      outputs["out"], bounds["out"] = norm_and_bound(total, weight, eps, sums)
    made.append(GoldenCase(op, name, {"eps": eps}, inputs, outputs, compare, bounds))
  return made


def norm_and_bound(
  x: np.ndarray, weight: np.ndarray, eps: float, sums: int
) -> tuple[np.ndarray, np.ndarray]:
  """An RMSNorm of exact statistics, and how far from it a kernel may be.

  With u = 2^-24: no square takes part in more than `sums` fused multiply-adds and sums;
  then come the division and the sum with eps: sums + 2 roundings of the mean square,
  half as many of its root. That is rounded itself, as is the product with it, until the
  value is rounded to its dtype. One more is for second-order terms and another sum's
  order.

  In float32 the product with the weight is rounded once more. In bfloat16 both
  roundings keep the order of values: the result lies between those of the two ends of
  what the normed value may be. Most often that is one number, and the bound is 0.

  Args:
    x: [T, R] bf16 or f32.
    weight: [R] of the same dtype.
    eps: added to the mean square, as float32.
    sums: roundings of a sum of squares.

  Returns:
    golden and bound, f32[T, R].
  """
  wide, w = x.astype(np.float64), weight.astype(np.float64)
  mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
  normed = wide / np.sqrt(mean_square + float(np.float32(eps)))
  off = ((sums + 2) / 2 + 3) * U

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
