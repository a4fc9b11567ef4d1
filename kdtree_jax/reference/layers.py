"""The small layers that every part of the model shares.

All take float32 or float64 (or a narrower float) and compute in the wider of
the input's dtype and float32, so the same code serves as the float32 reference
and, given float64 inputs, as the oracle of its rounding errors.
"""

from __future__ import annotations

import numpy as np


def widen(x: np.ndarray) -> np.ndarray:
  """`x` in float32, or in float64 if it has that already."""
  return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
  """`x [..., in] @ weight [out, in].T`, both in the dtype of `x`.

  Sums are formed in at least float32 and rounded once to the dtype of `x`.
  """
  weight = weight.astype(x.dtype, copy=False)
  return (widen(x) @ widen(weight).T).astype(x.dtype, copy=False)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
  """RMSNorm over the last axis (modeling_deepseek.py, DeepseekV3RMSNorm).

  The normalised value is cast back to the dtype of `x` before the weight is
  applied in that dtype: one rounding more than a fused form has.
  """
  wide = widen(x)
  mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
  normed = wide * (1 / np.sqrt(mean_square + wide.dtype.type(eps)))
  return normed.astype(x.dtype) * weight.astype(x.dtype, copy=False)


def sigmoid(x: np.ndarray) -> np.ndarray:
  """`1 / (1 + exp(-x))`; 0 where exp overflows, which is its limit."""
  with np.errstate(over="ignore"):
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
  """`x * sigmoid(x)`, rounded once to the dtype of `x`."""
  wide = widen(x)
  return (wide * sigmoid(wide)).astype(x.dtype)


def swiglu(
  x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
  """`down(silu(gate x) * up x)` (arXiv 2002.05202, section 2).

  Args:
    x: inputs [..., D].
    gate: weight [F, D].
    up: weight [F, D].
    down: weight [D, F].

  Returns:
    [..., D] in the dtype of `x`.
  """
  return linear(silu(linear(x, gate)) * linear(x, up), down)


def softmax(x: np.ndarray) -> np.ndarray:
  """Softmax over the last axis, in at least float32."""
  wide = widen(x)
  exps = np.exp(wide - np.max(wide, axis=-1, keepdims=True))
  return exps / np.sum(exps, axis=-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
  """Log-softmax over the last axis as `x - (max + log(sum(exp(x - max))))`.

  The order of these operations is part of the definition: it decides the last
  bits of a draft tree's scores. A row with NaN or +inf, or of -inf only, is NaN.
  """
  wide = widen(x)
  with np.errstate(invalid="ignore"):
    top = np.max(wide, axis=-1, keepdims=True)
    return wide - (top + np.log(np.sum(np.exp(wide - top), axis=-1, keepdims=True)))
