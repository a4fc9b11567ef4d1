"""The error of a checkpoint that cannot be read."""

from __future__ import annotations

import os


class CheckpointError(ValueError):
  """A Hugging Face directory is damaged, disagrees with itself, or is not supported.

  Attributes:
    file: the file in which it shows.
    what: the tensor or the field.
    reason: what is wrong with it.
  """

  def __init__(self, file: str | os.PathLike[str], what: str, reason: str) -> None:
    super().__init__(f"{os.fspath(file)}: {what}: {reason}")
    self.file = os.fspath(file)
    self.what = what
    self.reason = reason

  def __reduce__(self):  # Exceptions are otherwise rebuilt from their message alone.
    return type(self), (self.file, self.what, self.reason)
