"""Golden cases of `route`, with the error that scores and weights may have."""

from __future__ import annotations

import dataclasses

import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, rounded_up

U = 2.0**-24  # unit roundoff of float32
# Two choices of one row that are closer than that share of their scores may come in
# either order; rows that have such are drawn again.
CLOSE = 1e-4


@dataclasses.dataclass(frozen=True)
class Router:
  """The op's static arguments, and whether there is a bias."""

  E: int
  n_group: int
  topk_group: int
  k: int
  softmax: bool
  biased: bool
  norm_topk_prob: bool
  scaling: float

  def scores(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores in float64, and the bound of what a kernel computes.

    With u = 2^-24 and 2 u for an exponential: a sigmoid is that, a sum and a quotient,
    4 u. It is 0 where the exponential overflows.

    A softmax: d = x - max is rounded, which is |d| u of its exponential. A sum of at
    most 32 terms a lane and of 32 lanes adds 37 u to the mean of the terms' own errors,
    the quotient 1 u. Exponentials below 2^-126 have an error of 2^-149.
    """
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
      if not self.softmax:
        exact = 1 / (1 + np.exp(-x))
        floor = np.where(exact <= 2.0**-127, 2.0**-127, 2.0**-148)
        return exact, 4.1 * U * exact + floor
      d = x - np.max(x, axis=-1, keepdims=True)
      terms = np.exp(d)
      off = np.where(terms > 0, np.abs(d) + 2, 0)
      total = np.sum(terms, axis=-1, keepdims=True)
      weighted = np.where(terms > 0, terms * off, 0)
      mean = np.sum(weighted, axis=-1, keepdims=True) / total
      exact = terms / total
      return exact, 1.01 * U * (off + mean + 38) * exact + 2.0**-148

  def choose(self, scores: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Experts i32 [T, k] by the scores."""
    made = []
    for row in scores:
      choice = self._choice(row, bias)
      groups = choice.reshape(self.n_group, -1)
      best = largest(self._group_scores(groups), self.topk_group)
      if self.n_group > 1:
        masked = np.full_like(groups, -np.inf)
        masked[best] = groups[best]
        choice = masked.ravel()
      made.append(largest(choice, self.k))
    return np.array(made, np.int32).reshape(len(scores), self.k)

  def is_clear(
    self, logits: np.ndarray, scores: np.ndarray, bias: np.ndarray | None
  ) -> bool:
    """Whether no rounding changes what a row [E] chooses."""
    choice = self._choice(scores, bias)
    kept = np.arange(self.E)
    if self.n_group > 1:
      sums = self._group_scores(choice.reshape(self.n_group, -1))
      order = largest(sums, self.n_group)
      size = self.E // self.n_group
      if self.topk_group < self.n_group:
        last, first = sums[order[self.topk_group - 1]], sums[order[self.topk_group]]
        with np.errstate(invalid="ignore"):
          if not last - first > CLOSE * (2 * scores.max() + abs(last) + abs(first)):
            return False
      kept = np.sort(
        np.concatenate([size * g + np.arange(size) for g in order[: self.topk_group]])
      )
    order = kept[largest(choice[kept], min(self.k + 1, len(kept)))]
    for a, b in zip(order[:-1], order[1:], strict=True):
      same = logits[a] == logits[b] and (bias is None or bias[a] == bias[b])
      same = same or (np.isnan(choice[a]) and np.isnan(choice[b]))
      size = scores[a] + scores[b] + 0.01 * (abs(choice[a]) + abs(choice[b]))
      if not (same or np.isnan(choice[a]) or choice[a] - choice[b] > CLOSE * size):
        return False
    return True

  def _choice(self, scores: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return scores if bias is None else scores + bias

  def _group_scores(self, groups: np.ndarray) -> np.ndarray:
    return np.array([np.sum(group[largest(group, 2)]) for group in groups])


def largest(values: np.ndarray, k: int) -> list[int]:
  """Where the k largest are; NaN is the largest, equal ones go to the lowest id."""
  keys = [(not np.isnan(value), -value, i) for i, value in enumerate(values.tolist())]
  return [i for _, _, i in sorted(keys)[:k]]


# Experts, groups, groups kept, experts chosen: Kimi's, DeepSeek-V3's and odd ones.
SHAPES = [(384, 1, 1, 8), (256, 8, 4, 8), (1, 1, 1, 1), (33, 11, 3, 5), (24, 8, 3, 4)]
SHAPES += [(100, 4, 2, 7), (512, 2, 1, 6), (40, 5, 5, 8)]
LARGE = [(1024, 32, 5, 8), (1024, 1, 1, 32), (64, 1, 1, 6), (96, 32, 7, 16)]
# Softmax, whether there is a bias, norm_topk_prob, scaling.
KINDS = [
  (False, True, True, 2.827),
  (True, False, False, 1.0),
  (False, False, False, 1.0),
  (True, True, True, 0.7),
]


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Routers of all kinds, with rows of which no last bit changes the choice.

  Args:
    rng: source of randomness.
    small: fewer tokens and routers.
  """
  made = []
  for i, shape in enumerate(SHAPES if small else SHAPES + LARGE):
    for j, kind in enumerate(KINDS):
      router = Router(*shape, *kind)
      name = f"{'softmax' if kind[0] else 'sigmoid'}, router {i}, {j}"
      tokens = 6 if small else 20
      made.append(_case(name, rng, router, tokens))
  made.append(_case("one token", rng, Router(384, 1, 1, 8, *KINDS[0]), 1))
  made.append(_case("no token", rng, Router(8, 1, 1, 3, *KINDS[0]), 0))
  made.append(_case("one group is kept", rng, Router(24, 8, 1, 5, *KINDS[0]), 4))
  for kind in KINDS[1:3]:
    name = f"odd rows, {'softmax' if kind[0] else 'sigmoid'}"
    made.append(_odd_rows(name, Router(70, 1, 1, 6, *kind)))
  return made


def _case(
  name: str, rng: np.random.Generator, router: Router, tokens: int
) -> GoldenCase:
  """Logits of several sizes; in some rows two experts are alike in all."""
  bias = (0.3 * rng.standard_normal(router.E)).astype(np.float32)
  if router.E > 2:
    bias[router.E // 2] = bias[1]
  given = bias if router.biased else None
  logits = np.zeros((tokens, router.E), np.float32)
  for t in range(tokens):
    for _ in range(1000):
      row = (rng.standard_normal(router.E) * rng.choice([0.5, 2.0])).astype(np.float32)
      if router.E > 2 and router.n_group == 1 and t % 3 == 1:
        row[[1, router.E // 2]] = 3.0
      if router.is_clear(row, router.scores(row)[0], given):
        break
    else:
      raise ValueError(f"{name}: no row is clear")
    logits[t] = row
  return _routed(name, router, logits, given)


def _odd_rows(name: str, router: Router) -> GoldenCase:
  """Equal logits, zeros of both signs, NaN and infinities, scores of 0 and of 1."""
  x = np.zeros((8, router.E), np.float32)
  x[1, ::2] = -0.0
  x[2, 3:9] = np.nan
  x[3, [5, 66]] = np.inf
  x[4] = -np.inf
  x[5, 7:] = -np.inf
  x[6] = 1e4
  x[7] = -200.0
  x[7, 68] = 1.0
  return _routed(name, router, x, None)


def _routed(
  name: str, router: Router, logits: np.ndarray, bias: np.ndarray | None
) -> GoldenCase:
  scores, off = router.scores(logits)
  experts = router.choose(scores, bias)
  weights, weights_off = weigh(router, scores, off, experts)
  inputs = {"logits": logits}
  if bias is not None:
    inputs["bias"] = bias
  results = {"weights": (weights, weights_off), "scores": (scores, off)}
  outputs, bounds = {"experts": experts}, {}
  for key, (value, bound) in results.items():
    golden = outputs[key] = value.astype(np.float32)
    rounding = np.abs(golden - value)
    # NaN equals NaN, whatever the bound.
    bounds[key] = rounded_up(np.nan_to_num(bound + rounding))
  return GoldenCase(
    op="route",
    name=name,
    attributes={
      "k": router.k,
      "n_group": router.n_group,
      "topk_group": router.topk_group,
      "softmax": router.softmax,
      "norm_topk_prob": router.norm_topk_prob,
      "scaling": router.scaling,
    },
    inputs=inputs,
    outputs=outputs,
    compare={"experts": "bits", "weights": "bound", "scores": "bound"},
    bounds=bounds,
  )


def weigh(
  router: Router, scores: np.ndarray, off: np.ndarray, experts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Weights [T, k] in float64, and their bound.

  The sum of k scores has their errors and k roundings of itself, one more with 1e-20;
  quotient and factor are rounded. 5 % for second-order terms.
  """
  weights = np.take_along_axis(scores, experts, axis=-1)
  bound = np.take_along_axis(off, experts, axis=-1)
  with np.errstate(invalid="ignore"):
    if router.norm_topk_prob:
      total = np.sum(weights, axis=-1, keepdims=True) + 1e-20
      total_off = np.sum(bound, axis=-1, keepdims=True) + (router.k + 1) * U * total
      bound = bound / total + weights * total_off / total**2 + U * weights / total
      weights = weights / total
    scaling = float(np.float32(router.scaling))
    weights, bound = weights * scaling, bound * scaling
    return weights, 1.05 * (bound + U * np.abs(weights)) + 2.0**-149
