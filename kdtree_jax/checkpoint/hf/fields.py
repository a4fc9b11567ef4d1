"""Fields of a configuration, none of which may go unread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdtree_jax._validation import is_integer, is_number
from kdtree_jax.checkpoint.hf.errors import CheckpointError


class Fields:
  """The fields of an object in a JSON file; remembers which were looked at."""

  def __init__(self, path: Path, values: Mapping[str, Any], parent: str = "") -> None:
    self.path = path
    self._values = values
    self._parent = parent
    self._used: set[str] = set()

  def __contains__(self, name: str) -> bool:
    return name in self._values

  def error(self, name: str, reason: str) -> CheckpointError:
    return CheckpointError(self.path, f"field {self._parent}{name}", reason)

  def inner(self, name: str, values: Mapping[str, Any]) -> Fields:
    """The fields of an object that is the value of a field of this one."""
    self._used.add(name)
    return Fields(self.path, values, f"{self._parent}{name}.")

  def optional(self, name: str, default: Any = None) -> Any:
    """The field's value, or the default where it is missing."""
    self._used.add(name)
    return self._values.get(name, default)

  def required(self, name: str, null: bool = False) -> Any:
    """The field's value; an error where it is missing, or null and may not be."""
    self._used.add(name)
    if name not in self._values:
      raise self.error(
        name, "is missing; it changes the model's numbers, so there is no default"
      )
    value = self._values[name]
    if value is None and not null:
      raise self.error(name, "is null; it changes the model's numbers")
    return value

  def number(self, name: str, value: Any) -> float:
    """The value of the field as a finite float; an error where it is none."""
    try:
      if is_number(value) and math.isfinite(value):
        return float(value)
    except OverflowError:
      pass
    # 1e999 is JSON, and infinite.
    raise self.error(name, f"{value!r} is not a number that a float holds")

  def token_ids(self, name: str) -> tuple[int, ...]:
    """The token ids of a field that holds one, several or none."""
    value = self.optional(name)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_integer(token) and token >= 0 for token in tokens):
      raise self.error(name, f"{value!r} must be a token id or a list of them")
    return tuple(tokens)

  def must_be(self, name: str, *allowed: Any) -> None:
    """An error where the field is there with another value."""
    value = self.optional(name, allowed[0])
    if not any(value == a and isinstance(value, type(a)) for a in allowed):
      raise self.error(name, f"{value!r} is not supported: it must be {allowed[0]!r}")

  def refuse_others(self, irrelevant: frozenset[str]) -> None:
    """An error that names a field which is neither used nor irrelevant."""
    unknown = sorted(set(self._values) - self._used - irrelevant)
    if unknown:
      raise self.error(
        unknown[0],
        f"{self._values[unknown[0]]!r} is not known here; it may change the model's "
        "numbers, so it is not ignored",
      )
