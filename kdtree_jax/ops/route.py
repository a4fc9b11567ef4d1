"""The router of a mixture of experts: which experts a token takes, and their weights.

DeepSeek-V3's "noaux_tc" (arXiv 2412.19437, section 2.1.2) and the older softmax router.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import (
  as_array,
  check_static_integers,
  check_static_number,
)

SCORINGS = ("sigmoid", "softmax")

# Limits of the CUDA form.
MAX_EXPERTS = 1024
MAX_GROUPS = 32
MAX_CHOSEN = 32


def route(
  logits: jax.Array,
  bias: jax.Array | None = None,
  *,
  k: int,
  scoring: str,
  n_group: int = 1,
  topk_group: int = 1,
  norm_topk_prob: bool = True,
  scaling: float = 1.0,
  implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chooses k experts for each token.

  The choice is by score plus bias, inside the best groups of neighbouring experts; a
  group's score is the sum of its two best. Experts outside of them count as -inf.
  Equal ones go to the lowest id; NaN counts as the largest. The weights are the scores
  without the bias, divided by their sum (plus 1e-20) where `norm_topk_prob`, times
  `scaling`.

  The forms' scores differ within fp32 rounding, so their choices may where two experts
  are that close. In the CUDA form a token's bits depend on its own logits alone.

  Args:
    logits: f32 [T, E].
    bias: f32 [E], or None. It selects, it never weighs.
    k: experts of a token, 1 .. E.
    scoring: "sigmoid" or "softmax".
    n_group: number of groups; it divides E.
    topk_group: how many groups are kept, 1 .. n_group.
    norm_topk_prob: whether the weights are divided by their sum.
    scaling: static factor on the weights.
    implementation: "auto", "xla" or "cuda". "cuda" takes 1,024 experts in 32 groups, 32
      of them for a token.

  Returns:
    (experts i32 [T, k] best first, weights f32 [T, k], scores f32 [T, E] without bias).

  Raises:
    ValueError: an argument is not as above, or beyond the limits of "cuda".
    NotImplementedError: "cuda" without the CUDA library.
  """
  logits = as_array(logits)
  check_static_integers(k=k, n_group=n_group, topk_group=topk_group)
  check_static_number("scaling", scaling)
  if logits.dtype != jnp.float32 or logits.ndim != 2 or logits.shape[1] == 0:
    raise ValueError(
      f"logits {logits.dtype} {logits.shape} must be float32 [T, E] with E >= 1"
    )
  E = logits.shape[1]
  operands = [logits]
  if bias is not None:
    operands.append(as_array(bias))
    dtype, shape = operands[1].dtype, operands[1].shape
    if dtype != jnp.float32 or shape != (E,):
      raise ValueError(
        f"bias {dtype} {shape} must be float32 [E] = ({E},), like logits {logits.shape}"
      )
  if scoring not in SCORINGS:
    raise ValueError(f"scoring = {scoring!r} is unknown; it must be one of {SCORINGS}")
  if not 1 <= k <= E:
    raise ValueError(f"k = {k} is not allowed: it must be 1 .. E = {E}, the experts")
  if n_group < 1 or E % n_group:
    raise ValueError(f"n_group = {n_group} is not allowed: it must divide E = {E}")
  if not 1 <= topk_group <= n_group:
    raise ValueError(
      f"topk_group = {topk_group} is not allowed: it must be 1 .. n_group = {n_group}"
    )
  obstacle = None
  if E > MAX_EXPERTS:
    obstacle = f"logits has {E} experts; at most {MAX_EXPERTS}"
  elif n_group > MAX_GROUPS:
    obstacle = f"n_group = {n_group}; at most {MAX_GROUPS}"
  elif k > MAX_CHOSEN:
    obstacle = f"k = {k}; at most {MAX_CHOSEN}"
  implementation = _implementation.within_limits("route", implementation, obstacle)

  def xla(logits, bias=None):
    softmax = scoring == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if n_group > 1:
      choice = _mask_groups(choice, n_group, topk_group)
    _, experts = jax.lax.top_k(_nan_largest(choice), k)
    # Gathered from the scores: the bias selects, it never weighs.
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if norm_topk_prob:
      weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return experts, weights * scaling, scores

  def cuda(logits, *bias):
    T = logits.shape[0]
    call = jax.ffi.ffi_call(
      "kdtree_jax.route",
      (
        jax.ShapeDtypeStruct((T, k), jnp.int32),
        jax.ShapeDtypeStruct((T, k), jnp.float32),
        jax.ShapeDtypeStruct((T, E), jnp.float32),
      ),
      vmap_method="sequential",
    )
    return tuple(
      call(
        logits,
        *bias,
        softmax=int(scoring == "softmax"),
        n_group=int(n_group),
        topk_group=int(topk_group),
        norm_topk_prob=int(norm_topk_prob),
        scaling=float(scaling),
      )
    )

  return _implementation.dispatch("route", implementation, cuda, xla, *operands)


def _mask_groups(choice: jax.Array, n_group: int, topk_group: int) -> jax.Array:
  """Sets the experts outside the best groups (by top-2 sum) to -inf."""
  T, E = choice.shape
  groups = choice.reshape(T, n_group, E // n_group)
  best_two, _ = jax.lax.top_k(_nan_largest(groups), min(2, E // n_group))
  _, kept = jax.lax.top_k(_nan_largest(jnp.sum(best_two, -1)), topk_group)
  keep = jnp.any(kept[:, :, None] == jnp.arange(n_group), axis=1)
  return jnp.where(keep[:, :, None], groups, -jnp.inf).reshape(T, E)


def _nan_largest(x: jax.Array) -> jax.Array:
  """`top_k` takes NaN for the largest value, but for the smallest if its sign is set.

  Which sign NaN has depends on the device.
  """
  return jnp.where(jnp.isnan(x), jnp.nan, x)
