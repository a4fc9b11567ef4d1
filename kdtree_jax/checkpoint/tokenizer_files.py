"""The tokenizer that travels in a target's KDTR file, as text in its metadata."""

from __future__ import annotations

from pathlib import PurePath

from kdtree_jax.checkpoint import kdtr
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
    File names to contents; empty where there are none.

  Raises:
    KdtrError: a damaged file, or members that are not text by file name.
  """
  text = read_tokenizer_json(path)
  with kdtr.open_kdtr(path) as file:
    more = file.metadata.get(TOKENIZER_FILES, {})
  field = f"metadata.{TOKENIZER_FILES}"
  if not isinstance(more, dict):
    raise KdtrError(path, field, "must be an object")
  for name, contents in more.items():
    if not isinstance(contents, str) or PurePath(name).name != name:
      raise KdtrError(path, field, f"{name!r}: must be text by file name")
  return more if text is None else {"tokenizer.json": text, **more}
