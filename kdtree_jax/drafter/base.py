"""The interface between the decoding loop and a drafter.

The loop knows a drafter by two numbers and three functions over arrays. What a
drafter remembers about the text lives in a state of its own making, which the
loop only carries: it is created once, told about every committed token, and
asked for a block of next-token logits once per round.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

from kdtree_jax.config import ConfigError, DrafterConfig, ModelConfig


@runtime_checkable
class Drafter(Protocol):
  """What the decoding loop needs of a drafter.

  All three functions are traced once, inside one compiled program: they must be
  pure, with shapes that follow from the shapes of their arguments. The drafter
  itself crosses `jax.jit`, so it is a pytree: an `nnx.Module`, or a frozen
  dataclass registered with `jax.tree_util.register_dataclass`. It may be as
  wrong as it likes: the target checks every token, so a bad drafter costs time
  and never changes the text.

  In the shapes below B is the number of slots (sequences decoded at once), T a
  number of tokens, D the target's hidden size and V its vocabulary. Slots are
  independent: a sequence may end and another may start in its slot at position
  0, while its neighbours go on. Rows of idle slots hold arbitrary valid values.

  A drafter that proposes the most frequent tokens of the text so far:

      @jax.tree_util.register_dataclass
      @dataclasses.dataclass(frozen=True)
      class Unigram:
        vocab_size: int = dataclasses.field(metadata={"static": True})
        max_depth = 4
        feature_layers = ()

        def init_state(self, slots, cache_len):
          return jnp.zeros((slots, self.vocab_size), jnp.int32)

        def observe(self, target, state, tokens, features, start, count):
          state = jnp.where((start == 0)[:, None], 0, state)  # a new sequence
          live = jnp.arange(tokens.shape[1]) < count[:, None]
          row = jnp.arange(len(state))[:, None]
          return state.at[row, tokens].add(live.astype(jnp.int32))

        def draft(self, target, state, root_tokens, lengths, sequence_ids):
          logits = jnp.log(state + 1.0)[:, None]
          return jnp.broadcast_to(logits, (len(state), 4, self.vocab_size))

  Attributes:
    max_depth: rows of logits per pass (L), the depth of the deepest tree.
    feature_layers: target layers whose residual stream the drafter reads, 0
      being the first; the stream is taken AFTER the layer, before any final
      norm. () if it reads none.
  """

  @property
  def max_depth(self) -> int: ...

  @property
  def feature_layers(self) -> tuple[int, ...]: ...

  def init_state(self, slots: int, cache_len: int) -> Any:
    """The state of `slots` empty sequences.

    Args:
      slots: B, sequences decoded at once.
      cache_len: positions that a sequence may reach.

    Returns:
      A pytree of arrays whose shapes stay the same from then on.
    """
    ...

  def observe(
    self,
    target: Any,
    state: Any,
    tokens: jax.Array,
    features: jax.Array,
    start: jax.Array,
    count: jax.Array,
  ) -> Any:
    """Takes note of committed tokens (the prompt's too).

    Args:
      target: offers `embed(tokens) -> [.., D]`, `head(hidden) -> f32 [.., V]`
        and `config: ModelConfig`.
      state: from `init_state` or the call before.
      tokens: i32 [B, T]; the first `count[b]` of row b were committed at
        absolute positions `start[b] .. start[b] + count[b] - 1`.
      features: [B, T, len(feature_layers) * D], the residual streams of those
        tokens, concatenated in the order of `feature_layers`.
      start: i32 [B]; 0 begins a new sequence.
      count: i32 [B], 0 .. T. Rows at and beyond it are garbage (NaN features
        included) and must leave no trace.

    Returns:
      The new state.
    """
    ...

  def draft(
    self,
    target: Any,
    state: Any,
    root_tokens: jax.Array,
    lengths: jax.Array,
    sequence_ids: jax.Array,
  ) -> jax.Array:
    """Logits of the next tokens, given everything observed and the root.

    Args:
      target: as in `observe`.
      state: as in `observe`; it is not changed.
      root_tokens: i32 [B], the last token, chosen but not yet observed. It sits
        at absolute position `lengths[b]`.
      lengths: i32 [B], committed tokens; only positions below it may be used,
        whatever else the state holds.
      sequence_ids: i32 [B], the caller's names of the sequences.

    Returns:
      f32 [B, L, V]; row k (from 0) is about the token at `lengths + 1 + k`.
    """
    ...


_METHODS = ("init_state", "observe", "draft")
_ATTRIBUTES = ("max_depth", "feature_layers")


def check_drafter(
  drafter: Any, target_config: ModelConfig, fingerprint: str | None = None
) -> None:
  """Raises unless `drafter` can draft for a target.

  A drafter whose taps, vocabulary or target are not the ones that it was made
  for still runs, and its proposals are then rejected one and all; nothing but
  the speed shows it. So what can be known beforehand is checked here.

  Args:
    drafter: what is to be used as a `Drafter`.
    target_config: the target's configuration.
    fingerprint: the target's fingerprint, or None where unknown; compared with
      `DrafterConfig.target_fingerprint` if that is known too.

  Raises:
    ConfigError: it names what is missing or does not fit.
  """
  name = type(drafter).__name__
  for method in _METHODS:
    if not callable(getattr(drafter, method, None)):
      raise ConfigError(f"drafter {name} has no method {method}; it needs {_METHODS}")
  for attribute in _ATTRIBUTES:
    if not hasattr(drafter, attribute):
      raise ConfigError(
        f"drafter {name} has no attribute {attribute}; it needs {_ATTRIBUTES}"
      )
  depth = drafter.max_depth
  if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
    raise ConfigError(
      f"{name}.max_depth = {depth!r} is not allowed: it must be a positive integer"
    )
  _check_taps(name, drafter.feature_layers, target_config.num_hidden_layers)
  config = getattr(drafter, "config", None)
  if isinstance(config, DrafterConfig):
    _check_config(config, target_config, fingerprint)
  elif isinstance(getattr(drafter, "vocab_size", None), int):
    _same("vocab_size", drafter.vocab_size, "vocab_size", target_config.vocab_size)


def _check_taps(name: str, taps: Any, num_layers: int) -> None:
  if not isinstance(taps, tuple):
    raise ConfigError(
      f"{name}.feature_layers = {taps!r} is not allowed: it must be a tuple of layers"
    )
  for tap in taps:
    if not isinstance(tap, int) or not 0 <= tap < num_layers:
      raise ConfigError(
        f"{name}.feature_layers = {taps!r} is not allowed: the target has layers 0 "
        f"to {num_layers - 1}, and tap l is the residual stream after layer l"
      )


def _same(field: str, value: object, target_field: str, wanted: object) -> None:
  if value != wanted:
    raise ConfigError(
      f"drafter {field} = {value!r} does not fit the target, whose {target_field} "
      f"is {wanted!r}"
    )


def _check_config(
  config: DrafterConfig, target: ModelConfig, fingerprint: str | None
) -> None:
  _same("vocab_size", config.vocab_size, "vocab_size", target.vocab_size)
  # The target's own embedding and head are used, so the widths must agree.
  _same("hidden_size", config.hidden_size, "hidden_size", target.hidden_size)
  _same(
    "target_hidden_size", config.target_hidden_size, "hidden_size", target.hidden_size
  )
  _same(
    "num_target_layers",
    config.num_target_layers,
    "num_hidden_layers",
    target.num_hidden_layers,
  )
  bond = config.target_fingerprint
  if bond is not None and fingerprint is not None and bond != fingerprint:
    raise ConfigError(
      f"drafter target_fingerprint = {bond!r} is not this target's "
      f"({fingerprint!r}): a drafter fits only the exact weights that it was trained "
      "on. Load the target that it belongs to, or set target_fingerprint to None to "
      "use it all the same"
    )
