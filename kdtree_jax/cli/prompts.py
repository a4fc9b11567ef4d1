"""Reads prompt files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path) -> tuple[list[dict[str, Any]], str | None]:
  """Reads JSON lines with the key "prompt" and, optionally, "id".

  A bad line ends the reading, and the good lines before it are kept.

  Args:
    path: UTF-8 text; blank lines are skipped.

  Returns:
    (prompts, what is wrong with the bad line or None).

  Raises:
    OSError: the file cannot be opened.
  """
  prompts: list[dict[str, Any]] = []
  number = 0
  with Path(path).open("rb") as f:
    for number, raw in enumerate(f, 1):
      try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        if line:
          prompts.append(_prompt(json.loads(line)))
      except ValueError as error:
        return prompts, f"{path}, line {number}: {error}"
  return prompts, None


def _prompt(record: Any) -> dict[str, Any]:
  if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
    raise ValueError('a line must be an object with the text key "prompt"')
  if not record["prompt"]:
    raise ValueError('the text of "prompt" is empty')
  check_text(record["prompt"])
  return record


def check_text(text: str) -> None:
  """Raises ValueError where a text is not valid Unicode (a lone surrogate)."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise ValueError(f"the prompt is not valid Unicode: {error}") from error
