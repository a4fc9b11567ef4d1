"""Golden cases of `routed_experts`: any number of rows an expert, ids of any value."""

from __future__ import annotations

import dataclasses

import numpy as np

from kdtree_jax.reference.golden import products
from kdtree_jax.reference.golden.case import GoldenCase, rounded_up
from kdtree_jax.reference.golden.products import BF16, F32, Bounded

ROWS = (1, 8, 9, 17, 33, 64, 65)
EXTREME = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Experts:
  """Experts of one kind and size; `beside`: gate_up is [D, E, 2F]."""

  E: int
  D: int
  F: int
  k: int
  dtype: np.dtype = BF16
  int4: bool = False
  beside: bool = False

  def draw(
    self, rng: np.random.Generator
  ) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Weights as the op takes them, and as floats [E, D, 2F] and [E, F, D]."""
    E, D, F = self.E, self.D, self.F
    if self.int4:
      gate_up = products.tiles(rng, E, D, 2 * F, gated=True)
      down = products.tiles(rng, E, F, D)
      floats = (
        products.dequantized(gate_up, D, 2 * F, self.dtype, gated=True),
        products.dequantized(down, F, D, self.dtype),
      )
    else:
      gate_up = (products.normal(rng, E, D, 2 * F) * D**-0.5).astype(self.dtype)
      down = (products.normal(rng, E, F, D) * F**-0.5).astype(self.dtype)
      floats = gate_up, down
      gate_up = np.moveaxis(gate_up, 0, int(self.beside))
    return {"gate_up": np.ascontiguousarray(gate_up), "down": down}, floats


# Each meets all numbers of tokens.
KINDS = {
  "bf16": Experts(6, 80, 48, 3),
  "int4": Experts(7, 96, 32, 3, int4=True),
  "float32": Experts(6, 37, 10, 3, F32),
}
# Other ways through the kernels, with two numbers of tokens.
MORE = {
  "bf16, beside each other": Experts(4, 64, 32, 2, beside=True),
  "bf16, two parts": Experts(3, 1040, 32, 2),
  "int4, two parts": Experts(3, 3872, 32, 2, int4=True),
  "int4, one slot": Experts(5, 64, 64, 1, int4=True),
  "float32, beside each other, two parts": Experts(4, 520, 24, 2, F32, beside=True),
  "float32, int4": Experts(4, 96, 32, 2, F32, int4=True),
}
LARGE = {
  "bf16, four parts": Experts(5, 2048, 64, 3),
  "bf16, 40 experts": Experts(40, 256, 96, 6),
  "int4, 64 experts": Experts(64, 256, 128, 8, int4=True),
  "int4, Kimi's width": Experts(4, 7168, 256, 3, int4=True),
  "float32, 24 experts": Experts(24, 200, 50, 4, F32),
}


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Experts of all kinds, for any number of tokens.

  Args:
    rng: source of randomness.
    small: fewer and smaller ones.
  """
  made = []
  for name, experts in KINDS.items():
    for tokens in ROWS:
      ids = _ids(rng, experts, tokens)
      made.append(_case(f"{name}, {tokens} tokens", rng, experts, ids))
    ids = _ids(rng, experts, 24)
    same = np.zeros_like(ids)  # All slots of all tokens: more rows than a chunk has.
    made.append(_case(f"{name}, one expert has all rows", rng, experts, same))
    ids[::2, 1] = ids[::2, 0]
    made.append(_case(f"{name}, experts named twice", rng, experts, ids))
    ids[1] = -1, experts.E, EXTREME.max
    ids[2:24:3, 1], ids[5, 0] = EXTREME.min, experts.E
    made.append(_case(f"{name}, ids out of range", rng, experts, ids))
    nobody = np.full_like(ids, experts.E)
    made.append(_case(f"{name}, nobody's rows", rng, experts, nobody))
    made.append(_case(f"{name}, no token", rng, experts, ids[:0]))
  for name, experts in MORE.items():
    for tokens in (5, 18):
      ids = _ids(rng, experts, tokens)
      made.append(_case(f"{name}, {tokens} tokens", rng, experts, ids))
  if not small:
    for name, experts in LARGE.items():
      for tokens in (1, 24, 160):
        ids = _ids(rng, experts, tokens)
        made.append(_case(f"{name}, {tokens} tokens", rng, experts, ids))
  return made


def _ids(rng: np.random.Generator, experts: Experts, tokens: int) -> np.ndarray:
  """i32 [T, k]: some experts favoured, none twice in a row, the last but one unused."""
  order = rng.uniform(size=(tokens, experts.E)) * (1 + np.arange(experts.E))
  order[:, -2] = np.inf
  if experts.k == experts.E:
    raise ValueError(f"k = {experts.k} leaves no expert without rows")
  return np.argsort(order, axis=-1)[:, : experts.k].astype(np.int32)


def _case(
  name: str, rng: np.random.Generator, experts: Experts, ids: np.ndarray
) -> GoldenCase:
  tokens = len(ids)
  given, floats = experts.draw(rng)
  x = products.normal(rng, tokens, experts.D).astype(experts.dtype)
  weights = rng.uniform(0.1, 1.0, ids.shape).astype(F32)
  value, bound = exact_and_bound(x, ids, weights, *floats)
  golden = value.astype(F32)
  return GoldenCase(
    op="routed_experts",
    name=name,
    attributes={"inner_width": experts.F, "beside": experts.beside},
    inputs={"x": x, "experts": ids.copy(), "weights": weights, **given},
    outputs={"out": golden},
    compare={"out": "bound"},
    bounds={"out": rounded_up(bound + np.abs(value - golden))},
  )


def exact_and_bound(
  x: np.ndarray,
  ids: np.ndarray,
  weights: np.ndarray,
  gate_up: np.ndarray,
  down: np.ndarray,
) -> Bounded:
  """The op in float64, and how far from it a kernel may be.

  The bounds of the two products follow one another (see `products`); what the first
  is wrong by meets the sizes of the second's weights. Then each of k products and sums
  in float32 is rounded, by 2 k u of the sizes, and the sum to its dtype.

  Args:
    x: [T, D] in the dtype of the result.
    ids: i32 [T, k]; those out of range add nothing.
    weights: f32 [T, k].
    gate_up: [E, D, 2F].
    down: [E, F, D].

  Returns:
    value and bound, f64 [T, D].
  """
  dtype = x.dtype
  outputs, off = np.zeros((2, *ids.shape, x.shape[1]))
  for e in range(len(down)):
    token, slot = np.nonzero(ids == e)
    inner, inner_off = products.gated(x[token], gate_up[e], dtype)
    found = products.rounded(*products.sums(inner, down[e], inner_off), dtype)
    outputs[token, slot], off[token, slot] = found
  wide = weights.astype(np.float64)[..., None]
  sizes = np.sum(wide * (np.abs(outputs) + off), axis=1)
  total = np.sum(wide * off, axis=1) + ids.shape[1] * 2.0**-23 * sizes
  return products.rounded(np.sum(wide * outputs, axis=1), total, dtype)
