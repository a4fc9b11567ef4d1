"""What attention does around the rotation, in one pass: its queries and cache rows.

Absorbed MLA wants rows whose last P columns are rotated and whose first R columns come
from elsewhere: for queries the absorbed part, for keys the normed latent. As one custom
call each, a row is read and written once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_integers, check_static_number
from kdtree_jax.ops.norm import rms_norm_xla
from kdtree_jax.ops.rope import RopeFrequencies, check_rope, rope_angles, rope_xla


def rope_queries(
  absorbed: jax.Array,
  q: jax.Array,
  positions: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  *,
  interleave: bool,
  frequencies: RopeFrequencies | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Queries of absorbed attention: `concat(absorbed, rope(q[..., -P:]))`.

  All implementations agree in every bit.

  Args:
    absorbed: [B, N, H, R] plain part of the queries, through `k_up`; f32 or bf16.
    q: [B, N, H, C + P] queries as projected, of the same dtype.
    positions: i32 [B, N].
    cos, sin: f32 [length, P / 2]: they say what P is.
    interleave, frequencies, implementation: as in `rope`.

  Returns:
    [B, N, H, R + P].

  Raises:
    ValueError: dtypes or shapes that do not fit, frequencies of other tables, or "cuda"
      with P > 256.
    NotImplementedError: "cuda" without the CUDA library.
  """
  absorbed, q, positions, cos, sin = map(as_array, (absorbed, q, positions, cos, sin))
  features = _rotated_features(cos)
  implementation = check_rope(
    "rope_queries", "q", q, features, cos, sin, frequencies, implementation
  )
  if q.ndim != 4 or q.shape[-1] < features:
    raise ValueError(
      f"q {q.shape} must be [B, N, H, C + P] with P = {features} by cos {cos.shape}"
    )
  if absorbed.shape[:-1] != q.shape[:-1] or absorbed.dtype != q.dtype:
    raise ValueError(
      f"absorbed {absorbed.dtype} {absorbed.shape} must be [B, N, H, R] with "
      f"[B, N, H] and dtype of q {q.dtype} {q.shape}"
    )
  positions = _checked_positions(positions, q.shape[:2])
  B, N, H, R = absorbed.shape
  offset = q.shape[-1] - features

  def xla(absorbed, q, positions, cos, sin):
    pe = rope_xla(
      q[..., offset:], positions[..., None], cos, sin, interleave=interleave
    )
    return jnp.concatenate([absorbed, pe], axis=-1)

  def cuda(absorbed, q, positions, cos, sin):
    tables, attributes = rope_angles(cos, sin, frequencies)
    call = jax.ffi.ffi_call(
      "kdtree_jax.rope_queries",
      jax.ShapeDtypeStruct((B, N, H, R + features), q.dtype),
      vmap_method="sequential",
    )
    attributes |= {"interleave": int(interleave), "offset": offset}
    return call(absorbed, q, positions, *tables, **attributes)

  return _implementation.dispatch(
    "rope_queries",
    implementation,
    cuda,
    xla,
    absorbed,
    q,
    positions,
    cos,
    sin,
  )


def rope_keys(
  kv: jax.Array,
  weight: jax.Array,
  positions: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  *,
  eps: float,
  interleave: bool,
  frequencies: RopeFrequencies | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Cache rows of absorbed attention: normed latent beside rotated key.

  That is `concat(rms_norm(kv[..., :R], weight, eps), rope(kv[..., R:]))`.

  The rotated columns agree in every bit between implementations. The norm sums its
  squares in another order (within fp32 rounding), and a row's bits depend on the row
  alone, whatever the number of rows.

  Args:
    kv: [B, N, R + P] as projected, f32 or bf16.
    weight: [R] of the latent norm, of the same dtype.
    positions: i32 [B, N].
    cos, sin: f32 [length, P / 2].
    eps: static, of the latent norm.
    interleave, frequencies, implementation: as in `rope`.

  Returns:
    [B, N, R + P].

  Raises:
    ValueError: dtypes or shapes that do not fit, frequencies of other tables, or "cuda"
      with P > 256.
    NotImplementedError: "cuda" without the CUDA library.
  """
  kv, weight, positions, cos, sin = map(as_array, (kv, weight, positions, cos, sin))
  check_static_number("eps", eps)
  features = _rotated_features(cos)
  implementation = check_rope(
    "rope_keys", "kv", kv, features, cos, sin, frequencies, implementation
  )
  R = kv.shape[-1] - features
  if kv.ndim != 3 or R <= 0:
    raise ValueError(
      f"kv {kv.shape} must be [B, N, R + P] with P = {features} by cos {cos.shape}"
    )
  if weight.shape != (R,) or weight.dtype != kv.dtype:
    raise ValueError(
      f"weight is {weight.dtype} {weight.shape}; with kv {kv.shape} and P = {features} "
      f"it must be {kv.dtype} ({R},)"
    )
  positions = _checked_positions(positions, kv.shape[:2])

  def xla(kv, weight, positions, cos, sin):
    latent, pe = jnp.split(kv, [R], axis=-1)
    pe = rope_xla(pe, positions, cos, sin, interleave=interleave)
    return jnp.concatenate([rms_norm_xla(latent, weight, eps), pe], axis=-1)

  def cuda(kv, weight, positions, cos, sin):
    tables, attributes = rope_angles(cos, sin, frequencies)
    call = jax.ffi.ffi_call(
      "kdtree_jax.rope_keys",
      jax.ShapeDtypeStruct(kv.shape, kv.dtype),
      vmap_method="sequential",
    )
    attributes |= {"interleave": int(interleave), "eps": float(eps)}
    return call(kv, weight, positions, *tables, **attributes)

  return _implementation.dispatch(
    "rope_keys",
    implementation,
    cuda,
    xla,
    kv,
    weight,
    positions,
    cos,
    sin,
  )


def _rotated_features(cos: jax.Array) -> int:
  if cos.ndim == 0:
    raise ValueError("cos is a scalar; it must be [length, P / 2]")
  return 2 * cos.shape[-1]


def _checked_positions(positions: jax.Array, rows: tuple[int, ...]) -> jax.Array:
  check_integers(positions=positions)
  if positions.shape != rows:
    raise ValueError(
      f"positions must be integers [B, N] = {rows}; they are {positions.shape}"
    )
  return positions.astype(jnp.int32)
