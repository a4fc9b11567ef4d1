"""Which implementation of an op runs, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from kdtree_jax.ops import _library

IMPLEMENTATIONS = ("auto", "xla", "cuda")

# Ops with a CUDA form.
CUDA_OPS = frozenset(
  {
    "accept_tree",
    "add_rms_norm",
    "ancestors",
    "best_token",
    "build_tree",
    "chain_tree",
    "compact",
    "emit",
    "gated_matmul",
    "grouped_matmul",
    "head_matmul",
    "log_softmax_topk",
    "matmul",
    "matmul_chain",
    "rms_norm",
    "rope",
    "rope_keys",
    "rope_queries",
    "route",
    "routed_experts",
    "token_log_probs",
    "tree_attention",
    "tree_from_table",
  }
)


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
  _check_name(op, implementation)
  if implementation == "xla":
    return "xla"
  obstacle = _obstacle(op)
  if obstacle is None:
    return "cuda" if implementation == "cuda" else "platform"
  if implementation == "cuda":
    raise NotImplementedError(
      f"implementation='cuda' of {op} cannot run: {obstacle}; "
      "implementation='xla' or 'auto' runs on every device"
    )
  return "xla"


def within_limits(op: str, implementation: str, obstacle: str | None) -> str:
  """The implementation to dispatch for arguments that the CUDA form may not take.

  Args:
    op: name of the op.
    implementation: as in `resolve`.
    obstacle: what the CUDA form does not take: the argument, how it is, and what is
      allowed. None where it takes all.

  Returns:
    `implementation`, but "xla" for "auto" with an obstacle.

  Raises:
    ValueError: an unknown name, or "cuda" with an obstacle.
  """
  _check_name(op, implementation)
  if obstacle is None or implementation == "xla":
    return implementation
  if implementation == "cuda":
    raise ValueError(
      f"implementation='cuda' of {op}: {obstacle}; "
      "implementation='xla' or 'auto' has no such limit"
    )
  return "xla"


def active(op: str) -> tuple[str, str | None]:
  """What "auto" runs on JAX's default device.

  Returns:
    "cuda" and None; "xla" and why it is not "cuda"; or "none", where it raises, and
    why.
  """
  if (obstacle := _obstacle(op)) is not None:
    return "xla", obstacle
  device = _default_device()
  if device.platform != "gpu":
    return "xla", f"JAX's default device is a {device.platform}, not a GPU"
  if (obstacle := _library.why_not_on(device)) is not None:
    return "none", obstacle
  return "cuda", None


def check_runs(op: str, implementation: str) -> None:
  """Raises where a program with this op cannot run on JAX's default device.

  Raises:
    ValueError, NotImplementedError: as `resolve`, and "cuda" without an NVIDIA GPU,
      and a GPU that the library has no code for.
  """
  chosen = resolve(op, implementation)
  if chosen == "cuda" and (platform := _default_device().platform) != "gpu":
    raise NotImplementedError(
      f"implementation='cuda' of {op} needs an NVIDIA GPU, but JAX's default device is "
      f"a {platform}; implementation='xla' or 'auto' runs on every device"
    )
  if chosen != "xla":
    _check_gpu(op, implementation)


def dispatch(
  op: str,
  implementation: str,
  cuda: Callable[..., Any],
  xla: Callable[..., Any],
  *arguments: Any,
) -> Any:
  """Calls the form of an op that `resolve` names.

  Whatever the form, the derivative is the XLA form's. The forms may close over static
  values, but not over traced ones.

  Args:
    op: name of the op.
    implementation: as in `resolve`.
    cuda: the form for programs for CUDA.
    xla: the form for all platforms.
    *arguments: pytrees of arrays that either form takes; numpy's become JAX's.

  Raises:
    ValueError, NotImplementedError: as `resolve`, and a GPU as default device that
      the library has no code for, and "cuda" with arrays elsewhere than on a GPU.
  """
  chosen = resolve(op, implementation)
  arguments = jax.tree.map(jnp.asarray, arguments)
  if chosen == "xla":
    return xla(*arguments)
  _check_gpu(op, implementation)
  cuda = with_derivative_of(xla, cuda)
  if chosen == "cuda":
    _check_arrays(op, arguments)
    return jax.lax.platform_dependent(*arguments, cuda=cuda)
  return jax.lax.platform_dependent(*arguments, cuda=cuda, default=xla)


def with_derivative_of(
  xla: Callable[..., Any], cuda: Callable[..., Any]
) -> Callable[..., Any]:
  """`cuda`, differentiated as `xla`: custom calls have no derivative of their own."""
  function = jax.custom_jvp(cuda)

  @function.defjvp
  def _derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    # `function`, not `cuda`: a second derivative passes through here again.
    return function(*primals), jax.jvp(xla, primals, tangents)[1]

  return function


def _check_name(op: str, implementation: str) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation = {implementation!r} of {op} is unknown; "
      f"it must be one of {IMPLEMENTATIONS}"
    )


def _obstacle(op: str) -> str | None:
  """Why programs for CUDA cannot have the CUDA form; None where they can."""
  if op not in CUDA_OPS:
    return "there is no CUDA form of this op"
  return _library.why_not()


def _default_device() -> Any:
  """The device that programs run on unless told otherwise."""
  # A device, the name of a platform, or None.
  chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  if chosen is None or isinstance(chosen, str):
    return jax.local_devices(backend=chosen)[0]
  return chosen


def _check_gpu(op: str, implementation: str) -> None:
  """Raises where the default device is a GPU without code in the library."""
  device = _default_device()
  if device.platform != "gpu":
    return  # A program for CUDA may still be lowered here, to run elsewhere.
  if (obstacle := _library.why_not_on(device)) is not None:
    raise NotImplementedError(
      f"implementation={implementation!r} of {op} cannot run: {obstacle}; or use "
      "implementation='xla'"
    )


def _check_arrays(op: str, arguments: Any) -> None:
  """Raises where the CUDA form is to run right now, with arrays not on a GPU."""
  leaves = jax.tree.leaves(arguments)
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return
  for leaf in leaves:
    if isinstance(leaf, jax.Array):
      for device in leaf.devices():
        if device.platform != "gpu":
          raise NotImplementedError(
            f"implementation='cuda' of {op} needs its arrays on an NVIDIA GPU, but "
            f"one is on {device}; implementation='xla' or 'auto' runs on every device"
          )
