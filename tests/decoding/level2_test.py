"""The search for bits that depend on the number of rows finds them and names the op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import settings
from kdtree_jax.decoding.rounds import OPS
from kdtree_jax.ops import _implementation
from tests.decoding import level2
from tests.decoding.level2 import ROWS, Embedding, LiveRows, RowOp
from tests.decoding.models import target

F32 = np.dtype(np.float32)


def test_every_op_of_a_round_is_known():
  """A new one is either among those of rows, or said to be none."""
  assert set(OPS) == set(level2.row_ops(F32)) | level2.NOT_OF_ROWS


@pytest.mark.parametrize("name", sorted(set(OPS) - level2.NOT_OF_ROWS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ops_run_in_any_company(name, dtype):
  """The XLA forms: all ways agree, up to the roundings of sums of 4,096 terms."""
  for op in level2.row_ops(jnp.dtype(dtype))[name]:
    everything = [
      jax.tree.leaves(jax.jit(way, static_argnums=2)(op.rows, op.shared, "xla"))
      for way in op.ways
    ]
    one = jax.tree.leaves(op.ways[0](level2._take(op.rows, 5, 6), op.shared, "xla"))
    for results in everything:
      for want, have, alone in zip(everything[0], results, one, strict=True):
        assert have.shape[0] == ROWS and alone.shape[0] == 1
        want, have, alone = (
          np.asarray(x).astype(np.float64) for x in (want, have, alone)
        )
        close = {"rtol": 0.02, "atol": 1e-2 * np.abs(want).max()}
        np.testing.assert_allclose(have, want, **close)
        np.testing.assert_allclose(alone[0], want[5], **close)


def test_an_op_that_depends_on_the_rows_is_found():
  x = np.linspace(1, 2, ROWS * 4, dtype=np.float32).reshape(ROWS, 4)

  def honest(rows, shared, implementation):
    return rows[0] * shared

  def of_count(rows, shared, implementation):
    """One bit, from nine rows on."""
    return rows[0] * shared + (len(rows[0]) > 8) * 2.0**-23

  def of_place(rows, shared, implementation):
    """In one row of many."""
    return (rows[0] * shared).at[3:, 1].add(2.0**-22)

  def check(*ways):
    return level2.differences(RowOp((x,), 1.5, ways), "xla")

  assert check(honest, honest) == []
  assert [line.split(",")[1] for line in check(of_count)] == [
    " 17 rows",
    " 33 rows",
    " 64 rows",
  ]
  found = check(honest, of_place)
  assert all(line.startswith("way 1,") for line in found)
  assert found[0] == f"way 1, 8 rows, result 0: rows {list(range(3, 8))}"


PLACES = [Embedding(9, 2, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def live():
  return LiveRows.create(target(), 125, 128 * 2)


def test_a_step_gives_live_rows_the_same_bits_in_any_place(live):
  """At one number of rows XLA's forms do, too. So nothing else reaches the rows."""
  found = [level2.step_outputs(target(), live, place, "xla") for place in PLACES]
  want, *others = found
  assert {name.split()[1] for name in want} == {"logits"} | set(OPS) - {
    "best_token",
    "token_log_probs",
    *level2.NOT_OF_ROWS,
  }
  assert all(len(x) == 6 for x in want.values())
  assert want["0 rms_norm"].shape == (6, 64)
  for have in others:
    assert level2.first_difference(want, have) is None
  # Fewer live rows where there are fewer slots, close to the others.
  few = level2.step_outputs(target(), live, Embedding(2, 1), "xla")
  assert list(few) == list(want) and len(few["0 rms_norm"]) == 2
  last = list(want)[-1]
  np.testing.assert_allclose(few[last], want[last][:2], atol=1e-4)


@pytest.mark.parametrize(
  "name", ["matmul_chain", "route", "routed_experts", "tree_attention", "rope_keys"]
)
def test_the_op_that_differs_is_named(live, name, monkeypatch):
  """Its last bits depend on the place of a row."""
  real = _implementation.dispatch

  def dispatch(op, *arguments):
    out = real(op, *arguments)
    if op != name:
      return out

    def moved(x):
      if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
      axis = 1 if x.ndim > 2 and x.shape[:2] == (2, 9) else 0
      place = jnp.arange(x.shape[axis], dtype=x.dtype)
      return x * (1 + 2.0**-20 * jnp.expand_dims(place, range(1, x.ndim - axis)))

    return jax.tree.map(moved, out)

  monkeypatch.setattr(_implementation, "dispatch", dispatch)
  want, have = (
    level2.step_outputs(target(), live, place, "xla") for place in PLACES[:2]
  )
  assert _implementation.dispatch is dispatch
  difference = level2.first_difference(want, have)
  assert difference is not None and difference.split(":")[0].split()[1] == name


@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 64, 128])
@pytest.mark.parametrize("slots", [1, 2, 7, 32])
def test_widths_and_batches_are_allowed(rows, slots):
  config = DecodeConfig(method="plain", rows=rows, slots=slots)
  complete = settings.complete(target(), None, [np.zeros(3, np.int32)], config)
  assert (complete.rows, complete.slots) == (rows, slots)
