"""RMSNorm in the rounding of the published code, alone or after a residual sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_static_number

# Most features of a row in the CUDA form, which counts them in ints.
MAX_WIDTH = 2**30


def rms_norm(
  x: jax.Array, weight: jax.Array, eps: float, implementation: str = "auto"
) -> jax.Array:
  """RMSNorm as DeepSeek-V3's and Qwen3's published code rounds it.

  Statistics in fp32; the normalised value is cast to `x.dtype` before it is
  multiplied by the weight (multiplying first gives other bits).

  The forms sum the squares in different orders, within fp32 rounding. In the CUDA form
  a row's bits depend on the row and the weight alone, whatever the number of rows.

  Args:
    x: [..., D].
    weight: [D], of the same dtype.
    eps: static, added to the mean square.
    implementation: "auto", "xla" or "cuda". "cuda" takes f32 and bf16.

  Returns:
    [..., D] in `x.dtype`.

  Raises:
    ValueError: shapes or dtypes that do not fit, or that "cuda" does not take.
    NotImplementedError: "cuda" without the CUDA library.
  """
  x, weight = as_array(x), as_array(weight)
  implementation = _checked("rms_norm", "x", x, weight, eps, implementation)

  def xla(x, weight):
    return rms_norm_xla(x, weight, eps)

  def cuda(x, weight):
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call(
      "kdtree_jax.rms_norm",
      jax.ShapeDtypeStruct(rows.shape, rows.dtype),
      vmap_method="sequential",
    )
    return call(rows, weight, eps=float(eps)).reshape(x.shape)

  return _implementation.dispatch("rms_norm", implementation, cuda, xla, x, weight)


def add_rms_norm(
  h: jax.Array,
  out: jax.Array,
  weight: jax.Array,
  eps: float,
  implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
  """A residual sum and its RMSNorm: `h + out` and `rms_norm(h + out, weight, eps)`.

  The sum is rounded to the dtype of `h` before the norm reads it, and is equal in every
  bit between implementations. The CUDA form is one launch.

  Args:
    h: [..., D], the residual stream.
    out: [..., D] what is added to it, of the same dtype.
    weight, eps, implementation: as in `rms_norm`.

  Returns:
    (sum [..., D], normed [..., D]), both in `h.dtype`.

  Raises:
    ValueError, NotImplementedError: as `rms_norm`.
  """
  h, out, weight = as_array(h), as_array(out), as_array(weight)
  if out.shape != h.shape or out.dtype != h.dtype:
    raise ValueError(
      f"out {out.dtype} {out.shape} must have shape and dtype of h {h.dtype} {h.shape}"
    )
  implementation = _checked("add_rms_norm", "h", h, weight, eps, implementation)

  def xla(h, out, weight):
    total = _rounded_sum(h, out)
    return total, rms_norm_xla(total, weight, eps)

  def cuda(h, out, weight):
    rows = h.reshape(-1, h.shape[-1])
    like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = jax.ffi.ffi_call(
      "kdtree_jax.add_rms_norm", (like, like), vmap_method="sequential"
    )
    total, normed = call(rows, out.reshape(rows.shape), weight, eps=float(eps))
    return total.reshape(h.shape), normed.reshape(h.shape)

  return _implementation.dispatch(
    "add_rms_norm", implementation, cuda, xla, h, out, weight
  )


def rms_norm_xla(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """The form of `rms_norm` for all platforms; its arguments are not checked."""
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype) * weight


def _rounded_sum(a: jax.Array, b: jax.Array) -> jax.Array:
  """a + b, rounded for whoever reads it.

  Of a sum in bf16, XLA otherwise gives the norm the bits that were rounded away.
  """
  if a.dtype.itemsize >= 4:
    return a + b
  kind = jnp.finfo(a.dtype)
  total = a.astype(jnp.float32) + b.astype(jnp.float32)
  return jax.lax.reduce_precision(total, kind.nexp, kind.nmant).astype(a.dtype)


def _checked(
  op: str,
  name: str,
  x: jax.Array,
  weight: jax.Array,
  eps: float,
  implementation: str,
) -> str:
  """Checks what both forms want; returns the implementation to dispatch."""
  check_static_number("eps", eps)
  if x.ndim == 0 or x.shape[-1] == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      f"{name} {x.dtype} {x.shape} must be floating [..., D] with D >= 1"
    )
  if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
    raise ValueError(
      f"weight is {weight.dtype} {weight.shape}; with {name} {x.dtype} {x.shape} it "
      f"must be {x.dtype} {x.shape[-1:]}"
    )
  obstacle = None
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    obstacle = f"{name} is {x.dtype}; it must be float32 or bfloat16"
  elif x.shape[-1] > MAX_WIDTH:
    obstacle = f"{name} has {x.shape[-1]} features; at most {MAX_WIDTH}"
  return _implementation.within_limits(op, implementation, obstacle)
