"""A file of finished work, so that a long run can stop and go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kdtree_jax
from kdtree_jax.bench import report as reports
from kdtree_jax.decoding import modules

# What decides the bits of a decode. A result counts only for the code that made it.
_SOURCES = ("decoding", "drafter", "model", "ops", "reference", "tree")


class Journal:
  """JSON lines, one per finished piece; a line that was cut short is ignored.

  Args:
    path: the file; None keeps everything in memory.
  """

  def __init__(self, path: Path | None):
    self._path = path
    self.records: list[dict[str, Any]] = []
    if path is not None and path.exists():
      for line in path.read_text("utf-8").splitlines():
        try:
          self.records.append(json.loads(line))
        except json.JSONDecodeError:
          continue

  def append(self, record: dict[str, Any]) -> None:
    """Adds a record and brings it to the disk's file at once."""
    record = reports.plain(record)
    self.records.append(record)
    if self._path is not None:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      # A line cut short by a kill must not swallow the next one.
      with self._path.open("a+", encoding="utf-8") as file:
        if file.tell():
          file.seek(file.tell() - 1)
          if file.read() != "\n":
            file.write("\n")
        file.write(json.dumps(record) + "\n")


def digest(parts: Iterable[Any]) -> str:
  """Sixteen hexadecimal digits that stand for values with a faithful `repr`."""
  return hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:16]


def model_digest(module: Any) -> str:
  """Stands for every parameter of a target or drafter."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(modules.split(module)[1]):
    array = np.asarray(leaf)
    total.update(repr((array.shape, array.dtype)).encode())
    total.update(array.tobytes())
  return total.hexdigest()[:16]


def source_digest() -> str:
  """Stands for the source files that take part in decoding."""
  total = hashlib.sha256()
  assert kdtree_jax.__file__ is not None, "kdtree_jax is a package with a file"
  root = Path(kdtree_jax.__file__).parent
  for folder in _SOURCES:
    for path in sorted((root / folder).rglob("*.py")):
      total.update(path.relative_to(root).as_posix().encode())
      total.update(path.read_bytes())
  return total.hexdigest()[:16]
