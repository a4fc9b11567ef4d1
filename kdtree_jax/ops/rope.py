"""Rotary position embedding.

Angles are the reference's at every position: formed in float64 (or, for checkpoints
trained that way, in float32), their cosine and sine taken in float64 and rounded once.
XLA has no float64 here, so its form gathers from tables that numpy made (`rope_table`).
The CUDA form gathers from the same tables, or, given the frequencies, forms the angles
itself and reads no table.

The rotation rounds each product before the sum, as numpy does; XLA's CPU and GPU
compilers would otherwise contract both into a fused multiply-add.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from kdtree_jax._validation import is_integer, is_number
from kdtree_jax.config import ModelConfig, YarnConfig
from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_integers
from kdtree_jax.reference.rope import AngleDtype, inverse_frequencies, rope_table

__all__ = ["RopeFrequencies", "rope", "rope_table"]

MAX_PAIRS = 128  # of the CUDA form


@dataclasses.dataclass(frozen=True)
class RopeFrequencies:
  """What a table of cosines and sines is made of: hashable, a constant of a program.

  The CUDA form makes of it the bits that `rope_table` makes: compared for every
  position below 262,144, with the frequencies of Kimi K2.6 and DeepSeek-V3, with YaRN
  and without, in both angle dtypes. For other frequencies a value may in principle be
  rounded to the neighbouring float32 (CUDA's and numpy's float64 functions differ in
  the last bit, which shows in about one float32 of 10^9); tables never differ.

  Raises:
    ValueError: an attribute is not of its kind, or not finite.

  Attributes:
    values: radians per position of each pair.
    angle_dtype: dtype in which an angle is formed, "float64" or "float32".
    amplitude: factor on cos and sin.
  """

  values: tuple[float, ...]
  angle_dtype: AngleDtype = "float64"
  amplitude: float = 1.0

  def __post_init__(self) -> None:
    _check_angle_dtype(self.angle_dtype)
    if not isinstance(self.values, tuple) or not self.values:
      raise ValueError(
        f"values = {self.values!r} must be a tuple of numbers, not empty"
      )
    for name, number in (("amplitude", self.amplitude), *enumerate(self.values)):
      if not is_number(number) or not math.isfinite(number):
        where = name if name == "amplitude" else f"values[{name}]"
        raise ValueError(f"{where} = {number!r} must be a finite number")

  @classmethod
  def create(
    cls,
    head_dim: int,
    theta: float,
    yarn: YarnConfig | None,
    angle_dtype: AngleDtype = "float64",
    amplitude: float = 1.0,
  ) -> Self:
    """The frequencies of `rope_table(head_dim, length, theta, yarn, ...)`.

    Raises:
      ValueError: `head_dim` is not positive and even, or `angle_dtype` is unknown.
    """
    if not is_integer(head_dim) or head_dim <= 0 or head_dim % 2:
      raise ValueError(f"head_dim = {head_dim!r} must be a positive, even integer")
    _check_angle_dtype(angle_dtype)
    values = inverse_frequencies(head_dim, theta, yarn, angle_dtype)
    return cls(tuple(map(float, values)), angle_dtype, float(amplitude))

  @classmethod
  def of(cls, config: ModelConfig) -> Self:
    """The frequencies of a target's attention."""
    return cls.create(
      config.qk_rope_head_dim,
      config.rope_theta,
      config.rope_scaling,
      config.rope_angle_dtype,
      config.rope_amplitude,
    )


