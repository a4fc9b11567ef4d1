"""The drafter on its target's hidden states."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from kdtree_jax.config import DrafterConfig
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.model.target import Target
from kdtree_jax.training.config import TrainConfig
from kdtree_jax.training.drafter_loss import drafter_loss, sample_anchors
from kdtree_jax.training.optimizer import TrainState, apply_gradients, init_state

Metrics = dict[str, jax.Array]


class DrafterStage:
  """Everything that the training loop needs to train a DFlash drafter.

  The target is frozen: its hidden states are computed as the steps need them,
  and its embedding and head serve the drafter.

  Args:
    drafter_config: built with random values from `config.seed`.
    target: the trained target, in the compute dtype.
    prompt_length: tokens at the start of each sequence that are not the
      target's own; no block starts there.
    config: of the stage.
    optimizer: see `make_optimizer`.
  """

  def __init__(
    self,
    drafter_config: DrafterConfig,
    target: Target,
    prompt_length: int,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
  ):
    self.config, self.optimizer = config, optimizer
    self.prompt_length = prompt_length
    self.dtype = target.dtype
    drafter = DFlash(drafter_config, dtype=jnp.float32, rngs=nnx.Rngs(config.seed))
    self.graph, params, self.constants = nnx.split(drafter, nnx.Param, ...)
    self.state = init_state(params, {}, optimizer)
    self.target_graph, self.target_state = nnx.split(target)
    self.flash = self.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"

  def drafter(self, state: TrainState) -> DFlash:
    """The drafter with the state's fp32 parameters."""
    return nnx.merge(self.graph, state.params, self.constants)

  def _loss(self, params, target_state, tokens: jax.Array, key: jax.Array):
    target = nnx.merge(self.target_graph, target_state)
    params = jax.tree.map(lambda p: p.astype(self.dtype), params)
    drafter = nnx.merge(self.graph, params, self.constants)
    _, features, _ = target.sequence(
      tokens, feature_layers=drafter.feature_layers, flash=self.flash
    )
    features = jax.lax.stop_gradient(features)
    own = jnp.arange(tokens.shape[1]) >= self.prompt_length
    mask = jnp.broadcast_to(own, tokens.shape)
    anchors, valid = sample_anchors(key, mask, self.config.anchors)
    return drafter_loss(
      drafter,
      target,
      features,
      tokens,
      anchors,
      valid,
      self.config.loss_gamma,
      dpace_smoothing=self.config.dpace_smoothing,
    )

  def step_fn(self) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted step: (state, (target state, samples u16 [K, T])) -> state, metrics."""

    def step(state: TrainState, data):
      target_state, samples = data
      key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
      rows_key, anchor_key = jax.random.split(key)
      rows = jax.random.randint(
        rows_key, (self.config.batch_size,), 0, samples.shape[0]
      )
      tokens = samples[rows].astype(jnp.int32)
      (loss, aux), grads = jax.value_and_grad(self._loss, has_aux=True)(
        state.params, target_state, tokens, anchor_key
      )
      state, metrics = apply_gradients(state, self.optimizer, loss, grads, state.extra)
      return state, {"loss": loss, **_scalars(aux), **metrics}

    return jax.jit(step, donate_argnums=0)

  def eval_fn(self) -> Callable[[TrainState, tuple], Metrics]:
    """Jitted metrics on samples u16 [K, B, T] that are not trained on."""

    def evaluate(state: TrainState, data):
      target_state, samples = data

      def one(pair):
        index, tokens = pair
        key = jax.random.fold_in(jax.random.key(self.config.seed + 1), index)
        loss, aux = self._loss(
          state.params, target_state, tokens.astype(jnp.int32), key
        )
        return {"loss": loss, **_scalars(aux)}

      metrics = jax.lax.map(one, (jnp.arange(samples.shape[0]), samples))
      return jax.tree.map(jnp.mean, metrics)

    return jax.jit(evaluate)


def _scalars(aux: Metrics) -> Metrics:
  """Spreads per-position metrics [L] over names of their own."""
  out = {}
  for name, value in aux.items():
    if value.ndim == 0:
      out[name] = value
    else:
      out.update({f"{name}_{i + 1}": value[i] for i in range(value.shape[0])})
  return out
