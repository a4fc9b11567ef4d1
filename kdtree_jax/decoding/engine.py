"""Schedules prompts over slots and runs the compiled programs."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.decoding import modules
from kdtree_jax.decoding.prefill import PrefillState, first_tokens, prefill_chunk
from kdtree_jax.decoding.result import Round, SequenceResult, Stats, StreamEvent
from kdtree_jax.decoding.rounds import Program, run_rounds
from kdtree_jax.decoding.sampling import Sampler
from kdtree_jax.decoding.settings import Settings
from kdtree_jax.decoding.state import DecodeState, Limits, RoundTrace
from kdtree_jax.environment import DECODE_LOOP_OPTIONS
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target


def _prefill(
  target_static, drafter_static, taps, implementation, arrays, state, tokens, count
):
  target_arrays, drafter_arrays = arrays
  new_state, _ = prefill_chunk(
    modules.merge(target_static, target_arrays),
    modules.merge(drafter_static, drafter_arrays),
    state,
    tokens,
    count,
    taps,
    implementation,
  )
  return new_state


def _rounds(
  target_static, drafter_static, program, arrays, state, sampler, limits, rounds
):
  target_arrays, drafter_arrays = arrays
  return run_rounds(
    modules.merge(target_static, target_arrays),
    modules.merge(drafter_static, drafter_arrays),
    state,
    sampler,
    limits,
    rounds,
    program,
  )


@dataclasses.dataclass
class _Slot:
  """What the host knows of the sequence in a slot."""

  index: int
  reported: int = 0
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0
  compile_seconds: float = 0.0
  rounds: list[Round] = dataclasses.field(default_factory=list)


class Engine:
  """Decodes a list of prompts; see `kdtree_jax.decode` for the arguments.

  One engine runs once. Compiled programs are shared between engines.
  """

  def __init__(
    self,
    target: Target,
    drafter: Any,
    settings: Settings,
    on_compile: modules.OnCompile | None = None,
  ):
    self._settings = settings
    config = settings.config
    self._on_compile = on_compile
    self._compile_seconds = 0.0
    self._target_static, target_arrays = modules.split(target)
    self._drafter_static, drafter_arrays = modules.split(drafter)
    self._arrays = (target_arrays, drafter_arrays)
    self._taps = () if drafter is None else tuple(drafter.feature_layers)
    self._program = Program(
      method=settings.method,
      rows=settings.rows,
      depth=settings.depth,
      trace_rounds=config.chunk_rounds if config.return_trees else 0,
      implementation=config.implementation,
    )
    self._sampler = Sampler.create(config.temperature, config.top_p, config.seed)
    # One shape for up to four stop tokens, so that they do not recompile.
    stops = np.full(max(4, len(settings.stop_tokens)), -1, np.int32)
    stops[: len(settings.stop_tokens)] = settings.stop_tokens
    self._limits = Limits(
      stop_tokens=jnp.asarray(stops),
      capacity=jnp.asarray(settings.capacity, jnp.int32),
      budget=jnp.asarray(settings.budget, jnp.int32),
    )
    cache = LatentCache.empty(
      target.config, settings.slots, settings.capacity, target.dtype
    )
    drafter_state = ()
    if drafter is not None:
      fresh = drafter.init_state(settings.slots, cache.capacity)
      drafter_state = modules.unshared(fresh, self._arrays)
    self._vocab_size = target.config.vocab_size
    self._state = DecodeState.empty(
      cache,
      drafter_state,
      config.max_new_tokens,
      self._vocab_size,
      config.return_logits,
    )

  def run(
    self, prompts: Sequence[np.ndarray], sequence_ids: Sequence[int]
  ) -> Iterator[StreamEvent]:
    """Yields events as chunks of rounds end, until every prompt has ended."""
    waiting = deque(range(len(prompts)))
    slots: list[_Slot | None] = [None] * self._settings.slots
    while waiting or any(slots):
      free = [s for s, slot in enumerate(slots) if slot is None]
      admitted = {s: waiting.popleft() for s in free if waiting}
      if admitted:
        for s, index in admitted.items():
          slots[s] = _Slot(index)
        self._admit(prompts, sequence_ids, admitted, slots)
        yield from self._report(slots)
      if any(slots):
        self._advance(slots)
        yield from self._report(slots)

  def _run_compiled(self, name, function, static, args, donate, options=None):
    spent = time.perf_counter()
    run = modules.compiled(
      name, function, static, args, donate, self._on_compile, options
    )
    self._compile_seconds += time.perf_counter() - spent
    return run(*args)

  def _loop_options(self) -> Mapping[str, str | bool] | None:
    """Of the compiler, for the loop of rounds."""
    on_gpu = all(d.platform == "gpu" for d in self._state.root.devices())
    wanted = self._settings.config.capture_loop and on_gpu
    return DECODE_LOOP_OPTIONS if wanted else None

  def _admit(self, prompts, sequence_ids, admitted: dict[int, int], slots) -> None:
    """Prefills the admitted prompts together and takes their first tokens."""
    start, compiled_before = time.perf_counter(), self._compile_seconds
    B, C = self._settings.slots, self._settings.config.prefill_chunk
    longest = max(len(prompts[i]) for i in admitted.values())
    chunks = -(-longest // C)
    tokens = np.zeros((B, chunks * C), np.int32)
    lengths = np.zeros(B, np.int32)
    ids = np.zeros(B, np.int32)
    for s, index in admitted.items():
      tokens[s, : len(prompts[index])] = prompts[index]
      lengths[s] = len(prompts[index])
      ids[s] = sequence_ids[index]
    is_new = jnp.asarray(lengths > 0)
    cache = self._state.cache
    # Each program gets the part of the state that it needs: the fewer shapes it
    # depends on, the seldomer it is compiled.
    reading = PrefillState(
      LatentCache(cache.data, jnp.where(is_new, 0, cache.lengths)),
      self._state.drafter,
      jnp.zeros((B, self._vocab_size), jnp.float32),
    )
    static = (
      self._target_static,
      self._drafter_static,
      self._taps,
      self._program.implementation,
    )
    for c in range(chunks):
      count = np.clip(lengths - c * C, 0, C).astype(np.int32)
      chunk = jnp.asarray(tokens[:, c * C : (c + 1) * C])
      args = (self._arrays, reading, chunk, jnp.asarray(count))
      reading = self._run_compiled("prefill", _prefill, static, args, 1)
    no_data = jnp.zeros((0,), jnp.float32)
    lean = LatentCache(no_data, reading.cache.lengths)
    args = (
      dataclasses.replace(self._state, cache=lean, drafter=()),
      reading.logits,
      is_new,
      jnp.asarray(ids),
      self._sampler,
      self._limits,
    )
    started = self._run_compiled("first token", first_tokens, (), args, 0)
    cache = LatentCache(reading.cache.data, started.cache.lengths)
    self._state = dataclasses.replace(started, cache=cache, drafter=reading.drafter)
    jax.block_until_ready(self._state.root)
    compiling = self._compile_seconds - compiled_before
    for s in admitted:
      slots[s].prefill_seconds = time.perf_counter() - start - compiling
      slots[s].compile_seconds = compiling

  def _advance(self, slots) -> None:
    """One chunk of rounds."""
    start, compiled_before = time.perf_counter(), self._compile_seconds
    static = (self._target_static, self._drafter_static, self._program)
    limit = jnp.asarray(self._settings.config.chunk_rounds, jnp.int32)
    args = (self._arrays, self._state, self._sampler, self._limits, limit)
    name = f"{self._program.method} rounds"
    self._state, traces, rounds = self._run_compiled(
      name, _rounds, static, args, 1, self._loop_options()
    )
    jax.block_until_ready(self._state.root)
    compiling = self._compile_seconds - compiled_before
    seconds = time.perf_counter() - start - compiling
    for slot in slots:
      if slot is not None:
        slot.decode_seconds += seconds
        slot.compile_seconds += compiling
    if traces is not None:
      self._keep_traces(slots, jax.device_get(traces), int(rounds))

  def _keep_traces(self, slots, traces: RoundTrace, rounds: int) -> None:
    for r in range(rounds):
      trace = jax.tree.map(lambda x, r=r: x[r], traces)
      for s, slot in enumerate(slots):
        if slot is None or trace.length[s] == 0:
          continue
        slot.rounds.append(
          Round(
            token_ids=trace.tree.token_ids[s],
            parents=trace.tree.parents[s],
            depths=trace.tree.depths[s],
            log_probs=trace.tree.log_probs[s],
            size=int(trace.tree.size[s]),
            draft_logits=trace.draft_logits[s],
            path=tuple(int(p) for p in trace.path[s] if p >= 0),
            start=int(trace.start[s]),
          )
        )

  def _report(self, slots) -> Iterator[StreamEvent]:
    """Events of the slots that got tokens or ended; frees the latter."""
    state = self._state
    host = jax.device_get(
      (
        state.finish,
        state.generated,
        state.tokens,
        state.logprobs,
        state.rounds,
        state.accepted,
      )
    )
    finish, generated, tokens, logprobs, rounds, accepted = host
    for s, slot in enumerate(slots):
      if slot is None:
        continue
      n = int(generated[s])
      reason = DecodeState.REASONS.get(int(finish[s]))
      result = None
      if reason is not None:
        logits = None
        if state.logits.shape[1]:
          logits = np.asarray(state.logits[s, :n])
        result = SequenceResult(
          tokens=tokens[s, :n].copy(),
          finish_reason=reason,
          logprobs=logprobs[s, :n].copy(),
          stats=Stats(
            rounds=int(rounds[s]),
            accepted_lengths=tuple(int(a) for a in accepted[s, : rounds[s]]),
            prefill_seconds=slot.prefill_seconds,
            decode_seconds=slot.decode_seconds,
            compile_seconds=slot.compile_seconds,
          ),
          logits=logits,
          rounds=tuple(slot.rounds) if self._program.trace_rounds else None,
        )
        slots[s] = None
      if n > slot.reported or reason is not None:
        fresh = slice(slot.reported, n)
        yield StreamEvent(
          slot.index, tokens[s, fresh].copy(), logprobs[s, fresh].copy(), reason, result
        )
      slot.reported = n
