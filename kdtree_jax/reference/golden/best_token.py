"""Golden cases of `best_token`."""

from __future__ import annotations

import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, bits

NO_TOKEN = -1
LARGEST = np.finfo(np.float32).max


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Rows of all kinds, read by one block and by several, aligned and not.

  Args:
    rng: source of randomness.
    small: fewer and shorter rows.
  """
  made = [
    _case(f"V = {vocab}", _rows(rng, 22, vocab)) for vocab in (1, 2, 3, 64, 97, 2051)
  ]
  # From 16,384 tokens on, eight blocks share a row.
  made += [
    _case("several blocks", _rows(rng, 11, 16384)),
    _case("several blocks, odd", _rows(rng, 11, 16387)),
    _case("the last block has no work", _ends(16384 + 4 * 512 * 7)),
    _case("no row", np.zeros((0, 5), np.float32)),
  ]
  if not small:
    made += [
      _case(f"random {i}", _rows(rng, 22, int(rng.integers(1, 40_000))))
      for i in range(10)
    ]
    made += [
      _case("the best in any place", _places(4 * 512 + 5, 3)),
      _case("the best in any place, several blocks", _places(16388, 101)),
      _case("Kimi's vocabulary", _rows(rng, 11, 163_840)),
    ]
  return made


def _case(name: str, logits: np.ndarray) -> GoldenCase:
  # NaN and +inf make the maximum NaN or infinite, a row of -inf makes it -inf.
  usable = np.isfinite(np.max(logits, axis=-1))
  best = np.argmax(logits, axis=-1)  # the first of equal ones
  outputs = {"tokens": np.where(usable, best, NO_TOKEN).astype(np.int32)}
  return GoldenCase(
    op="best_token",
    name=name,
    attributes={},
    inputs={"logits": logits},
    outputs=outputs,
    compare=bits(outputs),
  )


def _rows(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
  """Rows of eleven kinds in turn: plain, tied, extreme, not finite."""
  x = rng.standard_normal((count, vocab)).astype(np.float32)
  for i, row in enumerate(x):
    place = int(rng.integers(vocab))
    match i % 11:
      case 1:
        row[:] = np.round(row)  # the largest value occurs often
      case 2:
        row[:] = 3.0
      case 3:
        row[:] = rng.choice(np.array([0.0, -0.0], np.float32), vocab)
      case 4:
        row[place] = rng.choice([np.nan, -np.nan])
      case 5:
        row[place] = np.inf
      case 6:
        row[:] = -np.inf
      case 7:  # one usable logit, be it the smallest number
        row[:] = -np.inf
        row[place] = -LARGEST
      case 8:
        row[rng.random(vocab) < 0.9] = -np.inf
        row[place] = LARGEST
      case 9:
        row[[0, -1]] = 9.0
      case 10:
        row *= np.float32(1e37)
  return x


def _ends(vocab: int) -> np.ndarray:
  """The best, equal ones, or NaN at either end of a row."""
  x = np.full((4, vocab), -1.0, np.float32)
  x[0, -1] = x[1, [0, -1]] = x[2, 0] = 1.0
  x[2, -1] = np.nan
  x[3, :-1] = -np.inf
  return x


def _places(vocab: int, step: int) -> np.ndarray:
  """The best in every `step`-th place of a row in turn."""
  places = np.arange(0, vocab, step)
  x = np.zeros((len(places), vocab), np.float32)
  x[np.arange(len(places)), places] = 1.0
  return x
