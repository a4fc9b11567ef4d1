"""AdamW with warm-up and cosine decay; a step with bad numbers is skipped."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kdtree_jax.training.config import TrainConfig

Params = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that a resumed run needs.

  Attributes:
    params: fp32 parameters that the optimiser moves.
    extra: parameters moved by other rules (the router's correction biases).
    opt_state: optax's.
    step: i32, steps taken.
    skipped: i32, steps skipped because loss or gradient was not finite.
  """

  params: Params
  extra: Params
  opt_state: optax.OptState
  step: jax.Array
  skipped: jax.Array


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
  """AdamW (betas 0.9 and 0.95) under a global norm clip."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.steps, 0.0
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      schedule,
      b1=0.9,
      b2=0.95,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    ),
  )


def init_state(
  params: Params, extra: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """The state before the first step (each leaf a buffer of its own, for donation)."""
  return TrainState(
    params,
    extra,
    optimizer.init(params),
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
  )


def apply_gradients(
  state: TrainState,
  optimizer: optax.GradientTransformation,
  loss: jax.Array,
  grads: Params,
  new_extra: Params,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimiser step, or none where loss or gradients are not finite.

  A skipped step leaves parameters and optimiser as they were; `step` advances,
  so the next step sees other data.

  Returns:
    (new state, {"grad_norm", "skipped"}).
  """
  norm = optax.tree.norm(grads)
  good = jnp.isfinite(loss) & jnp.isfinite(norm)
  safe = jax.tree.map(lambda g: jnp.where(good, g, 0), grads)
  updates, opt_state = optimizer.update(safe, state.opt_state, state.params)

  def choose(new, old):
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

  skipped = state.skipped + (~good).astype(jnp.int32)
  new_state = TrainState(
    params=choose(optax.apply_updates(state.params, updates), state.params),
    extra=choose(new_extra, state.extra),
    opt_state=choose(opt_state, state.opt_state),
    step=state.step + 1,
    skipped=skipped,
  )
  return new_state, {"grad_norm": norm, "skipped": skipped}
