"""RMSNorm in the rounding of the published code."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """RMSNorm as DeepSeek-V3's and Qwen3's published code rounds it.

  Statistics in fp32; the normalised value is cast to `x.dtype` before it is
  multiplied by the weight (multiplying first gives other bits).

  Args:
    x: [..., D].
    weight: [D], of the same dtype.
    eps: added to the mean square.

  Returns:
    [..., D] in `x.dtype`.
  """
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype) * weight
