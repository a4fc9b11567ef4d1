"""Which implementation of an op runs, and why."""

from __future__ import annotations

IMPLEMENTATIONS = ("auto", "xla", "cuda")


def resolve(op: str, implementation: str) -> str:
  """Turns the `implementation` argument of an op into the one that runs.

  Args:
    op: name of the op, for messages.
    implementation: "auto" takes the best that is built, a name forces it.

  Returns:
    "xla".

  Raises:
    ValueError: an unknown name.
    NotImplementedError: "cuda" where the CUDA library is not built.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation = {implementation!r} of {op} is unknown; "
      f"it must be one of {IMPLEMENTATIONS}"
    )
  if implementation == "cuda":
    raise NotImplementedError(
      f"implementation='cuda' of {op} needs the library of CUDA custom calls, which "
      "this version of kdtree_jax does not have yet; implementation='xla' or 'auto' "
      "runs on every device"
    )
  return "xla"
