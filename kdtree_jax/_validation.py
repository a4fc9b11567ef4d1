"""Checks of configuration values, with errors that name the field."""

from __future__ import annotations

import numbers
from typing import TypeGuard

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


class ConfigError(ValueError):
  """A configuration is missing a field, or a field has a value not allowed."""


def check(condition: bool, field: str, value: object, allowed: str) -> None:
  """Raises a `ConfigError` that says what is allowed, unless `condition` holds."""
  if not condition:
    raise ConfigError(f"{field} = {value!r} is not allowed: {allowed}")


def is_integer(value: object) -> TypeGuard[int]:
  """Python's and numpy's integers, but not True and False."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
  """Python's and numpy's real numbers, but not True and False."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive(config: object, *fields: str) -> None:
  """Each of the named fields is a positive integer."""
  for field in fields:
    value = getattr(config, field)
    check(
      is_integer(value) and value > 0,
      field,
      value,
      "it must be a positive integer",
    )


def positive_float32(config: object, *fields: str) -> None:
  """Each of the named fields is a number above 0 that float32 holds."""
  for field in fields:
    value = getattr(config, field)
    check(
      is_number(value) and 0 < value <= FLOAT32_MAX,
      field,
      value,
      f"it must be a number above 0 and at most {FLOAT32_MAX:.4g}, float32's largest",
    )


def one_of(config: object, field: str, allowed: tuple[object, ...]) -> None:
  """The named field has one of the allowed values."""
  value = getattr(config, field)
  check(value in allowed, field, value, f"it must be one of {allowed}")
