"""Matrix products with fp32 accumulation and one rounding.

In the CUDA forms a row's bits depend on the row and the weights alone: an element is
summed in an order that follows from the sizes of the weights, whatever the number of
rows. XLA's products keep a row's bits at one number of rows only.

The CPU backend has no bf16 x bf16 -> fp32 product (and its bf16 product takes
another path for the last rows), so there the operands are upcast first. That is
exact, and keeps a row's bits independent of its neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array
from kdtree_jax.ops.int4_weight import Int4Weight
from kdtree_jax.ops.silu import silu_times

_FLOATS = (jnp.float32, jnp.bfloat16)


def einsum(
  spec: str, x: jax.Array, w: jax.Array, out_dtype: jnp.dtype = jnp.float32
) -> jax.Array:
  """`jnp.einsum` of two operands in true fp32 (no TF32), accumulated in fp32.

  Args:
    spec: subscripts of a contraction of two operands.
    x: first operand, f32 or bf16.
    w: second operand, of the same dtype.
    out_dtype: dtype that the fp32 sums are rounded to, once.
  """

  def product(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = x.dtype == jnp.float32
    return jnp.einsum(
      spec,
      x,
      w,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32 if wide else out_dtype,
    )

  if x.dtype == w.dtype == jnp.float32:
    return product(x, w)
  return jax.lax.platform_dependent(
    x,
    w,
    cpu=lambda x, w: product(x.astype(jnp.float32), w.astype(jnp.float32)).astype(
      out_dtype
    ),
    default=product,
  )


def matmul(
  x: jax.Array,
  w: jax.Array,
  implementation: str = "auto",
  *,
  out_dtype: jax.typing.DTypeLike | None = None,
  by_feature: bool = False,
) -> jax.Array:
  """`x @ w`, rounded once.

  Args:
    x: [..., K] activations, f32 or bf16.
    w: [K, N] kernel of the same dtype; f32 with bf16 activations, which then count as
      f32.
    implementation: "auto", "xla" or "cuda". In bf16 the CUDA form reads kernels whose
      K is a multiple of 16 and N of 8 as they are, and others after copying them.
    out_dtype: f32 or bf16; None for `x.dtype`.
    by_feature: the kernel is [N, K].

  Returns:
    [..., N] in `out_dtype`.

  Raises:
    ValueError: shapes or dtypes that do not fit.
    NotImplementedError: "cuda" without the CUDA library.
  """
  x, w = as_array(x), _array("w", w)
  _check("w", x, w, 2)
  K = w.shape[1 if by_feature else 0]
  if x.ndim < 1 or x.shape[-1] != K:
    raise ValueError(f"x {list(x.shape)} must be [..., {K}] to fit w {list(w.shape)}")
  out_dtype = _float_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype)

  def xla(x, w):
    rows = x.reshape(-1, K).astype(w.dtype)
    if w.dtype == jnp.float32:
      out = einsum("nk,mk->nm" if by_feature else "nk,km->nm", rows, w)
    else:
      out = einsum("nk,mk->nm" if by_feature else "nk,km->nm", rows, w, out_dtype)
    return out.astype(out_dtype).reshape(*x.shape[:-1], out.shape[-1])

  def cuda(x, w):
    return _product(x, w, out_dtype, by_feature=by_feature)

  return _implementation.dispatch("matmul", implementation, cuda, xla, x, w)


def gated_matmul(x: jax.Array, w: jax.Array, implementation: str = "auto") -> jax.Array:
  """SwiGLU's first half: `silu(x @ gate) * (x @ up)`, see `silu_times`.

  Both products are rounded to the dtype of `x` before silu.

  Args:
    x: [..., K], f32 or bf16.
    w: [K, 2F] of the same dtype, gate in the first F columns.
    implementation: as in `matmul`.

  Returns:
    [..., F] in `x.dtype`.

  Raises:
    ValueError, NotImplementedError: as `matmul`.
  """
  x, w = as_array(x), _array("w", w)
  _check("w", x, w, 2)
  if w.dtype != x.dtype or w.shape[1] % 2:
    raise ValueError(
      f"w {w.dtype} {list(w.shape)} must be [K, 2F] in the dtype of x, {x.dtype}"
    )
  if x.ndim < 1 or x.shape[-1] != w.shape[0]:
    raise ValueError(
      f"x {list(x.shape)} must be [..., {w.shape[0]}] to fit w {list(w.shape)}"
    )

  def xla(x, w):
    gate, up = jnp.split(matmul(x, w, "xla"), 2, axis=-1)
    return silu_times(gate, up)

  def cuda(x, w):
    return _product(x, w, x.dtype, gated=True)

  return _implementation.dispatch("gated_matmul", implementation, cuda, xla, x, w)


def head_matmul(x: jax.Array, w: jax.Array, implementation: str = "auto") -> jax.Array:
  """Each head's rows times its own kernel: `x[..., h, :K] @ w[h]`.

  Args:
    x: [..., H, X], f32 or bf16. Columns from K on are not read.
    w: [H, K, N] of the same dtype, K <= X.
    implementation: as in `matmul`.

  Returns:
    [..., H, N] in `x.dtype`, accumulated in fp32 and rounded once.

  Raises:
    ValueError, NotImplementedError: as `matmul`.
  """
  x, w = as_array(x), _array("w", w)
  _check("w", x, w, 3)
  H, K, N = w.shape
  if w.dtype != x.dtype or x.ndim < 2 or x.shape[-2] != H or x.shape[-1] < K:
    raise ValueError(
      f"x {x.dtype} {list(x.shape)} must be [..., {H}, {K} or more] in the dtype of w, "
      f"{w.dtype} {list(w.shape)}"
    )

  def xla(x, w):
    rows = x.reshape(-1, *x.shape[-2:])[..., :K]
    return einsum("nhk,hkm->nhm", rows, w, x.dtype).reshape(*x.shape[:-1], N)

  def cuda(x, w):
    rows = x.reshape(-1, *x.shape[-2:])
    if x.dtype == jnp.bfloat16:
      # Whole multiples; see `_product`.
      if K % 16 or x.shape[-1] % 8:
        rows = _padded(rows[..., :K], 2, 16)
      w = _padded(_padded(w, 1, 16), 2, 8)
    call = jax.ffi.ffi_call(
      "kdtree_jax.head_matmul",
      jax.ShapeDtypeStruct((rows.shape[0], H, w.shape[2]), x.dtype),
      vmap_method="sequential",
    )
    return call(rows, w)[..., :N].reshape(*x.shape[:-1], N)

  return _implementation.dispatch("head_matmul", implementation, cuda, xla, x, w)


def _array(name: str, w: Any) -> jax.Array:
  if isinstance(w, Int4Weight):
    raise ValueError(
      f"{name} is an Int4Weight, which only grouped_matmul and routed_experts take"
    )
  return as_array(w)


def _float_dtype(name: str, dtype: Any) -> jnp.dtype:
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = None
  if found not in _FLOATS:
    raise ValueError(f"{name} = {dtype!r} is not allowed: float32 or bfloat16")
  return jnp.dtype(found)


def _check(name: str, x: jax.Array, w: jax.Array, rank: int) -> None:
  if x.dtype not in _FLOATS:
    raise ValueError(f"x is {x.dtype}; it must be float32 or bfloat16")
  if w.ndim != rank or w.dtype not in (x.dtype, jnp.float32) or 0 in w.shape:
    raise ValueError(
      f"{name} must have {rank} axes, none empty, in float32 or in the dtype of x, "
      f"{x.dtype}; "
      f"it is {w.dtype} {list(w.shape)}"
    )


def _product(
  x: jax.Array,
  w: jax.Array,
  out_dtype: jax.typing.DTypeLike,
  *,
  by_feature: bool = False,
  gated: bool = False,
) -> jax.Array:
  """The custom call `custom_calls/matmul_ffi.cc`."""
  depth_axis, feature_axis = (1, 0) if by_feature else (0, 1)
  N = w.shape[feature_axis] // (2 if gated else 1)
  rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  if w.dtype == jnp.bfloat16:
    # The copy engine wants whole multiples; zeros behind the end change no sum.
    rows, w = _padded(rows, 1, 16), _padded(w, depth_axis, 16)
    if gated and N % 8:  # Gate's and up's columns each.
      parts = jnp.split(w, 2, axis=feature_axis)
      w = jnp.concatenate([_padded(p, feature_axis, 8) for p in parts], feature_axis)
    elif not by_feature:
      w = _padded(w, 1, 8)
  features = w.shape[feature_axis] // (2 if gated else 1)
  call = jax.ffi.ffi_call(
    "kdtree_jax.matmul",
    jax.ShapeDtypeStruct((rows.shape[0], features), out_dtype),
    vmap_method="sequential",
  )
  out = call(rows, w, by_feature=int(by_feature), gated=int(gated))
  return out[:, :N].reshape(*x.shape[:-1], N)


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
  """Zeros behind the end of an axis, up to a multiple."""
  missing = -x.shape[axis] % multiple
  if not missing:
    return x
  return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
