"""Golden cases of `matmul`, `head_matmul` and `grouped_matmul`.

Sums of integers are exact, so that they are compared bit by bit: no term is missing,
none counts twice. Others have a bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from kdtree_jax.reference.golden import products
from kdtree_jax.reference.golden.case import GoldenCase, Rule, rounded_up
from kdtree_jax.reference.golden.products import BF16, F32, Bounded

ROWS = (1, 8, 9, 17, 33, 64, 65)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Weights of one kind and size.

  Attributes:
    K, N: sizes; N of gate and up together where `gated`.
    x, out: dtypes.
    w: dtype; None is int4.
    by_feature, gated: as in custom_calls/matmul.h.
  """

  K: int
  N: int
  x: np.dtype = BF16
  w: np.dtype | None = BF16
  out: np.dtype = BF16
  by_feature: bool = False
  gated: bool = False

  def draw(
    self, rng: np.random.Generator, groups: int, exact: bool
  ) -> tuple[np.ndarray, np.ndarray]:
    """Weights as the op takes them, and as floats [groups, K, N]."""
    K, N = self.K, self.N
    if self.w is None:
      tiles = products.tiles(rng, groups, K, N, gated=self.gated, exact=exact)
      return tiles, products.dequantized(tiles, K, N, self.x, self.gated)
    shape = (groups, N, K) if self.by_feature else (groups, K, N)
    w = products.whole(rng, *shape) if exact else products.normal(rng, *shape) * K**-0.5
    w = w.astype(self.w)
    return w, w.swapaxes(1, 2) if self.by_feature else w


_int4 = functools.partial(Weights, w=None)
_wide = functools.partial(Weights, x=F32, w=F32, out=F32)

