"""The greedy choice: the token of the largest logit, if the logits can be used."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array

# Stands for a token that could not be chosen: the logits were not finite.
NO_TOKEN = -1


def best_token(logits: jax.Array, *, implementation: str = "auto") -> jax.Array:
  """The token of the largest logit of each row.

  Args:
    logits: f32 [..., V].
    implementation: "auto", "xla" or "cuda". "cuda" reads the logits once, in one
      launch.

  Returns:
    i32 [...]; equal logits go to the lowest id; `NO_TOKEN` where a row holds NaN or
    +inf, or nothing but -inf.

  Raises:
    ValueError: the logits have another dtype, or no tokens.
    NotImplementedError: "cuda" without the CUDA library.
  """
  logits = as_array(logits)
  if logits.dtype != jnp.float32 or logits.ndim == 0 or logits.shape[-1] == 0:
    raise ValueError(
      f"logits {logits.shape} {logits.dtype} must be float32 [..., V] with V >= 1"
    )
  return _implementation.dispatch("best_token", implementation, _cuda, _xla, logits)


def _cuda(logits: jax.Array) -> jax.Array:
  """The custom call `custom_calls/best_token.cu`."""
  rows = logits.reshape(-1, logits.shape[-1])
  call = jax.ffi.ffi_call(
    "kdtree_jax.best_token",
    jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32),
    vmap_method="sequential",
  )
  return call(rows).reshape(logits.shape[:-1])


def _xla(logits: jax.Array) -> jax.Array:
  # A maximum is NaN where any logit is, and infinite where one is.
  usable = jnp.isfinite(jnp.max(logits, axis=-1))
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  return jnp.where(usable, best, NO_TOKEN)
