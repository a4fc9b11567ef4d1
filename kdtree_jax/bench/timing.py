"""Device time of one call, from chains of calls in one compiled program.

To start a program costs the host more than some kernels take. So a program holds
a chain of calls, unrolled, which a GPU captures as one graph from its second run
on, and for short calls a loop around the chain, captured with it; the program is
started many times before the clock is read; and the clock is divided by the number
of calls. What remains in a figure besides the call itself: the program's start and
the loop, shared by all calls, and the link to the next call, a kernel of one
element. Nothing is subtracted.

The calls of a chain wait for one another: a call's smallest integer input depends
on the outputs of the call before, in a way that never changes its value and that
the compiler cannot see through. All outputs are results of the program, in memory
that the results of the start before gave up, so no call can be left out, merged
with another, or moved. Input sets rotate, so that caches hold what they would hold
in use, and no call repeats the one before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.environment import CAPTURED_LOOP_OPTIONS
from kdtree_jax.ops.matmul import einsum

WARMUPS = 3  # uncaptured, captured, replayed
# More starts than this wait in the runtime's queue, and would look like host time.
MOST_STARTS = 24
# Times that a program of short calls runs its chain.
SHORT_REPEATS = 32
# Above this share of a measurement spent on starting programs, the host, not the
# device, may have set the pace.
HOST_BOUND = 0.9

Link = Callable[[Any, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Timing:
  """Microseconds of one call.

  Attributes:
    us: median over runs.
    low: the fastest run.
    high: the slowest run.
    calls: calls in a program.
    starts: starts of the program in a run.
    runs: measurements, each of `starts` x `calls` calls.
    host_share: largest share of a run that the host spent on starting programs.
  """

  us: float
  low: float
  high: float
  calls: int
  starts: int
  runs: int
  host_share: float


def add_zero(x: jax.Array, zero: jax.Array) -> jax.Array:
  """The same values, known only once `zero` is."""
  return x + zero.astype(x.dtype)


class Chain:
  """A compiled chain of calls of one operation, with its inputs.

  Args:
    op: pure; takes (*shared, an input set) and returns a pytree of arrays. With
      `carried` it takes (*shared, the value of the call before, an input set) and
      returns that value's successor.
    sets: pytrees of arrays of the same shapes; call i takes set i modulo their
      number.
    calls: calls in a program.
    link: (set, zero i32[]) -> the set, where something small depends on `zero`,
      whose value is 0. None leaves the order to optimization barriers alone,
      which suits operations that fill the device. No effect with `carried`.
    carried: first value that calls hand on, updated in place; or None. Taken
      over: its buffers are given up.
    shared: arguments that all calls have in common (a model, say).
    repeats: times that a program runs the chain.
  """

  def __init__(
    self,
    op: Callable[..., Any],
    sets: Sequence[Any],
    *,
    calls: int,
    link: Link | None = None,
    carried: Any = None,
    shared: tuple[Any, ...] = (),
    repeats: int = 1,
  ):
    self.calls = calls * repeats
    self._sets, self._shared = tuple(sets), shared
    self._carried = carried is not None
    if not self._carried:
      shapes = jax.eval_shape(op, *shared, self._sets[0])
      empty = [
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        for _ in range(calls)
      ]
      self._state = (jnp.zeros((), jnp.int32), empty)
      run = _linked(op, calls, link or (lambda inputs, zero: inputs))
    else:
      self._state = carried
      run = _carrying(op, calls)
    options = None
    if repeats > 1:
      run = _repeated(run, repeats)
      if jax.default_backend() == "gpu":
        options = dict(CAPTURED_LOOP_OPTIONS)
    self._run = jax.jit(
      run, donate_argnums=0, keep_unused=True, compiler_options=options
    )

  def first(self) -> Any:
    """What the first call returned, or the carried value after the last."""
    return self._state if self._carried else self._state[1][0]

  def run(self, starts: int) -> tuple[float, float]:
    """Starts the program so often; (seconds to start, seconds to finish) of all."""
    begin = time.perf_counter()
    for _ in range(starts):
      self._state = self._run(self._state, self._sets, self._shared)
    started = time.perf_counter()
    jax.block_until_ready(self._state)
    return started - begin, time.perf_counter() - begin


def _linked(op, calls: int, link: Link):
  def run(state, sets, shared):
    # The old results are only taken for their memory.
    zero, _ = state
    outs = []
    for i in range(calls):
      inputs, zero = jax.lax.optimization_barrier((sets[i % len(sets)], zero))
      out = jax.lax.optimization_barrier(op(*shared, link(inputs, zero)))
      zero = _nought(out)
      outs.append(out)
    return zero, outs

  return run


def _carrying(op, calls: int):
  def run(state, sets, shared):
    for i in range(calls):
      state = jax.lax.optimization_barrier(op(*shared, state, sets[i % len(sets)]))
    return state

  return run


def _repeated(run, repeats: int):
  def loop(state, sets, shared):
    return jax.lax.fori_loop(0, repeats, lambda _, s: run(s, sets, shared), state)

  return loop


def _nought(out: Any) -> jax.Array:
  """i32 [] 0, from one element of each array, whatever the (sane) values are."""
  odd = jnp.zeros((), bool)
  for x in jax.tree.leaves(out):
    if x.size:
      one = x[(0,) * x.ndim]
      lowest = jnp.iinfo(x.dtype).min if jnp.issubdtype(x.dtype, jnp.integer) else None
      odd |= one != one if lowest is None else one == lowest
  return odd.astype(jnp.int32)


def measure(
  chains: Mapping[str, Chain], *, runs: int = 9, seconds: float = 0.02
) -> dict[str, Timing]:
  """Times chains side by side: each run measures all of them in turn.

  Args:
    chains: by name.
    runs: measurements of each; the median counts.
    seconds: aim for the length of one measurement.

  Returns:
    A timing for each name.
  """
  starts = {}
  for name, chain in chains.items():
    for _ in range(WARMUPS):
      _, once = chain.run(1)
    starts[name] = int(np.clip(seconds / once, 1, MOST_STARTS))
  taken: dict[str, list[tuple[float, float]]] = {name: [] for name in chains}
  for _ in range(runs):
    for name, chain in chains.items():
      taken[name].append(chain.run(starts[name]))
  timings = {}
  for name, chain in chains.items():
    total = np.array([end for _, end in taken[name]])
    us = 1e6 * total / (starts[name] * chain.calls)
    timings[name] = Timing(
      us=float(np.median(us)),
      low=float(us.min()),
      high=float(us.max()),
      calls=chain.calls,
      starts=starts[name],
      runs=runs,
      host_share=float(max(begin / end for begin, end in taken[name])),
    )
  return timings


@dataclasses.dataclass(frozen=True)
class Ceilings:
  """What the device reaches in this process.

  Attributes:
    bytes_per_second: read and written by an elementwise kernel on a large array.
    flops_per_second: of a large bf16 matrix product with fp32 accumulation.
    link_us: a chain's call that does nothing: the link alone.
  """

  bytes_per_second: float
  flops_per_second: float
  link_us: float

  def floor_us(self, bytes_moved: float, flops: float) -> float:
    """Shortest time in which both can be done, in microseconds."""
    return 1e6 * max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second)


def ceilings(copy_bytes: int = 1 << 29, gemm_size: int = 8192) -> Ceilings:
  """Measures the ceilings.

  Args:
    copy_bytes: size of the array that is copied.
    gemm_size: rows, columns and depth of the product.
  """
  words = jnp.arange(copy_bytes // 4, dtype=jnp.uint32)
  copy = Chain(lambda x: ~x, [words, words + 1], calls=2)
  keys = jax.random.split(jax.random.key(0))
  factors = [
    jax.random.normal(key, (gemm_size, gemm_size), jnp.bfloat16) for key in keys
  ]
  gemm = Chain(
    lambda pair: einsum("nk,km->nm", pair[0], pair[1], jnp.bfloat16),
    [factors, factors[::-1]],
    calls=2,
  )
  nothing = Chain(
    lambda x: x,
    [jnp.zeros((8,), jnp.int32)],
    calls=32,
    link=lambda x, zero: x + zero,
    repeats=SHORT_REPEATS,
  )
  times = {
    name: measure({name: chain})[name].us
    for name, chain in {"copy": copy, "gemm": gemm, "link": nothing}.items()
  }
  return Ceilings(
    bytes_per_second=2e6 * words.nbytes / times["copy"],
    flops_per_second=2e6 * gemm_size**3 / times["gemm"],
    link_us=times["link"],
  )
