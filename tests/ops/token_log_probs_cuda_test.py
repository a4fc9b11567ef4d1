"""token_log_probs' custom call against float64, and what its bits depend on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.custom_calls import assert_same_bits, cuda_text, replayed
from tests.ops.token_log_probs_test import check, random_case

token_log_probs = functools.partial(ops.token_log_probs, implementation="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 5, 4096, 4099, 16384, 20003, 163840])
def test_equals_float64(vocab):
  case = random_case(np.random.default_rng(vocab), 2, 9, vocab)
  check(replayed(token_log_probs)(*case), *case)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [97, 20003])
def test_a_row_depends_on_itself_alone(vocab):
  """Not on its slot, its place in the path, its sequence, or the other rows."""
  rng = np.random.default_rng(0)
  logits, tokens, _ = random_case(rng, 3, 8, vocab)
  path = np.tile(np.arange(8, dtype=np.int32), (3, 1))
  run = jax.jit(token_log_probs)
  straight = np.asarray(run(logits, tokens, path))
  order = rng.permutation(8).astype(np.int32)
  moved = run(logits[:, order], tokens[:, order], path)
  assert_same_bits(straight[:, order], moved)
  assert_same_bits(straight[:, order], run(logits, tokens, path[:, order]))
  assert_same_bits(straight[::-1], run(logits[::-1], tokens[::-1], path))
  # Another number of rows is another launch of the same kernel.
  alone = run(logits[1:2, 3:4], tokens[1:2, 3:4], np.zeros((1, 1), np.int32))
  assert_same_bits(straight[1:2, 3:4], alone)
  others = np.where(np.arange(8)[:, None] == 3, logits, np.nan).astype(np.float32)
  assert_same_bits(straight[:, 3], run(others, tokens, path)[:, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [9, 16400])
def test_odd_rows(vocab):
  """NaN, infinities, parts of nothing but -inf, and indices out of range."""
  logits = np.zeros((1, 8, vocab), np.float32)
  logits[0, 1, 4] = np.nan
  logits[0, 2, vocab - 1] = np.inf
  logits[0, 3] = -np.inf
  logits[0, 4, : vocab // 2] = -np.inf
  logits[0, 5] = -np.inf
  logits[0, 5, -1] = 7
  logits[0, 6, 1:] = -np.inf
  logits[0, 6, -1] = np.nan
  extreme = np.iinfo(np.int32)
  tokens = np.array([[0, 0, 0, 0, -1, extreme.max, 0, extreme.min]], np.int32)
  path = np.array([[0, 1, 2, 3, 4, 5, 6, extreme.max, extreme.min]], np.int32)
  got = replayed(token_log_probs)(logits, tokens, path)[0]
  assert np.isnan(got[[1, 2, 3, 6]]).all()
  # Every term is exactly 1 and their count below 2^24, so the sum is exact and only
  # logf rounds: at most 1 ulp (CUDA's table), 2^-23 of the value; twice that here.
  np.testing.assert_allclose(got[[0, 7]], -np.log(vocab), rtol=2.0**-22)
  assert got[4] == -np.inf and got[5] == got[8] == 0


def test_the_program_for_cuda_holds_the_call():
  args = jnp.zeros((2, 3, 50)), jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 4), int)
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
    text = cuda_text(
      lambda *x, i=implementation: ops.token_log_probs(*x, implementation=i), *args
    )
    assert text.count("@kdtree_jax.token_log_probs") == expected
