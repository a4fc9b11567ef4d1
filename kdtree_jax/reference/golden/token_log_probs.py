"""Golden cases of `token_log_probs`, with the error that each element may have."""

from __future__ import annotations

import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, rounded_up

U = 2.0**-24  # unit roundoff of float32
EXTREME = np.iinfo(np.int32)


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Flat and steep rows, read by one block and by several, and paths with gaps.

  Args:
    rng: source of randomness.
    small: fewer and shorter rows.
  """
  made = [
    _random(f"V = {vocab}", rng, batch=3, nodes=5, vocab=vocab)
    for vocab in (1, 2, 5, 64, 97, 2051)
  ]
  # From 16,384 tokens on, eight blocks share a row.
  made += [
    _random("several blocks", rng, batch=1, nodes=4, vocab=16384),
    _random("several blocks, odd", rng, batch=2, nodes=3, vocab=16387),
    _random("one slot", rng, batch=4, nodes=1, vocab=33),
    _odd_rows("odd rows", vocab=9),
    _odd_rows("odd rows, several blocks", vocab=16390),
    _random("no sequence", rng, batch=0, nodes=3, vocab=8),
  ]
  if not small:
    made += [
      _random(f"random {i}", rng, batch=2, nodes=9, vocab=int(rng.integers(1, 40_000)))
      for i in range(10)
    ]
    made.append(_random("Kimi's vocabulary", rng, batch=2, nodes=5, vocab=163_840))
  return made


def _random(
  name: str, rng: np.random.Generator, batch: int, nodes: int, vocab: int
) -> GoldenCase:
  """Scales from flat to nearly one-hot, -inf among the logits, and unused slots."""
  scale = rng.choice([0.0, 1.0, 10.0, 80.0], (batch, nodes, 1))
  logits = (rng.standard_normal((batch, nodes, vocab)) * scale).astype(np.float32)
  logits += rng.choice([0, -1e4, 1e4], (batch, nodes, 1)).astype(np.float32)
  logits[rng.random(logits.shape) < 0.1] = -np.inf
  logits[:, :, 0] = logits.max(axis=2, initial=-1e30)  # Not -inf alone.
  tokens = rng.integers(0, vocab, (batch, nodes)).astype(np.int32)
  tokens[rng.random(tokens.shape) < 0.5] = 0
  path = rng.integers(-1, nodes, (batch, nodes + 2)).astype(np.int32)
  return _case(name, logits, tokens, path)


def _odd_rows(name: str, vocab: int) -> GoldenCase:
  """NaN, infinities, parts of nothing but -inf, and indices out of range."""
  logits = np.zeros((1, 8, vocab), np.float32)
  logits[0, 1, 4] = np.nan
  logits[0, 2, -1] = np.inf
  logits[0, 3] = -np.inf
  logits[0, 4, : vocab // 2] = -np.inf
  logits[0, 5, :-1] = -np.inf
  logits[0, 6, 1:] = -np.inf
  logits[0, 6, -1] = np.nan
  tokens = np.array([[0, 0, 0, 0, -1, EXTREME.max, 0, EXTREME.min]], np.int32)
  path = np.array([[0, 1, 2, 3, 4, 5, 6, 7, EXTREME.max, EXTREME.min]], np.int32)
  return _case(name, logits, tokens, path)


def _case(
  name: str, logits: np.ndarray, tokens: np.ndarray, path: np.ndarray
) -> GoldenCase:
  exact, bound = np.zeros(path.shape), np.zeros(path.shape)
  nodes, vocab = logits.shape[1:]
  for b, slots in enumerate(path):
    for i, slot in enumerate(np.minimum(slots, nodes - 1)):
      if slot >= 0:  # Else there is no row, and the result is 0.
        token = np.clip(tokens[b, slot], 0, vocab - 1)
        exact[b, i], bound[b, i] = exact_and_bound(logits[b, slot], token)
  golden = exact.astype(np.float32)
  finite = np.isfinite(exact)  # NaN equals NaN, and an infinity itself.
  rounding = np.abs(np.subtract(golden, exact, where=finite, out=np.zeros_like(exact)))
  return GoldenCase(
    op="token_log_probs",
    name=name,
    attributes={},
    inputs={"logits": logits, "tokens": tokens, "path": path},
    outputs={"log_probs": golden},
    compare={"log_probs": "bound"},
    bounds={"log_probs": np.where(bound > 0, rounded_up(bound + rounding), 0)},
  )


def exact_and_bound(logits: np.ndarray, token: int) -> tuple[float, float]:
  """A log-softmax at one token in float64, and how far from it float32 may be.

  `(x - top) - log(sum(exp(x_i - top)))`, to first order, with u = 2^-24, d_i =
  x_i - top and the weights p_i = exp(d_i) / sum:

  - Both differences round once: u |x - top| + u |result|.
  - A weight is off by u |d_i| from its rounded exponent, 4 u from the exponential, and
    as much again for the maximum of its part: where parts of a row are summed
    relative to their own maxima, their differences add up to d_i. With the product
    of both: u |d_i| + 9 u.
  - Sums: of a thread's terms, of its four sums, of threads, warps and parts. No chain
    has more than 10 + 2 + 5 + 15 + 8 = 40 additions for 163,840 tokens, nor V.
  - The logarithm: 4 u of its value.

  Second-order terms are covered by 5 %; what lies below the smallest normal number is
  lost, less than V 2^-126 of a sum that is 1 or more.

  Args:
    logits: f32[V].
    token: below V.

  Returns:
    exact and bound; the bound is 0 where the result is NaN or infinite.
  """
  x = logits.astype(np.float64)
  top = x.max()
  if not np.isfinite(top):  # NaN or +inf among them, or -inf alone.
    return np.nan, 0.0
  weights = np.exp(x - top)
  total = weights.sum()
  exact = x[token] - top - np.log(total)
  if np.isinf(exact):
    return exact, 0.0
  distance = np.where(weights > 0, top - x, 0.0)
  weights /= total
  off = np.sum(weights * distance) + 9 + min(len(x), 40)
  off += top - x[token] + 4 * np.log(total) + np.abs(exact)
  return exact, 1.05 * U * float(off)
