from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops

token_log_probs = jax.jit(ops.token_log_probs)

# A float32 log-softmax `(x - max) - log(sum)` errs by: half an ulp of the difference
# and of the result; the exponentials' few ulp; and the sum's roundings, of which the
# longest chain in either form is below 200. Relative to a sum of 1 or more: 2e-5.
ULPS, ABSOLUTE = 2.0**-22, 2e-5


def random_case(rng: np.random.Generator, batch: int, nodes: int, vocab: int):
  """(logits, tokens, path); scales from flat to nearly one-hot, -inf among them."""
  scale = rng.choice([0.0, 1.0, 10.0, 80.0], (batch, nodes, 1))
  logits = (rng.normal(size=(batch, nodes, vocab)) * scale).astype(np.float32)
  logits += rng.choice([0, -1e4, 1e4], (batch, nodes, 1)).astype(np.float32)
  logits[rng.random(logits.shape) < 0.1] = -np.inf
  logits[:, :, 0] = logits.max(axis=2, initial=-1e30)
  tokens = rng.integers(0, vocab, (batch, nodes)).astype(np.int32)
  tokens[rng.random(tokens.shape) < 0.5] = 0
  path = rng.integers(-1, nodes, (batch, nodes + 2)).astype(np.int32)
  return logits, tokens, path


def check(got: np.ndarray, logits, tokens, path) -> None:
  """Against float64, 0 off the path."""
  for b, row in enumerate(path):
    for i, slot in enumerate(row):
      if slot < 0:
        assert got[b, i] == 0
        continue
      x = logits[b, slot].astype(np.float64)
      top = x.max()
      expected = x[tokens[b, slot]] - top - np.log(np.exp(x - top).sum())
      if np.isinf(expected):
        assert got[b, i] == expected
      else:
        assert abs(got[b, i] - expected) <= ABSOLUTE + ULPS * abs(expected)


@pytest.mark.parametrize("vocab", [1, 5, 97, 4099])
def test_equals_float64(vocab):
  case = random_case(np.random.default_rng(vocab), 4, 9, vocab)
  got = np.asarray(token_log_probs(*case))
  assert got.shape == (4, 11) and got.dtype == np.float32
  check(got, *case)


def test_equals_log_softmax_of_the_row():
  logits, tokens, _ = random_case(np.random.default_rng(0), 3, 7, 50)
  path = np.tile(np.arange(7, dtype=np.int32), (3, 1))
  rows = jax.jit(lambda x: jax.nn.log_softmax(x, axis=-1))(logits)
  expected = np.take_along_axis(np.asarray(rows), tokens[..., None], 2)[..., 0]
  assert np.asarray(token_log_probs(logits, tokens, path)).tobytes() == (
    expected.tobytes()
  )


def test_indices_out_of_range_are_clamped():
  logits = np.random.default_rng(1).normal(size=(1, 3, 5)).astype(np.float32)
  extreme = np.iinfo(np.int32)
  tokens = np.array([[-1, extreme.max, extreme.min]], np.int32)
  path = np.array([[0, 1, 2, extreme.max, extreme.min, 3]], np.int32)
  clamped = np.array([[0, 4, 0]], np.int32), np.array([[0, 1, 2, 2, -1, 2]], np.int32)
  np.testing.assert_array_equal(
    token_log_probs(logits, tokens, path), token_log_probs(logits, *clamped)
  )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_give_nan(bad):
  logits = np.zeros((1, 2, 9), np.float32)
  logits[0, 0, 4 if bad != -np.inf else slice(None)] = bad
  tokens, path = np.zeros((1, 2), np.int32), np.array([[0, 1]], np.int32)
  got = np.asarray(token_log_probs(logits, tokens, path))[0]
  assert np.isnan(got[0]) and np.isfinite(got[1])


def test_errors_name_the_argument():
  logits, tokens = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), jnp.int32)
  path = jnp.zeros((2, 2), jnp.int32)
  with pytest.raises(ValueError, match=r"logits \(2, 3, 4\) bfloat16 must be float32"):
    ops.token_log_probs(logits.astype(jnp.bfloat16), tokens, path)
  with pytest.raises(ValueError, match=r"tokens \(2, 2\) must be .* \(2, 3\)"):
    ops.token_log_probs(logits, path, path)
  with pytest.raises(ValueError, match=r"path \(1, 2\) must be .*2, A"):
    ops.token_log_probs(logits, tokens, path[:1])
