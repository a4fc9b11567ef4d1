"""Chains of calls: what they compute, and what is made of the clock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.bench import timing
from kdtree_jax.bench.timing import Chain


def sets_of(count, size=300):
  """Input sets (values, a small integer)."""
  return [
    (jnp.arange(size, dtype=jnp.float32) + i, jnp.asarray([10 * i]))
    for i in range(count)
  ]


def linked(inputs, zero):
  return inputs[0], timing.add_zero(inputs[1], zero)


def test_every_call_runs_on_its_own_set():
  sets = sets_of(3)
  chain = Chain(lambda s: jnp.sin(s[0]) + s[1], sets, calls=5, link=linked)
  begun, ended = chain.run(2)
  assert 0 < begun <= ended
  zero, outs = chain._state
  assert zero == 0 and len(outs) == 5
  for i, out in enumerate(outs):
    values, number = sets[i % 3]
    np.testing.assert_array_equal(
      out, jax.jit(lambda v, n: jnp.sin(v) + n)(values, number)
    )
  np.testing.assert_array_equal(chain.first(), outs[0])


@pytest.mark.parametrize("calls", [2, 5])
def test_no_call_is_merged_with_another(calls):
  """One set for all of them, the hardest case; only the link tells them apart."""
  chain = Chain(
    lambda s: jnp.sin(s[0] * s[1].astype(jnp.float32)),
    sets_of(1),
    calls=calls,
    link=linked,
  )
  lowered = chain._run.lower(chain._state, chain._sets, chain._shared)
  assert lowered.as_text().count("stablehlo.sine") == calls
  # One fusion of the compiled program holds a call, or several of them do.
  assert lowered.compile().as_text().count(" sine(") >= calls


@pytest.mark.parametrize("odd", [jnp.nan, jnp.iinfo(jnp.int32).min])
def test_a_call_waits_for_the_one_before(odd):
  """An impossible output reaches the next call's input, so the link is real."""
  odd = jnp.asarray(odd)
  chain = Chain(lambda s: (s[1], jnp.full((3,), odd)), sets_of(2), calls=4, link=linked)
  chain.run(1)
  assert [int(out[0][0]) for out in chain._state[1]] == [0, 11, 1, 11]


def test_a_carried_value_goes_through_all_calls_in_place():
  sets = [jnp.asarray(i) for i in range(3)]
  value = jnp.zeros((4, 5))
  pointer = value.unsafe_buffer_pointer()
  chain = Chain(
    lambda step, x, row: x.at[row].add(step),
    sets,
    calls=4,
    carried=value,
    shared=(jnp.asarray(2.0),),
  )
  chain.run(3)
  assert chain.first()[:, 0].tolist() == [12, 6, 6, 0]
  assert value.is_deleted()
  assert chain.first().unsafe_buffer_pointer() == pointer


def test_results_are_written_where_the_last_ones_were():
  chain = Chain(lambda s: s[0] * 2, sets_of(2), calls=2, link=linked)
  pointers = {x.unsafe_buffer_pointer() for x in chain._state[1]}
  chain.run(3)
  assert {x.unsafe_buffer_pointer() for x in chain._state[1]} == pointers


class Clock:
  """Stands for a chain: each start takes as long as it is told."""

  def __init__(self, log, name, calls, seconds):
    self.calls = calls
    self._log, self._name, self._seconds = log, name, iter(seconds)

  def run(self, starts):
    self._log.append((self._name, starts))
    seconds = starts * next(self._seconds)
    return seconds / 2, seconds


def test_medians_per_call_and_alternating_runs():
  log = []
  chains = {
    "a": Clock(log, "a", 5, [9, 1, 0.5, 1, 2, 3]),
    "b": Clock(log, "b", 2, [9, 1, 0.01, 0.02, 0.06, 0.04]),
  }
  times = timing.measure(chains, runs=3, seconds=0.05)
  # Three warm-ups each; then 0.05 / 0.5 is less than one start, 0.05 / 0.01 five.
  assert log == 3 * [("a", 1)] + 3 * [("b", 1)] + 3 * [("a", 1), ("b", 5)]
  a, b = times["a"], times["b"]
  np.testing.assert_allclose([a.us, a.low, a.high], np.array([2, 1, 3]) * 1e6 / 5)
  np.testing.assert_allclose([b.us, b.low, b.high], np.array([4, 2, 6]) * 1e4 / 2)
  assert (a.calls, a.starts, b.starts, a.runs, a.host_share) == (5, 1, 5, 3, 0.5)


def test_starts_are_limited_by_the_queue():
  log = []
  timing.measure({"a": Clock(log, "a", 1, [1e-6] * 5)}, runs=2)
  assert log[-1] == ("a", timing.MOST_STARTS)


def test_ceilings_and_floors():
  got = timing.ceilings(copy_bytes=1 << 12, gemm_size=16)
  assert got.bytes_per_second > 0 and got.flops_per_second > 0 and got.link_us > 0
  limits = timing.Ceilings(bytes_per_second=1e9, flops_per_second=1e12, link_us=0)
  assert limits.floor_us(2000, 1e6) == pytest.approx(2)  # bytes decide
  assert limits.floor_us(2000, 5e6) == pytest.approx(5)  # operations do


def test_a_chain_may_run_many_times_in_one_start():
  sets = [jnp.asarray(i) for i in range(3)]
  chain = Chain(
    lambda x, row: x.at[row].add(1.0),
    sets,
    calls=4,
    carried=jnp.zeros((3,)),
    repeats=5,
  )
  chain.run(2)
  assert chain.calls == 20
  np.testing.assert_array_equal(chain.first(), [20, 10, 10])
