"""best_token's custom call against the XLA form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.best_token_test import by_numpy, hard_rows
from tests.ops.custom_calls import assert_same_bits, cuda_text, replayed

best_token = functools.partial(ops.best_token, implementation="cuda")
best_xla = jax.jit(functools.partial(ops.best_token, implementation="xla"))

# One block a row and several; rows that are aligned and that are not; the last of
# several blocks with much, little and no work.
VOCABS = [1, 3, 97, 4096, 16384, 16387, 20003, 163840]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_of_the_xla_form(vocab):
  rows = hard_rows(np.random.default_rng(vocab), 80, vocab)
  got = replayed(best_token)(rows)
  assert_same_bits(best_xla(rows), got)
  if vocab < 10000:
    assert got.tolist() == by_numpy(rows)


@pytest.mark.gpu
def test_the_best_may_stand_anywhere():
  """In every place of a row in turn, and twice."""
  vocab = 16388
  places = np.arange(0, vocab, 7)
  rows = np.zeros((len(places), vocab), np.float32)
  rows[np.arange(len(places)), places] = 1
  run = jax.jit(best_token)
  assert np.asarray(run(rows)).tolist() == places.tolist()
  rows[:, -1] = 1
  assert np.asarray(run(rows)).tolist() == places.tolist()
  rows[:, -1] = np.nan
  assert set(np.asarray(run(rows)).tolist()) == {-1}


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others():
  rows = hard_rows(np.random.default_rng(0), 40, 20003)
  order = np.random.default_rng(1).permutation(40)
  run = jax.jit(best_token)
  straight = np.asarray(run(rows))
  assert_same_bits(straight[order], run(rows[order]))
  assert_same_bits(straight[:1], run(rows[:1]))


def test_the_program_for_cuda_holds_the_call():
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
    text = cuda_text(
      lambda x, i=implementation: ops.best_token(x, implementation=i),
      jnp.zeros((2, 3, 50)),
    )
    assert text.count("@kdtree_jax.best_token") == expected
