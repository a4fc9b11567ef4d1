"""Products and norms that follow each other, as one custom call.

A kernel that is launched in the same call as the one before it starts while that one
still runs, and loads its weights meanwhile. At few rows, where a product takes little
longer than its weights take to arrive, that is worth some microseconds a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.ops import _implementation
from kdtree_jax.ops._checks import as_array, check_static_number
from kdtree_jax.ops.matmul import gated_matmul, head_matmul, matmul
from kdtree_jax.ops.norm import MAX_WIDTH, add_rms_norm, rms_norm

Step = tuple[Any, ...]

# Arrays that each step takes beside its rows; eps follows in those that norm. In the
# order of `StepKind` in `custom_calls/matmul_chain_ffi.cc`.
_ARRAYS = {
  "matmul": ("w",),
  "gated_matmul": ("w",),
  "head_matmul": ("w",),
  "rms_norm": ("weight",),
  "add_rms_norm": ("h", "weight"),
}
_NORMS = ("rms_norm", "add_rms_norm")


def matmul_chain(
  x: jax.Array, steps: Sequence[Step], implementation: str = "auto"
) -> tuple[jax.Array, ...]:
  """Rows through products and norms, each on what the one before gives.

  Every result has the bits that the ops of the steps' names give one by one.

  Args:
    x: [..., K] rows, f32 or bf16.
    steps: 1 or more of these; arrays have the dtype of `x`, eps is static:
      ("matmul", w [K, N]) gives [..., N];
      ("gated_matmul", w [K, 2F]) gives [..., F];
      ("head_matmul", w [H, K, N]), of rows [..., H * X] with X >= K, gives [..., H, N],
      whose last two axes are one for the next step;
      ("rms_norm", weight [K], eps) gives [..., K];
      ("add_rms_norm", h [..., K], weight [K], eps) gives h + rows and its norm, which
      the next step takes.
    implementation: "auto", "xla" or "cuda". In bf16 the CUDA form is one call where
      K of each product is a multiple of 16 and N and F of 8; else one for each step.

  Returns:
    The results of all steps, in order.

  Raises:
    ValueError: a step that does not exist, shapes or dtypes that do not fit.
    NotImplementedError: "cuda" without the CUDA library.
  """
  x = as_array(x)
  names, arrays, epsilons = _checked_steps(steps)
  _check_dtypes(x, names, arrays)
  if not _fits(x, names, arrays):
    return _one_by_one(names, epsilons, implementation, x, arrays)
  xla = functools.partial(_one_by_one, names, epsilons, "xla")

  def cuda(x, arrays):
    shapes = jax.eval_shape(xla, x, arrays)  # The ops look at those of the operands.
    rows = math.prod(x.shape[:-1])
    results = [jax.ShapeDtypeStruct(_by_row(s.shape, x, rows), x.dtype) for s in shapes]
    call = jax.ffi.ffi_call(
      "kdtree_jax.matmul_chain", tuple(results), vmap_method="sequential"
    )
    operands = []
    for name, of_step in zip(names, arrays, strict=True):
      for label, array in zip(_ARRAYS[name], of_step, strict=True):
        if label == "h":
          array = array.reshape(rows, array.shape[-1])
        operands.append(array)
    outputs = call(
      x.reshape(rows, x.shape[-1]),
      *operands,
      kinds=np.array([list(_ARRAYS).index(name) for name in names], np.int64),
      eps=np.array(epsilons, np.float64),
    )
    return tuple(o.reshape(s.shape) for o, s in zip(outputs, shapes, strict=True))

  return _implementation.dispatch("matmul_chain", implementation, cuda, xla, x, arrays)


def _checked_steps(
  steps: Sequence[Step],
) -> tuple[tuple[str, ...], tuple[tuple[jax.Array, ...], ...], tuple[float, ...]]:
  """Names, arrays and epsilons (0 where there is none) of the steps."""
  if not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
    raise ValueError("steps must be a sequence of 1 or more steps")
  names, arrays, epsilons = [], [], []
  for i, step in enumerate(steps):
    name = step[0] if isinstance(step, Sequence) and step else step
    if not isinstance(name, str) or name not in _ARRAYS:
      found = repr(name) if isinstance(name, str) else f"of {type(step).__name__}"
      raise ValueError(
        f"steps[{i}] is {found}; it must begin with one of {(*_ARRAYS,)}"
      )
    wanted = (*_ARRAYS[name], *(("eps",) if name in _NORMS else ()))
    if len(step) != 1 + len(wanted):
      raise ValueError(
        f"steps[{i}] has {len(step) - 1} operands; {name!r} takes {', '.join(wanted)}"
      )
    eps = 0.0
    if name in _NORMS:
      check_static_number("eps", step[-1])
      eps = float(step[-1])
    names.append(name)
    arrays.append(tuple(map(as_array, step[1 : 1 + len(_ARRAYS[name])])))
    epsilons.append(eps)
  return tuple(names), tuple(arrays), tuple(epsilons)


def _check_dtypes(
  x: jax.Array, names: Sequence[str], arrays: Sequence[Sequence[jax.Array]]
) -> None:
  if x.ndim < 1 or x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(
      f"x must be [..., K] in float32 or bfloat16; it is {x.dtype} {list(x.shape)}"
    )
  for i, (name, of_step) in enumerate(zip(names, arrays, strict=True)):
    for label, array in zip(_ARRAYS[name], of_step, strict=True):
      if array.dtype != x.dtype:
        raise ValueError(
          f"{label} of steps[{i}] is {array.dtype}; it must have the dtype of x, "
          f"{x.dtype}"
        )


def _fits(
  x: jax.Array, names: Sequence[str], arrays: Sequence[Sequence[jax.Array]]
) -> bool:
  """Whether the custom call takes the sizes. It takes none that no op takes."""
  width = x.shape[-1]
  for name, of_step in zip(names, arrays, strict=True):
    shape = of_step[-1].shape
    if len(shape) != {"head_matmul": 3}.get(name, 1 if name in _NORMS else 2):
      return False
    if name in _NORMS:
      if width > MAX_WIDTH:
        return False
      continue
    *heads, K, N = shape
    if 0 in shape or (name == "gated_matmul" and N % 2):
      return False
    columns = width // heads[0] if heads else width
    features = N // 2 if name == "gated_matmul" else N
    if x.dtype == jnp.bfloat16 and (K % 16 or columns % 8 or features % 8):
      return False
    width = features * (heads[0] if heads else 1)
  return True


def _one_by_one(
  names: Sequence[str],
  epsilons: Sequence[float],
  implementation: str,
  x: jax.Array,
  arrays: Sequence[Sequence[jax.Array]],
) -> tuple[jax.Array, ...]:
  """The steps as ops of their own."""
  batch, rows, results = x.shape[:-1], x, []
  for name, of_step, eps in zip(names, arrays, epsilons, strict=True):
    *residual, w = of_step
    if name == "add_rms_norm":
      if residual[0].shape != rows.shape:
        raise ValueError(
          f"h of 'add_rms_norm' is {list(residual[0].shape)}; it must be as the rows, "
          f"{list(rows.shape)}"
        )
      results += add_rms_norm(residual[0], rows, w, eps, implementation)
    elif name == "rms_norm":
      results.append(rms_norm(rows, w, eps, implementation))
    elif name == "head_matmul":
      H = w.shape[0] if w.ndim == 3 else 0
      if H and rows.shape[-1] % H == 0:
        rows = rows.reshape(*batch, H, rows.shape[-1] // H)
      results.append(head_matmul(rows, w, implementation))
    elif name == "matmul":
      results.append(matmul(rows, w, implementation))
    else:
      results.append(gated_matmul(rows, w, implementation))
    rows = _flat(results[-1], batch)
  return tuple(results)


def _flat(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
  """All axes behind `batch` as one."""
  return x.reshape(*batch, math.prod(x.shape[len(batch) :]))


def _by_row(shape: tuple[int, ...], x: jax.Array, rows: int) -> tuple[int, ...]:
  """A result's shape with the leading axes of `x` as one."""
  return (rows, *shape[x.ndim - 1 :])
