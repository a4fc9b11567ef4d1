"""Times of a round's stages, each compiled and run alone on a round's shapes.

A stage is repeated inside one compiled loop, as it is in decoding, because to
start a program costs more than some stages take. In decoding the stages are one
program, where some of their work overlaps or fuses. So these figures show where
the time goes, and their sum is compared with the measured round rather than
taken for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax import functional
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.emit import Accepted, append
from kdtree_jax.decoding.rounds import verify_step
from kdtree_jax.decoding.sampling import Sampler
from kdtree_jax.decoding.state import DecodeState, Limits
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target
from kdtree_jax.ops.accept_tree import accept_tree
from kdtree_jax.ops.build_tree import build_tree, chain_tree
from kdtree_jax.ops.compaction import compact
from kdtree_jax.ops.token_log_probs import token_log_probs
from kdtree_jax.tree import Tree

RUNS = 3
STAGES = ("draft", "build", "verify", "accept", "commit")


class StageTimer:
  """Measures the stages after one prompt, in one slot.

  Args:
    target: the model.
    drafter: its drafter.
    prompt: tokens.
    config: temperature, seed, max_new_tokens and implementation.
    cache_len: positions of the cache, as in the decoding compared with.
    repeats: passes per measurement; the median of `RUNS` measurements counts.
  """

  def __init__(
    self,
    target: Target,
    drafter: Any,
    prompt: Sequence[int],
    config: DecodeConfig,
    cache_len: int,
    repeats: int,
  ):
    self._config, self._repeats = config, repeats
    self._depth = drafter.max_depth
    self._taps = tuple(drafter.feature_layers)
    self._statics, self._arrays = zip(
      modules.split(target), modules.split(drafter), strict=True
    )
    self._sampler = Sampler.create(config.temperature, config.top_p, config.seed)
    self._limits = Limits(
      stop_tokens=jnp.full((4,), -1, jnp.int32),
      capacity=jnp.asarray(cache_len, jnp.int32),
      budget=jnp.asarray(0, jnp.int32),
    )
    self._state = start_state(
      self._statics, self._arrays, self._taps, prompt, cache_len, config
    )
    self._drafted: tuple[float, jax.Array] | None = None

  def measure(self, method: str, budget: int, rows: int) -> dict[str, float]:
    """Milliseconds of each of `STAGES`; plain decoding neither drafts nor builds."""
    state, config = self._state, self._config
    plain = method == "plain"
    depth = 0 if plain else min(self._depth, rows - 1)

    def build(_, __, draft_logits, root, limit):
      draft_logits = draft_logits[:, :depth]
      if method == "chain":
        return chain_tree(
          draft_logits,
          root,
          rows=rows,
          limit=limit,
          implementation=config.implementation,
        )
      return build_tree(
        draft_logits,
        root,
        rows - 1,
        rows=rows,
        limit=limit,
        max_depth=jnp.asarray(depth),
        implementation=config.implementation,
      )

    # As in decoding, plain decoding has no drafter, and no features to tap.
    def verify(target, _, cache, tree):
      taps = () if plain else self._taps
      return verify_step(target, cache, tree, taps, config.implementation)

    def accept(_, __, logits, tree, state):
      implementation = config.implementation
      positions = state.cache.lengths + 1
      choices = self._sampler.choose(
        logits, state.sequence_ids, positions, tree.depths, depth, implementation
      )
      path, length, bonus = accept_tree(
        tree, choices, depth, implementation=implementation
      )
      log_probs = token_log_probs(logits, choices, path, implementation=implementation)
      return Accepted(tree.token_ids, choices, path, length, bonus, log_probs)

    def commit(target, drafter, state, *args):
      return self._commit(target, None if plain else drafter, state, *args)

    times: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    tree = Tree.root_only(state.root, rows)
    if not plain:
      if self._drafted is None:
        self._drafted = self._time(self._draft, (state,))
      times["draft"], draft_logits = self._drafted
      args = (draft_logits, state.root, jnp.asarray(budget, jnp.int32))
      times["build"], tree = self._time(build, args)
    times["verify"], verified = self._time(verify, (state.cache, tree))
    times["accept"], accepted = self._time(accept, (verified[0], tree, state))
    args = (state, *verified[1:], accepted)
    times["commit"], _ = self._time(commit, args, carried=True)
    return times

  def _time(
    self, stage: Callable[..., Any], args: tuple[Any, ...], carried: bool = False
  ) -> tuple[float, Any]:
    """Milliseconds of `stage(target, drafter, *args)`, and what it returns.

    Args:
      stage: pure and jittable.
      args: arrays.
      carried: the stage returns a new value of its first argument, which is
        updated in place.
    """

    def repeat(arrays, count, zero, args):
      models = list(map(modules.merge, self._statics, arrays))

      def body(i, out):
        # Arguments that change, as far as the compiler knows: it would move what
        # stays the same out of the loop. Caches are spared, for they are large.
        def fresh(x):
          return x if x.ndim > 3 else x + (i * zero).astype(x.dtype)

        changing = jax.tree.map(fresh, args[carried:])
        return stage(*models, *((out,) if carried else ()), *changing)

      if carried:
        return jax.lax.fori_loop(0, count, body, args[0])
      shapes = jax.eval_shape(stage, *models, *args)
      empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      return jax.lax.fori_loop(0, count, body, empty)

    jitted = jax.jit(repeat)
    out = jax.block_until_ready(jitted(self._arrays, 1, 0, args))
    runs = []
    for _ in range(RUNS):
      start = time.perf_counter()
      jax.block_until_ready(jitted(self._arrays, self._repeats, 0, args))
      runs.append((time.perf_counter() - start) / self._repeats)
    return 1e3 * float(np.median(runs)), out

  def _draft(self, target, drafter, state: DecodeState) -> jax.Array:
    return drafter.draft(
      target, state.drafter, state.root, state.cache.lengths, state.sequence_ids
    )

  def _commit(
    self, target, drafter, state: DecodeState, features, keys, accepted: Accepted
  ) -> DecodeState:
    """Writes what the round accepted, and goes back to the same position."""
    implementation, path = self._config.implementation, accepted.path
    lengths = state.cache.lengths
    new_state, new = append(state, accepted, self._limits, implementation)
    data = compact(
      state.cache.data, keys, path, new.length, lengths, implementation=implementation
    )
    drafter_state = state.drafter
    if drafter is not None:
      slots = jnp.maximum(path, 0)[:, :, None]
      path_features = jnp.take_along_axis(features, slots, axis=1)
      drafter_state = drafter.observe(
        target, drafter_state, new.path_tokens, path_features, lengths, new.length
      )
    return dataclasses.replace(
      new_state,
      cache=LatentCache(data, lengths),
      drafter=drafter_state,
      root=state.root,
      finish=state.finish,
      generated=state.generated,
      rounds=state.rounds,
    )


def start_state(
  statics: Sequence[Any],
  arrays: Sequence[Any],
  taps: tuple[int, ...],
  prompt: Sequence[int],
  cache_len: int,
  config: DecodeConfig,
) -> DecodeState:
  """The state in which the first round after a prompt begins, in one slot.

  Args:
    statics: structures of target and drafter, see `kdtree_jax.decoding.modules`.
    arrays: their arrays.
    taps: the drafter's feature layers.
    prompt: tokens.
    cache_len: positions of the cache at least.
    config: max_new_tokens and implementation.
  """
  chunk = functional.PREFILL_CHUNK
  tokens = np.zeros((1, -(-len(prompt) // chunk) * chunk), np.int32)
  tokens[0, : len(prompt)] = prompt
  lengths = jnp.asarray([len(prompt)], jnp.int32)

  @jax.jit
  def start(arrays, tokens):
    target, drafter = map(modules.merge, statics, arrays)
    cache, logits, features = functional.prefill(
      target,
      tokens,
      max(cache_len, tokens.shape[1]),
      lengths=lengths,
      feature_layers=taps,
      implementation=config.implementation,
    )
    context = functional.observe(
      drafter,
      target,
      functional.draft_context(drafter, 1, cache.capacity),
      tokens,
      features,
      lengths,
    )
    state = DecodeState.empty(
      cache, context.state, config.max_new_tokens, logits.shape[-1], False
    )
    return dataclasses.replace(
      state,
      root=jnp.argmax(logits, axis=-1).astype(jnp.int32),
      finish=jnp.zeros_like(state.finish),
      generated=jnp.ones_like(state.generated),
    )

  return start(arrays, jnp.asarray(tokens))