# K in one and in several parts, which are blocks of a cluster; K and N that end inside
# of tiles; with and without copies of 16 bytes. All of them meet all numbers of rows.
DENSE = {
  "bf16, two parts": Weights(1040, 40),
  "bf16, gated, two tiles": Weights(80, 2 * 72, gated=True),
  "bf16 to float32, by feature": Weights(272, 137, out=F32, by_feature=True),
  "int4, ends inside of tiles": _int4(96, 72),
  "int4, gated": _int4(96, 2 * 20, gated=True),
  "float32, two parts, no vectors": _wide(515, 35),
  "float32, gated": _wide(160, 2 * 24, gated=True),
}
# Other ways through the kernels, with three numbers of rows.
MORE = {
  "bf16, less than a step": Weights(16, 8),
  "bf16, by feature, two parts": Weights(1040, 9, by_feature=True),
  "bf16, gated, two parts": Weights(1024, 2 * 8, gated=True),
  "int4, two parts": _int4(3872, 24),
  "int4, gated, a long K": _int4(4128, 2 * 12, gated=True),
  "int4 to float32": _int4(64, 16, out=F32),
  "float32, four parts": _wide(1024, 64),
  "float32, one feature and value": _wide(1, 1),
  "float32, by feature": _wide(200, 101, by_feature=True),
  "float32, int4": Weights(160, 40, F32, None, F32),
  "bf16 by float32": Weights(136, 33, BF16, F32, F32),
  "bf16 by float32 to bf16": Weights(40, 32, BF16, F32, BF16),
}
LARGE = {
  "bf16, eight parts": Weights(4096, 200),
  "bf16, four parts": Weights(2048, 136),
  "bf16, many features": Weights(64, 4104),
  "bf16, by feature, many features": Weights(256, 4096, out=F32, by_feature=True),
  "bf16, gated, parts": Weights(2048, 2 * 104, gated=True),
  "int4, Kimi's": _int4(7168, 2 * 64, gated=True),
  "int4, eight parts": _int4(16384, 32),
  "float32, eight parts": _wide(4096, 100),
  "float32, many features": _wide(160, 4500),
}


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Products with one matrix, with one per head, and with one per group of rows.

  Args:
    rng: source of randomness.
    small: fewer and smaller ones.
  """
  made = []
  for name, weights in DENSE.items():
    for rows in ROWS:
      made.append(_dense(f"{name}, {rows} rows", rng, weights, rows, rows % 2 == 1))
  for name, weights in MORE.items():
    for rows in (3, 12, 70):
      made.append(_dense(f"{name}, {rows} rows", rng, weights, rows, rows == 12))
  made.append(_dense("no row", rng, Weights(16, 8), 0, False))
  if not small:
    for name, weights in LARGE.items():
      for rows in (1, 30, 160):
        made.append(_dense(f"{name}, {rows} rows", rng, weights, rows, rows == 30))
  return made + _heads(rng, small) + _groups(rng, small)


def _heads(rng: np.random.Generator, small: bool) -> list[GoldenCase]:
  made = []
  # Heads, K, width of x, N.
  sizes = [(BF16, (3, 64, 96, 80)), (BF16, (2, 1040, 1040, 8))]
  sizes += [(F32, (3, 128, 192, 64)), (F32, (2, 37, 50, 21))]
  if not small:
    sizes += [(BF16, (24, 128, 192, 512)), (F32, (8, 128, 192, 512))]
  for dtype, shape in sizes:
    for rows in (1, 9, 65):
      name = f"{dtype.name}, {shape[0]} heads, {rows} rows"
      made.append(_head(name, rng, dtype, shape, rows, exact=rows == 9))
  return made


def _groups(rng: np.random.Generator, small: bool) -> list[GoldenCase]:
  every = [0, *ROWS, 0]
  # Name, number of rows, sizes of the groups.
  patterns = [
    ("groups of all sizes", sum(every), every),
    ("rows of no group", 40, [3, 0, 17, 1]),
    ("one group has all rows", 70, [0, 0, 70, 0]),
    ("few rows", 6, [2, 0, 1, 3]),
    ("16 rows", 16, [0, 16, 0, 0]),
    ("30 rows", 30, [5, 17, 8, 0]),
    ("no row is of a group", 9, [0, 0]),
    ("no row", 0, [0, 0, 0]),
    ("sizes below 0 and beyond the rows", 20, [-3, 5, -(2**31), 40, 7, 2**31 - 1]),
  ]
  kinds = {
    "bf16": Weights(80, 136),
    "int4": _int4(96, 72),
    "float32": _wide(75, 35),
  }
  made = []
  for kind, weights in kinds.items():
    for i, (name, rows, sizes) in enumerate(patterns):
      made.append(
        _grouped(f"{kind}, {name}", rng, weights, rows, sizes, exact=i % 2 == 1)
      )
  parts = {
    "bf16, two parts": Weights(1040, 24),
    "int4, two parts": _int4(3872, 24),
    "float32, two parts": _wide(520, 32),
    "float32, int4": Weights(160, 40, F32, None, F32),
  }
  if not small:
    parts |= {
      "bf16, eight parts": Weights(4096, 72),
      "int4, Kimi's": _int4(7168, 200),
      "float32, eight parts": _wide(4096, 64),
    }
  for kind, weights in parts.items():
    sizes = [0, 9, 1, 17, 0, 8, 33]
    made.append(_grouped(kind, rng, weights, 70, sizes, exact=False))
    made.append(_grouped(f"{kind}, exact", rng, weights, 7, [4, 0, 3], exact=True))
  if not small:
    sizes = rng.multinomial(500, rng.dirichlet(np.full(384, 0.3))).tolist()
    made.append(_grouped("int4, 384 groups", rng, _int4(128, 32), 512, sizes, False))
  return made


def _dense(
  name: str, rng: np.random.Generator, weights: Weights, rows: int, exact: bool
) -> GoldenCase:
  exact = exact and not weights.gated
  w, (floats,) = weights.draw(rng, 1, exact)
  x = (products.whole if exact else products.normal)(rng, rows, weights.K)
  x = x.astype(weights.x)
  if weights.gated:
    value, bound = products.gated(x, floats, weights.out)
  else:
    value, bound = products.rounded(*products.sums(x, floats), weights.out)
  attributes: dict[str, int | float | bool] = {
    "by_feature": weights.by_feature,
    "gated": weights.gated,
    "out_float32": weights.out == F32,
  }
  if weights.w is None:
    attributes["features"] = weights.N
  else:
    w = w[0]
  inputs = {"x": x, "w": w}
  return _compared("matmul", name, attributes, inputs, (value, bound), weights, exact)


def _head(
  name: str,
  rng: np.random.Generator,
  dtype: np.dtype,
  shape: tuple[int, int, int, int],
  rows: int,
  *,
  exact: bool,
) -> GoldenCase:
  H, K, X, N = shape
  weights = Weights(K, N, dtype, dtype, dtype)
  w, _ = weights.draw(rng, H, exact)
  x = (products.whole if exact else products.normal)(rng, rows, H, X).astype(dtype)
  x[..., K:] = np.nan  # Not read.
  parts = [products.rounded(*products.sums(x[:, h, :K], w[h]), dtype) for h in range(H)]
  value, bound = (np.stack(part, axis=1) for part in zip(*parts, strict=True))
  inputs = {"x": x, "w": w}
  return _compared("head_matmul", name, {}, inputs, (value, bound), weights, exact)


def _grouped(
  name: str,
  rng: np.random.Generator,
  weights: Weights,
  rows: int,
  sizes: list[int],
  exact: bool,
) -> GoldenCase:
  w, floats = weights.draw(rng, len(sizes), exact)
  x = (products.whole if exact else products.normal)(rng, rows, weights.K)
  x = x.astype(weights.x)
  # What belongs to no group is 0.
  value, bound = np.zeros((2, rows, weights.N))
  begin = 0
  for size, group in zip(sizes, floats, strict=True):
    end = min(begin + max(size, 0), rows)
    found = products.rounded(*products.sums(x[begin:end], group), weights.x)
    value[begin:end], bound[begin:end] = found
    begin = end
  attributes = {"features": weights.N} if weights.w is None else {}
  inputs = {"x": x, "w": w, "group_sizes": np.array(sizes, np.int32)}
  weights = dataclasses.replace(weights, out=weights.x)
  return _compared(
    "grouped_matmul", name, attributes, inputs, (value, bound), weights, exact
  )


def _compared(
  op: str,
  name: str,
  attributes: Mapping[str, int | float | bool],
  inputs: Mapping[str, np.ndarray],
  result: Bounded,
  weights: Weights,
  exact: bool,
) -> GoldenCase:
  """The case whose output is `result`, in its dtype and exact, or within its bound."""
  value, bound = result
  compare: dict[str, Rule] = {"out": "bits" if exact else "bound"}
  golden = (value + 0.0).astype(weights.out if exact else F32)  # No zero is -0.
  bounds = {}
  if not exact:
    bounds["out"] = rounded_up(bound + np.abs(value - golden))
  return GoldenCase(op, name, attributes, inputs, {"out": golden}, compare, bounds)
