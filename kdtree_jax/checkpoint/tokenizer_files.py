"""The tokenizer that travels in a target's KDTR file, as text in its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdtree_jax.checkpoint import kdtr
from kdtree_jax.checkpoint.file_names import (
  MORE_CHAT_TEMPLATES,
  TOKENIZER,
  is_tokenizer_file,
)
from kdtree_jax.checkpoint.kdtr import KdtrError
from kdtree_jax.checkpoint.kdtr_format import StrPath

# Members of the metadata: a tokenizer.json, and further files by name.
TOKENIZER_JSON = "tokenizer_json"
TOKENIZER_FILES = "tokenizer_files"


def read_tokenizer_json(path: StrPath) -> str | None:
  """The `tokenizer.json` that travels with a target, or None.

  Raises:
    KdtrError: a damaged file, or a member that is not text.
  """
  with kdtr.open_kdtr(path) as file:
    text = file.metadata.get(TOKENIZER_JSON)
  if text is not None and not isinstance(text, str):
    raise KdtrError(path, f"metadata.{TOKENIZER_JSON}", "must be text")
  return text


def read_tokenizer_files(path: StrPath) -> dict[str, str]:
  """All files of the tokenizer that travels with a target, `tokenizer.json` included.

  Returns:
    File names to contents; empty where there are none. Every name is one of
    `is_tokenizer_file`, so that it may be written into a directory.

  Raises:
    KdtrError: a damaged file, or members that are not text by the name of a
      tokenizer's file.
  """
  text = read_tokenizer_json(path)
  with kdtr.open_kdtr(path) as file:
    more = file.metadata.get(TOKENIZER_FILES, {})
  field = f"metadata.{TOKENIZER_FILES}"
  if not isinstance(more, dict):
    raise KdtrError(path, field, "must be an object")
  for name, contents in more.items():
    if not is_tokenizer_file(name):
      raise KdtrError(path, field, f"{name!r} is not a file of a tokenizer")
    if not isinstance(contents, str):
      raise KdtrError(path, field, f"{name!r} must be text")
  if text is None:
    return more
  if TOKENIZER in more:
    raise KdtrError(path, field, f"{TOKENIZER!r} is in {TOKENIZER_JSON} too")
  return {TOKENIZER: text, **more}


def read_model_fields(path: StrPath) -> dict[str, Any] | None:
  """The fields of the target's configuration as the file has them, or None.

  Raises:
    KdtrError: a damaged file.
  """
  with kdtr.open_kdtr(path) as file:
    model = file.config.get("model")
    target = file.config.get("kind") == "target"
  return model if target and isinstance(model, dict) else None


def more_chat_templates(directory: Path) -> tuple[str, ...]:
  """Names, the folder's included, of the chat templates of a folder of their own."""
  files = sorted((directory / MORE_CHAT_TEMPLATES).glob("*.jinja"))
  return tuple(f"{MORE_CHAT_TEMPLATES}/{path.name}" for path in files)
