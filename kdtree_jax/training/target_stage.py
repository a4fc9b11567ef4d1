"""The target as a language model: loss, expert balance, fake int4 experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from kdtree_jax.config import ModelConfig
from kdtree_jax.model.moe import DENSE_EXPERTS, CorrectionBias
from kdtree_jax.model.target import Target
from kdtree_jax.training.config import TrainConfig
from kdtree_jax.training.optimizer import TrainState, apply_gradients, init_state
from kdtree_jax.training.quantize import fake_int4_experts

Metrics = dict[str, jax.Array]
StepFn = Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]


class TargetStage:
  """Everything that the training loop needs to train a target.

  Args:
    model_config: of the target, built with random values from `config.seed`.
    config: of the stage.
    optimizer: see `make_optimizer`.
    dtype: compute dtype of the forward and backward pass.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    dtype: jnp.dtype,
  ):
    self.config, self.optimizer, self.dtype = config, optimizer, dtype
    target = Target(model_config, dtype=jnp.float32, rngs=nnx.Rngs(config.seed))
    self.graph, params, bias, self.constants = nnx.split(
      target, nnx.Param, CorrectionBias, ...
    )
    self.state = init_state(params, bias, optimizer)
    self.dense_experts = model_config.n_routed_experts <= DENSE_EXPERTS
    # cuDNN's attention is for bf16 on a GPU.
    self.flash = dtype == jnp.bfloat16 and jax.default_backend() == "gpu"

  def target(self, state: TrainState) -> Target:
    """The target with the state's fp32 parameters."""
    return nnx.merge(self.graph, state.params, state.extra, self.constants)

  def loss(self, params, bias, tokens: jax.Array, quantized: bool):
    """Mean next-token cross entropy in nats.

    Args:
      params: fp32; cast to the compute dtype but for the router's kernels.
      bias: correction biases.
      tokens: i32 [B, T + 1].
      quantized: run the routed experts under fake int4.

    Returns:
      (loss, f32 [moe layers, E] share of the routed slots per expert).
    """
    if quantized:
      params = fake_int4_experts(params, self.dense_experts)
    model = nnx.merge(self.graph, cast_params(params, self.dtype), bias, self.constants)
    hidden, _, routings = model.sequence(tokens[:, :-1], flash=self.flash)
    logits = model.head(hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    loads = [
      jnp.mean(jax.nn.one_hot(r.experts, r.scores.shape[-1]), (0, 1)) for r in routings
    ]
    return jnp.mean(losses), jnp.stack(loads) if loads else jnp.zeros((0, 1))

  def step_fn(self, quantized: bool) -> StepFn:
    """A jitted step: (state, flat tokens u16/i32 [M]) -> (state, metrics)."""

    def step(state: TrainState, data: jax.Array):
      tokens = sample_windows(state.step, data, self.config)
      (loss, loads), grads = jax.value_and_grad(self.loss, has_aux=True)(
        state.params, state.extra, tokens, quantized
      )
      extra = self._balance(state.extra, loads)
      state, metrics = apply_gradients(state, self.optimizer, loss, grads, extra)
      # 1 is perfect balance, E / top-k the worst.
      peak = jnp.max(loads) * loads.shape[-1] if loads.size else jnp.ones(())
      return state, {"loss": loss, "max_load": peak, **metrics}

    return jax.jit(step, donate_argnums=0)

  def _balance(self, bias, loads: jax.Array):
    """Moves each bias by a fixed step towards an even load."""
    leaves, tree = jax.tree.flatten(bias)
    rate = self.config.bias_update_rate
    moved = [
      b + rate * jnp.sign(jnp.mean(load) - load)
      for b, load in zip(leaves, loads, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)

  def eval_fn(self, quantized: bool) -> Callable[[TrainState, jax.Array], jax.Array]:
    """A jitted mean loss over tokens i32 [K, B, T + 1]."""

    def evaluate(state: TrainState, batches: jax.Array) -> jax.Array:
      def one(tokens):
        return self.loss(state.params, state.extra, tokens, quantized)[0]

      return jnp.mean(jax.lax.map(one, batches))

    return jax.jit(evaluate)


def cast_params(params, dtype: jnp.dtype):
  """Casts all but the router's kernels, which stay fp32."""

  def cast(path, value):
    is_router = any(getattr(key, "key", None) == "gate" for key in path)
    return value if is_router else value.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def sample_windows(step: jax.Array, data: jax.Array, config: TrainConfig) -> jax.Array:
  """Random windows i32 [B, T + 1] of the token stream, a function of the step."""
  key = jax.random.fold_in(jax.random.key(config.seed), step)
  last = data.shape[0] - config.sequence_length - 1
  starts = jax.random.randint(key, (config.batch_size,), 0, last)
  offsets = jnp.arange(config.sequence_length + 1)
  return data[starts[:, None] + offsets].astype(jnp.int32)
