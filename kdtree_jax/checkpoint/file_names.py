"""What the files of a Hugging Face directory are called, but for its weights."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

TOKENIZER = "tokenizer.json"
RANKS = "tiktoken.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_CHAT_TEMPLATES = "additional_chat_templates"  # A folder of `<name>.jinja`.

# A tokenizer is one of these two, and the rest.
VOCABULARIES = (TOKENIZER, RANKS)
TOKENIZER_PARTS = (*VOCABULARIES, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE)


def is_tokenizer_file(name: str) -> bool:
  """Whether a file of this name, "/" between folder and file, is a tokenizer's.

  No such name leads out of the directory or to another kind of file, on any system.
  """
  if name in TOKENIZER_PARTS:
    return True
  folder, _, file = name.partition("/")
  return (
    folder == MORE_CHAT_TEMPLATES
    and file.endswith(".jinja")
    and file.isprintable()
    and PurePosixPath(file).name == PureWindowsPath(file).name == file
  )
