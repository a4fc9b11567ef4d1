"""Checks of the ops' arguments, the same for all forms: errors name the argument."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from kdtree_jax._validation import is_integer
from kdtree_jax.tree import Tree


def as_array(x: Any) -> Any:
  """Lists and numbers as arrays; what has a shape and a dtype stays as it is."""
  return x if hasattr(x, "shape") and hasattr(x, "dtype") else jnp.asarray(x)


def check_integers(**named: jax.Array) -> None:
  """Raises a ValueError for an array of another kind, which a cast would truncate."""
  for name, value in named.items():
    if not jnp.issubdtype(value.dtype, jnp.integer):
      raise ValueError(f"{name} must be integers; they are {value.dtype} {value.shape}")


def check_static_integers(**named: Any) -> None:
  """Raises a ValueError for what is no integer known when the program is made.

  None, which stands for a default, is left to the caller.
  """
  for name, value in named.items():
    if value is not None and not is_integer(value):
      raise ValueError(
        f"{name} = {value!r} is not allowed: it must be a static integer"
      )


def check_static_number(name: str, value: Any) -> None:
  """Raises a ValueError for what is no number known when the program is made."""
  if isinstance(value, jax.core.Tracer):
    raise ValueError(
      f"{name} is traced, but it must be static: a number known when the program is "
      "made (jax.jit: static_argnames)"
    )
  try:
    float(value)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{name} = {value!r} is not allowed: it must be a number"
    ) from error


def checked_tree(tree: Tree) -> Tree:
  """The trees with i32 fields, which all fit `token_ids`.

  Raises:
    TypeError: it is no Tree.
    ValueError: a field has another shape, or is not of integers.
  """
  if not isinstance(tree, Tree):
    raise TypeError(f"tree must be a kdtree_jax.Tree; it is a {type(tree).__name__}")
  fields = {f.name: as_array(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
  shape = fields["token_ids"].shape
  if len(shape) != 2 or shape[1] < 1:
    raise ValueError(
      f"tree.token_ids {shape} is not allowed: it must be [B, N] with N >= 1"
    )
  for name, value in fields.items():
    wanted = shape[:1] if name == "size" else shape
    if value.shape != wanted:
      raise ValueError(
        f"tree.{name} {value.shape} must be {wanted} to fit tree.token_ids {shape}"
      )
  integers = ("token_ids", "parents", "depths", "size")
  check_integers(**{f"tree.{name}": fields[name] for name in integers})
  return Tree(**fields | {name: fields[name].astype(jnp.int32) for name in integers})
