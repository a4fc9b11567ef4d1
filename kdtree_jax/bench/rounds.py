"""One way to decode, timed: its compiled loop as a whole, and each part of a round."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.bench.stages import start_state
from kdtree_jax.bench.timing import Chain, add_zero, measure
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.emit import Accepted, append
from kdtree_jax.decoding.rounds import Program, run_rounds, verify_step
from kdtree_jax.decoding.sampling import Sampler
from kdtree_jax.decoding.state import DecodeState, Limits
from kdtree_jax.environment import DECODE_LOOP_OPTIONS
from kdtree_jax.model.cache import LatentCache, round_up
from kdtree_jax.model.target import Target
from kdtree_jax.ops.accept_tree import accept_tree
from kdtree_jax.ops.build_tree import build_tree, chain_tree
from kdtree_jax.ops.compaction import compact
from kdtree_jax.ops.token_log_probs import token_log_probs
from kdtree_jax.tree import Tree

FORWARD = ("draft", "observe", "verify")
OVERHEAD = ("build", "accept", "compact", "emit", "loop")
PARTS = FORWARD + OVERHEAD

# Positions of a text that no measurement fills.
ENDLESS = 1 << 20

# Ways in which a compiled program can talk to the host while it runs.
HOST = re.compile(r"infeed|outfeed|\bsend\b|\brecv\b|callback|S\(5\)")


@dataclasses.dataclass(frozen=True)
class Effort:
  """How much to measure.

  Attributes:
    calls: of a part per program.
    repeats: of these calls, for a part that takes a few microseconds: to start a
      program, which has the models' arrays as arguments, takes the host longer.
    runs: measurements; the median counts.
    seconds: of one measurement of a part.
    warmups: calls of the loop that are not measured.
  """

  calls: int = 8
  repeats: int = 50
  runs: int = 7
  seconds: float = 0.02
  warmups: int = 3


@dataclasses.dataclass(frozen=True)
class Start:
  """A pair of models after one prompt, in one slot, and room for rounds.

  Attributes:
    target: the model.
    drafter: its drafter.
    state: in which the first round begins.
    capacity: positions that a sequence may fill.
    rounds: for which there is room, however much they accept.
  """

  target: Target
  drafter: Any
  state: DecodeState
  capacity: int
  rounds: int

  @classmethod
  def create(
    cls,
    target: Target,
    drafter: Any,
    prompt: Sequence[int],
    rounds: int,
    implementation: str,
  ) -> Start:
    """Reads the prompt.

    Raises:
      ValueError: so many rounds may fill more positions than the target has.
    """
    # No round may find the text complete, or the cache full.
    longest = rounds * (1 + drafter.max_depth) + 2
    capacity = len(prompt) + longest
    limit = target.config.max_position_embeddings
    if capacity > limit:
      raise ValueError(
        f"rounds = {rounds} may need {capacity} positions with a prompt of "
        f"{len(prompt)} tokens; the target has {limit}"
      )
    statics, arrays = zip(modules.split(target), modules.split(drafter), strict=True)
    config = DecodeConfig(max_new_tokens=longest, implementation=implementation)  # type: ignore[arg-type]
    taps = tuple(drafter.feature_layers)
    state = start_state(statics, arrays, taps, prompt, capacity, config)
    return cls(target, drafter, modules.unshared(state, arrays), capacity, rounds)


class Rounds:
  """One way to decode from a start.

  Args:
    start: models and state.
    config: method, budget, temperature, seed and implementation. Rows are those
      that `kdtree_jax.decode` takes by default.
    effort: how much to measure.

  Attributes:
    program: what the loop is compiled for.
    budget: tree nodes without the root.
    captured: whether the loop is compiled to run as one CUDA graph.
  """

  def __init__(self, start: Start, config: DecodeConfig, effort: Effort):
    self._effort, self._rounds = effort, start.rounds
    self._plain = plain = config.method == "plain"
    depth = start.drafter.max_depth
    budget = 0 if plain else depth if config.budget is None else config.budget
    rows = 1 if plain else round_up(1 + budget, 8)
    self.program = Program(
      method=config.method,
      rows=rows,
      depth=0 if plain else min(depth, rows - 1),
      trace_rounds=0,
      implementation=config.implementation,
    )
    self.budget = budget
    # As `kdtree_jax.decode` compiles its loop.
    on_gpu = all(d.platform == "gpu" for d in start.state.root.devices())
    self.captured = config.capture_loop and on_gpu
    self._options: dict[str, Any] = {
      **(modules.SAME_SUMS_OPTIONS if on_gpu else {}),
      **(DECODE_LOOP_OPTIONS if self.captured else {}),
    }
    self._sampler = Sampler.create(config.temperature, config.top_p, config.seed)
    self._limits = Limits(
      stop_tokens=jnp.full((4,), -1, jnp.int32),
      capacity=jnp.asarray(start.capacity, jnp.int32),
      budget=jnp.asarray(budget, jnp.int32),
    )
    self._vocab = start.target.config.vocab_size
    drafter = None if plain else start.drafter
    self._taps = () if plain else tuple(start.drafter.feature_layers)
    self._statics, self._arrays = zip(
      modules.split(start.target), modules.split(drafter), strict=True
    )
    self._state = start.state
    if plain:
      self._state = dataclasses.replace(start.state, drafter=())

  def _models(self, arrays: Any) -> tuple[Target, Any]:
    target, drafter = map(modules.merge, self._statics, arrays)
    return target, drafter

  def loop(self) -> dict[str, Any]:
    """Times the compiled loop.

    Returns:
      Microseconds per round, tokens per round, transfers to the host in the loop's
      text, and bytes that it needs besides arguments and results (None where the
      compiler does not say).
    """

    def run(arrays, state, sampler, limits, rounds):
      target, drafter = self._models(arrays)
      state, _, done = run_rounds(
        target, drafter, state, sampler, limits, rounds, self.program
      )
      return state, done

    def restart(state, lengths, root):
      return dataclasses.replace(
        state,
        cache=LatentCache(state.cache.data, lengths),
        root=root,
        finish=jnp.zeros_like(state.finish),
        generated=jnp.ones_like(state.generated),
        rounds=jnp.zeros_like(state.rounds),
      )

    restart = jax.jit(restart, donate_argnums=0)
    state = jax.tree.map(jnp.copy, self._state)
    first = jax.tree.map(jnp.copy, (state.cache.lengths, state.root))
    count = jnp.asarray(self._rounds, jnp.int32)
    settings = (self._sampler, self._limits, count)
    lowered = jax.jit(run, donate_argnums=1).lower(self._arrays, state, *settings)
    compiled = lowered.compile(compiler_options=self._options)
    seconds, committed = [], 0.0
    for i in range(self._effort.warmups + self._effort.runs):
      state = jax.block_until_ready(restart(state, *first))
      begin = time.perf_counter()
      with jax.transfer_guard("disallow"):
        state, done = compiled(self._arrays, state, *settings)
        jax.block_until_ready(state)
      if i >= self._effort.warmups:
        seconds.append((time.perf_counter() - begin) / int(done))
      committed = float(state.generated[0] - 1) / int(done)
    memory = compiled.memory_analysis()
    return {
      "round_us": 1e6 * float(np.median(seconds)),
      "round_us_low": 1e6 * min(seconds),
      "round_us_high": 1e6 * max(seconds),
      "tokens_per_round": committed,
      "host_transfers": len(HOST.findall(compiled.as_text() or "")),
      "workspace_bytes": None if memory is None else memory.temp_size_in_bytes,
    }

  def parts(self) -> dict[str, float]:
    """Microseconds of each part alone, the loop left out."""
    state, program = self._state, self.program
    times: dict[str, float] = dict.fromkeys(PARTS[:-1], 0.0)
    calls, roots = self._effort.calls, self._roots()
    tree = Tree.root_only(state.root, program.rows)
    trees = [Tree.root_only(root, program.rows) for root in roots]
    if not self._plain:
      times["draft"], _ = self._time(self._draft, roots, add_zero, state)
      logits = [jax.jit(self._draft)(self._arrays, state, root) for root in roots]
      sets = list(zip(logits, roots, strict=True))
      times["build"], tree = self._time(
        self._build, sets, _link_last, repeats=self._effort.repeats
      )
      tokens = jax.random.randint(
        jax.random.key(1), (calls, *tree.token_ids.shape), 0, self._vocab
      )
      trees = [dataclasses.replace(tree, token_ids=t) for t in tokens.astype(jnp.int32)]

    def linked(tree: Tree, zero: jax.Array) -> Tree:
      return dataclasses.replace(tree, token_ids=add_zero(tree.token_ids, zero))

    times["verify"], verified = self._time(self._verify, trees, linked, state.cache)
    _, features, keys = verified
    logits = self._random_logits(verified[0].shape)
    sets = [(x, tree.size) for x in logits]
    times["accept"], accepted = self._time(
      self._accept,
      sets,
      _link_last,
      tree,
      state,
      self._sampler,
      repeats=self._effort.repeats,
    )
    path, length = accepted.path, accepted.length
    start = state.cache.lengths
    sets = [(keys + i, path, length, start) for i in range(calls)]
    times["compact"], _ = self._time(
      self._compact,
      sets,
      carried=jnp.copy(state.cache.data),
      repeats=self._effort.repeats,
    )
    if not self._plain:
      sets = [(features + i, path, length, start) for i in range(calls)]
      times["observe"], _ = self._time(
        self._observe, sets, None, tree, carried=jax.tree.map(jnp.copy, state.drafter)
      )
    shift = jnp.arange(calls, dtype=jnp.float32)
    sets = [
      dataclasses.replace(accepted, log_probs=accepted.log_probs + x) for x in shift
    ]
    times["emit"], _ = self._time(
      self._emit,
      sets,
      None,
      dataclasses.replace(self._limits, capacity=jnp.asarray(ENDLESS)),
      carried=self._endless_state(),
    )
    return times

  def _endless_state(self) -> DecodeState:
    """Without caches, and with room for all that the calls of a chain append."""
    empty = LatentCache(jnp.zeros((0,)), jnp.copy(self._state.cache.lengths))
    state = DecodeState.empty(empty, (), ENDLESS, 0, False)
    return dataclasses.replace(
      state,
      root=jnp.copy(self._state.root),
      finish=jnp.zeros_like(state.finish),
      generated=jnp.ones_like(state.generated),
    )

  def _roots(self) -> list[jax.Array]:
    """A root for each call, all different."""
    shift = jnp.arange(self._effort.calls, dtype=jnp.int32)
    return list((self._state.root + shift[:, None]) % self._vocab)

  def _random_logits(self, shape: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(2), self._effort.calls)
    return [jax.random.normal(key, shape, jnp.float32) for key in keys]

  def _time(
    self,
    part: Callable[..., Any],
    sets: Sequence[Any],
    link: Callable[[Any, jax.Array], Any] | None = None,
    *shared: Any,
    carried: Any = None,
    repeats: int = 1,
  ) -> tuple[float, Any]:
    """Microseconds of `part(arrays, *shared, [carried,] set)`, and a result of it."""
    chain = Chain(
      part,
      sets,
      calls=self._effort.calls,
      link=link,
      carried=carried,
      shared=(self._arrays, *shared),
      repeats=repeats,
    )
    effort = self._effort
    timing = measure({"": chain}, runs=effort.runs, seconds=effort.seconds)[""]
    return timing.us, chain.first()

  # The parts, as `kdtree_jax.decoding.rounds.one_round` has them.

  def _draft(self, arrays, state: DecodeState, root: jax.Array) -> jax.Array:
    target, drafter = self._models(arrays)
    lengths = state.cache.lengths
    logits = drafter.draft(target, state.drafter, root, lengths, state.sequence_ids)
    return logits[:, : self.program.depth]

  def _build(self, arrays, inputs: tuple[jax.Array, jax.Array]) -> Tree:
    del arrays
    logits, root = inputs
    rows = self.program.rows
    limit = jnp.full(root.shape, self.budget, jnp.int32)
    if self.program.method == "chain":
      return chain_tree(
        logits,
        root,
        rows=rows,
        limit=limit,
        implementation=self.program.implementation,
      )
    return build_tree(
      logits,
      root,
      rows - 1,
      rows=rows,
      limit=limit,
      max_depth=jnp.full(root.shape, self.program.depth, jnp.int32),
      implementation=self.program.implementation,
    )

  def _verify(self, arrays, cache: LatentCache, tree: Tree):
    target, _ = self._models(arrays)
    return verify_step(target, cache, tree, self._taps, self.program.implementation)

  def _accept(self, arrays, tree, state, sampler: Sampler, inputs) -> Accepted:
    del arrays
    logits, size = inputs
    tree = dataclasses.replace(tree, size=size)
    depth = self.program.depth
    positions = state.cache.lengths + 1
    implementation = self.program.implementation
    choices = sampler.choose(
      logits, state.sequence_ids, positions, tree.depths, depth, implementation
    )
    path, length, bonus = accept_tree(
      tree, choices, depth, implementation=implementation
    )
    log_probs = token_log_probs(logits, choices, path, implementation=implementation)
    return Accepted(tree.token_ids, choices, path, length, bonus, log_probs)

  def _compact(self, arrays, data: jax.Array, inputs) -> jax.Array:
    del arrays
    return compact(data, *inputs, implementation=self.program.implementation)

  def _observe(self, arrays, tree: Tree, drafter_state: Any, inputs) -> Any:
    target, drafter = self._models(arrays)
    features, path, length, start = inputs
    slots = jnp.maximum(path, 0)
    tokens = jnp.take_along_axis(tree.token_ids, slots, axis=1)
    features = jnp.take_along_axis(features, slots[:, :, None], axis=1)
    return drafter.observe(target, drafter_state, tokens, features, start, length)

  def _emit(self, arrays, limits: Limits, state: DecodeState, accepted: Accepted):
    del arrays
    return append(state, accepted, limits, self.program.implementation)[0]


def _link_last(inputs: tuple[Any, ...], zero: jax.Array) -> tuple[Any, ...]:
  """The last of the inputs waits for `zero`."""
  return (*inputs[:-1], add_zero(inputs[-1], zero))