def rope(
  x: jax.Array,
  positions: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  *,
  interleave: bool,
  frequencies: RopeFrequencies | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Rotates feature pairs by the angle of their position.

  Differentiable with every implementation: the derivative is the XLA form's.

  Args:
    x: [..., P] features, f32 or bf16.
    positions: i32, broadcastable to `x.shape[:-1]`; outside the tables they are
      taken as the nearest position inside.
    cos, sin: f32 [length, P / 2] from `rope_table`.
    interleave: True where (2i, 2i + 1) form a pair of the input, False where
      (i, i + P / 2) do.
    frequencies: those that the tables were made of. Given, the CUDA form reads no
      table. The XLA form does not use them. Tables that are not traced are compared
      with them, at position 1.
    implementation: "auto", "xla" or "cuda". "auto" takes the XLA form for P > 256.

  Returns:
    [..., P] in `x.dtype`, rounded once from fp32, always in half-split order:
    pair i lies at i and i + P / 2.

  Raises:
    ValueError: dtypes or shapes that do not fit, frequencies of other tables, or "cuda"
      with P > 256.
    NotImplementedError: "cuda" without the CUDA library.
  """
  x, positions, cos, sin = map(as_array, (x, positions, cos, sin))
  if x.ndim == 0:
    raise ValueError("x is a scalar; it must be [..., P]")
  implementation = check_rope(
    "rope", "x", x, x.shape[-1], cos, sin, frequencies, implementation
  )
  check_integers(positions=positions)
  try:
    broadcasts = jnp.broadcast_shapes(positions.shape, x.shape[:-1]) == x.shape[:-1]
  except ValueError:
    broadcasts = False
  if not broadcasts:
    raise ValueError(
      f"positions must be integers that broadcast to x.shape[:-1] = {x.shape[:-1]}; "
      f"they are {positions.shape}"
    )

  def xla(x, positions, cos, sin):
    return rope_xla(x, positions, cos, sin, interleave=interleave)

  def cuda(x, positions, cos, sin):
    tokens, heads = _tokens_and_heads(x.shape[:-1], positions.shape)
    place = jnp.broadcast_to(positions.reshape(positions.shape[: len(tokens)]), tokens)
    rows = x.reshape(math.prod(tokens), math.prod(heads), x.shape[-1])
    tables, attributes = rope_angles(cos, sin, frequencies)
    call = jax.ffi.ffi_call(
      "kdtree_jax.rope",
      jax.ShapeDtypeStruct(rows.shape, rows.dtype),
      vmap_method="sequential",
    )
    place = place.reshape(-1).astype(jnp.int32)
    out = call(rows, place, *tables, interleave=int(interleave), **attributes)
    return out.reshape(x.shape)

  # All axes, so that those over which a position is shared can be told from its shape.
  positions = positions.reshape((1,) * (x.ndim - 1 - positions.ndim) + positions.shape)
  return _implementation.dispatch(
    "rope",
    implementation,
    cuda,
    xla,
    x,
    positions,
    cos,
    sin,
  )


def rope_xla(
  x: jax.Array,
  positions: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  *,
  interleave: bool,
) -> jax.Array:
  """The form of `rope` for every device, without checks."""
  half = x.shape[-1] // 2
  wide = x.astype(jnp.float32)
  if interleave:
    first, second = wide[..., 0::2], wide[..., 1::2]
  else:
    first, second = wide[..., :half], wide[..., half:]
  c = jnp.take(cos, positions, axis=0, mode="clip")
  s = jnp.take(sin, positions, axis=0, mode="clip")
  rotated = (
    _rounded_product(first, c) - _rounded_product(second, s),
    _rounded_product(second, c) + _rounded_product(first, s),
  )
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def check_rope(
  op: str,
  name: str,
  x: jax.Array,
  features: int,
  cos: jax.Array,
  sin: jax.Array,
  frequencies: RopeFrequencies | None,
  implementation: str,
) -> str:
  """Checks what the ops with a rotation share.

  Args:
    op: name of the op.
    name: of the argument `x`.
    x: rows with `features` rotated columns.
    cos, sin, frequencies, implementation: as in `rope`.

  Returns:
    The implementation to dispatch: "xla" in place of an "auto" that the CUDA form
    cannot serve.

  Raises:
    ValueError: naming the argument.
  """
  half = features // 2
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"{name} is {x.dtype}; it must be float32 or bfloat16")
  if (
    features <= 0 or features % 2 or cos.shape != sin.shape or cos.shape[1:] != (half,)
  ):
    raise ValueError(
      f"{name} has {features} features, so cos and sin must be [length, {half}]; "
      f"they are {cos.shape} and {sin.shape}"
    )
  if cos.shape[0] == 0 or cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
    raise ValueError(
      "cos and sin must be float32 and have a row; "
      f"they are {cos.dtype} {cos.shape} and {sin.dtype} {sin.shape}"
    )
  if frequencies is not None and not isinstance(frequencies, RopeFrequencies):
    raise ValueError(
      f"frequencies is a {type(frequencies).__name__}; it must be RopeFrequencies"
    )
  if frequencies is not None and len(frequencies.values) != half:
    raise ValueError(
      f"frequencies has {len(frequencies.values)} values; "
      f"it must have {half}, one per pair of {name}"
    )
  if frequencies is not None:
    _check_tables(cos, sin, frequencies)
  obstacle = None
  if half > MAX_PAIRS:
    obstacle = (
      f"{name} has {features} rotated features; at most {2 * MAX_PAIRS} are allowed"
    )
  return _implementation.within_limits(op, implementation, obstacle)


def _check_tables(cos: jax.Array, sin: jax.Array, frequencies: RopeFrequencies) -> None:
  """Raises where the tables are known, and plainly made of other frequencies."""
  for table in (cos, sin):
    if isinstance(table, jax.core.Tracer):
      return
    if isinstance(table, jax.Array) and not table.is_fully_addressable:
      return
  row = min(1, cos.shape[0] - 1)
  with jax.ensure_compile_time_eval():  # Else jax.jit would trace a constant's row.
    have = np.asarray(cos[row]), np.asarray(sin[row])
  angles = row * np.asarray(frequencies.values, np.float64)
  wanted = np.cos(angles), np.sin(angles)
  for name, one, other in zip(("cos", "sin"), have, wanted, strict=True):
    # Room for tables that were made in float32; sines of low frequencies are small.
    near = np.isclose(one, frequencies.amplitude * other, rtol=1e-5, atol=1e-7)
    if not near.all():
      pair = int(np.argmin(near))
      raise ValueError(
        f"frequencies are not those of the tables: {name}[{row}, {pair}] is "
        f"{one[pair]}, but of frequencies.values[{pair}] = {frequencies.values[pair]} "
        f"and amplitude {frequencies.amplitude} it would be "
        f"{frequencies.amplitude * other[pair]}"
      )


def rope_angles(
  cos: jax.Array, sin: jax.Array, frequencies: RopeFrequencies | None
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
  """The last operands and the attributes that give a custom call its angles."""
  if frequencies is None:
    return (cos, sin), {}
  return (), {
    "frequencies": np.asarray(frequencies.values, np.float64),
    "amplitude": float(frequencies.amplitude),
    "float32_angles": {"float64": 0, "float32": 1}[frequencies.angle_dtype],
    "length": int(cos.shape[0]),
  }


def _check_angle_dtype(angle_dtype: str) -> None:
  if angle_dtype not in (allowed := get_args(AngleDtype)):
    raise ValueError(f"angle_dtype = {angle_dtype!r} must be one of {allowed}")


def _tokens_and_heads(
  rows: tuple[int, ...], positions: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Splits `rows` where the axes begin over which a position is shared."""
  split = len(rows)
  while split and positions[split - 1] == 1:
    split -= 1
  return rows[:split], rows[split:]


def _rounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
  """x * y in a form that no compiler contracts with a sum around it.

  A select stands between product and sum. Its condition is false for NaN only,
  where both branches are NaN, so the value is always that of the product. The
  obvious tools do not do it on every release: `optimization_barrier` is dropped
  before code generation by the CPU compiler of jaxlib 0.10, `reduce_precision`
  to fp32 and a bitcast to integers and back are simplified away.
  """
  return jnp.where(x == x, x * y, x)
