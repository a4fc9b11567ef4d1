from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.ops.best_token import NO_TOKEN

best_token = jax.jit(ops.best_token)


def hard_rows(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
  """Generic rows; ties; signed zeros; NaN and infinities in any place; extremes."""
  x = rng.normal(size=(rows, vocab)).astype(np.float32)
  kind = np.arange(rows) % 10
  x[kind == 1] = np.round(x[kind == 1])  # the largest value occurs often
  x[kind == 2] = 3.0
  x[kind == 3] = np.where(rng.random((sum(kind == 3), vocab)) < 0.5, 0.0, -0.0)
  x[kind == 9] *= np.float32(1e37)
  for row in range(rows):
    place = rng.integers(vocab)
    if kind[row] == 4:
      x[row, place] = rng.choice([np.nan, -np.nan])
    elif kind[row] == 5:
      x[row, place] = np.inf
    elif kind[row] == 6:
      x[row] = -np.inf
      if row % 20 > 9:
        x[row, place] = rng.choice([-np.finfo(np.float32).max, 0, 1])
    elif kind[row] == 7:
      x[row, rng.random(vocab) < 0.9] = -np.inf
      x[row, place] = np.finfo(np.float32).max
    elif kind[row] == 8:
      x[row, [0, -1]] = 9.0
  return x


def by_numpy(rows: np.ndarray) -> list[int]:
  """One by one: a strict comparison, so that the first of equal ones stays."""
  out = []
  for row in rows:
    best, token = -np.inf, NO_TOKEN
    for i, value in enumerate(row.tolist()):
      if value > best:
        best, token = value, i
    if np.isnan(row).any() or (row == np.inf).any():
      token = NO_TOKEN
    out.append(token)
  return out


@pytest.mark.parametrize("vocab", [1, 3, 97, 256])
def test_lowest_id_of_the_largest_logit(vocab):
  rows = hard_rows(np.random.default_rng(vocab), 200, vocab)
  got = best_token(rows.reshape(10, 20, vocab))
  assert got.shape == (10, 20) and got.dtype == jnp.int32
  assert got.ravel().tolist() == by_numpy(rows)
  assert {NO_TOKEN, 0} <= set(got.ravel().tolist())


def test_vmap():
  rows = hard_rows(np.random.default_rng(0), 60, 33)
  got = jax.vmap(ops.best_token)(rows.reshape(6, 10, 33))
  assert got.ravel().tolist() == by_numpy(rows)


def test_errors_name_the_argument():
  with pytest.raises(ValueError, match=r"logits \(2, 3\) bfloat16 must be float32"):
    ops.best_token(jnp.zeros((2, 3), jnp.bfloat16))
  with pytest.raises(ValueError, match=r"logits \(2, 0\) float32 .* V >= 1"):
    ops.best_token(jnp.zeros((2, 0)))
