"""Fake int4 in training: experts learn to live with what will be shipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GROUP = 32


def fake_int4(w: jax.Array, axis: int) -> jax.Array:
  """Rounds to symmetric int4 in groups of 32 along `axis`, straight through.

  The forward value is what `kdtree_jax.checkpoint.int4` stores: scale =
  bf16(amax / 7), nibble = clip(rint(w / scale), -8, 7). The gradient passes
  unchanged.

  Args:
    w: f32; `w.shape[axis]` must be a multiple of 32.
    axis: input dimension.
  """
  moved = jnp.moveaxis(w, axis, -1)
  groups = moved.reshape(*moved.shape[:-1], -1, GROUP)
  scale = jnp.max(jnp.abs(groups), -1, keepdims=True) / 7
  # Not a cast to bf16 and back: XLA drops that pair.
  scale = jax.lax.reduce_precision(jnp.maximum(scale, 1e-5), 8, 7)
  rounded = jnp.clip(jnp.round(groups / scale), -8, 7) * scale
  rounded = jnp.moveaxis(rounded.reshape(moved.shape), -1, axis)
  return w + jax.lax.stop_gradient(rounded - w)


def fake_int4_experts(params, dense: bool):
  """Applies `fake_int4` to the routed experts of a target's parameters.

  Args:
    params: nnx state of a target's `nnx.Param` variables.
    dense: layout of `Experts.gate_up`, see `kdtree_jax.model.moe.Experts`.
  """

  def quantize(path, value):
    keys = [getattr(key, "key", None) for key in path]
    if "experts" not in keys:
      return value
    if "down" in keys:  # [E, F, D]
      return fake_int4(value, 1)
    return fake_int4(value, 0 if dense else 1)  # gate_up [D, E, 2F] or [E, D, 2F]

  return jax.tree_util.tree_map_with_path(quantize, params)
