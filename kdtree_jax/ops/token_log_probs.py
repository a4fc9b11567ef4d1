"""Log-probabilities of the tokens that were chosen along a path of a draft tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_integers


def token_log_probs(
  logits: jax.Array,
  tokens: jax.Array,
  path: jax.Array,
  *,
  implementation: str = "auto",
) -> jax.Array:
  """Log-softmax of the rows on the path, each at its own token.

  `(x - max) - log(sum(exp(x - max)))` in fp32. The two forms add in different orders;
  either has its own, which does not depend on the other rows.

  Args:
    logits: f32 [B, N, V].
    tokens: i32 [B, N], the token of each row; clamped to 0 .. V - 1.
    path: i32 [B, A], rows to take, clamped to N - 1; negative for none.
    implementation: "auto", "xla" or "cuda". "cuda" reads no row off the path.

  Returns:
    f32 [B, A]; 0 where there is no row. NaN for a row that holds NaN or +inf, or
    nothing but -inf.

  Raises:
    ValueError: shapes or dtypes disagree.
    NotImplementedError: "cuda" without the CUDA library.
  """
  logits, tokens, path = map(as_array, (logits, tokens, path))
  shape = logits.shape
  if logits.dtype != jnp.float32 or len(shape) != 3 or 0 in shape[1:]:
    raise ValueError(
      f"logits {shape} {logits.dtype} must be float32 [B, N, V] with N, V >= 1"
    )
  if tokens.shape != shape[:2]:
    raise ValueError(
      f"tokens {tokens.shape} must be [B, N] = {shape[:2]}, like logits {shape}"
    )
  if path.shape[:-1] != shape[:1]:
    raise ValueError(
      f"path {path.shape} must be [B, A] = ({shape[0]}, A), like logits {shape}"
    )
  check_integers(tokens=tokens, path=path)
  tokens, path = tokens.astype(jnp.int32), path.astype(jnp.int32)
  return _implementation.dispatch(
    "token_log_probs", implementation, _cuda, _xla, logits, tokens, path
  )


def _cuda(logits: jax.Array, tokens: jax.Array, path: jax.Array) -> jax.Array:
  """The custom call `custom_calls/token_log_probs.cu`."""
  call = jax.ffi.ffi_call(
    "kdtree_jax.token_log_probs",
    jax.ShapeDtypeStruct(path.shape, jnp.float32),
    vmap_method="sequential",
  )
  return call(logits, tokens, path)


def _xla(logits: jax.Array, tokens: jax.Array, path: jax.Array) -> jax.Array:
  slots = jnp.maximum(path, 0)
  rows = jnp.take_along_axis(logits, slots[:, :, None], axis=1, mode="clip")
  log_probs = jax.nn.log_softmax(rows, axis=-1)
  chosen = jnp.take_along_axis(tokens, slots, axis=1, mode="clip")
  chosen = jnp.maximum(chosen, 0)[:, :, None]
  picked = jnp.take_along_axis(log_probs, chosen, axis=2, mode="clip")[:, :, 0]
  return jnp.where(path >= 0, picked, 0.0)
