"""Which implementation of an op runs, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from kdtree_jax.ops import _library

IMPLEMENTATIONS = ("auto", "xla", "cuda")

# Ops with a CUDA form.
CUDA_OPS = frozenset({"accept_tree", "compact"})


def resolve(op: str, implementation: str) -> str:
  """Turns the `implementation` argument of an op into what is traced.

  Args:
    op: name of the op.
    implementation: "auto" takes the best that is built for the platform of the
      program, a name forces it.

  Returns:
    "xla", "cuda", or "platform": the CUDA form in a program for CUDA, the XLA form
    elsewhere.

  Raises:
    ValueError: an unknown name.
    NotImplementedError: "cuda" where there is no CUDA form, or no library.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation = {implementation!r} of {op} is unknown; "
      f"it must be one of {IMPLEMENTATIONS}"
    )
  if implementation == "xla":
    return "xla"
  if op not in CUDA_OPS:
    obstacle = "there is no CUDA form of this op"
  else:
    obstacle = _library.why_not()
  if obstacle is None:
    return "cuda" if implementation == "cuda" else "platform"
  if implementation == "cuda":
    raise NotImplementedError(
      f"implementation='cuda' of {op} cannot run: {obstacle}; "
      "implementation='xla' or 'auto' runs on every device"
    )
  return "xla"


def dispatch(
  op: str,
  implementation: str,
  cuda: Callable[..., Any],
  xla: Callable[..., Any],
  *arguments: Any,
) -> Any:
  """Calls the form of an op that `resolve` names.

  Args:
    op: name of the op.
    implementation: as in `resolve`.
    cuda: the form for programs for CUDA.
    xla: the form for all platforms.
    *arguments: arrays that either form takes.
  """
  chosen = resolve(op, implementation)
  if chosen == "xla":
    return xla(*arguments)
  if chosen == "cuda":
    return jax.lax.platform_dependent(*arguments, cuda=cuda)
  return jax.lax.platform_dependent(*arguments, cuda=cuda, default=xla)
