"""Finds and reads the files of a tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import tokenizers

from kdtree_jax._validation import ConfigError, is_integer
from kdtree_jax.checkpoint.file_names import (
  CHAT_TEMPLATE,
  CONFIG_FILE,
  GENERATION_FILE,
  MORE_CHAT_TEMPLATES,
  RANKS,
  SPECIAL_TOKENS_MAP,
  TOKENIZER,
  TOKENIZER_CONFIG,
)
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.fields import Fields
from kdtree_jax.checkpoint.hf.safetensors import parse_json
from kdtree_jax.checkpoint.kdtr_format import MAGIC
from kdtree_jax.checkpoint.tokenizer_files import (
  more_chat_templates,
  read_model_fields,
  read_tokenizer_files,
)
from kdtree_jax.tokenizer.backends import Backend, JsonBackend, KimiBackend, parse_ranks
from kdtree_jax.tokenizer.tokenizer import Tokenizer

StrPath = str | os.PathLike[str]

_KIMI_CLASS = "TikTokenTokenizer"
_ROLES = (
  "bos_token",
  "eos_token",
  "unk_token",
  "sep_token",
  "pad_token",
  "cls_token",
  "mask_token",
)


def load_tokenizer(path: StrPath) -> Tokenizer:
  """Loads the tokenizer of a Hugging Face directory, or of a KDTR file.

  A directory has a `tokenizer.json`, or Kimi's and Moonlight's `tiktoken.model`;
  `tokenizer_config.json` names special tokens; the chat template is there too, or in
  `chat_template.jinja`. The directory's `config.json`, if there is one, must fit; so
  must the config of a KDTR file, which has the stop tokens too.

  Args:
    path: the directory, a KDTR file of a target that carries its tokenizer, or a
      `tokenizer.json` alone.

  Raises:
    FileNotFoundError: no such directory or file.
    CheckpointError: naming file, member and reason: there is no tokenizer, a file is
      damaged, files disagree, the vocabulary does not fit the model's, or it has no
      token of the name that texts are to begin or end with.
    KdtrError: a damaged KDTR file.
  """
  path = Path(path)
  if not path.exists():
    raise FileNotFoundError(f"path = {path} does not exist")
  return _load(_Files(path))


def tokenizer_from_json(text: str, source: str = TOKENIZER) -> Tokenizer:
  """A tokenizer without anything but the contents of a `tokenizer.json`.

  Raises:
    ValueError: they are not a tokenizer's.
  """
  return Tokenizer(JsonBackend(text), source)


def read_stop_token_ids(directory: StrPath) -> tuple[int, ...]:
  """Tokens that end a text: those of `config.json`, then of `generation_config.json`.

  Either may have one, several or none; Kimi's `config.json` may have them inside of
  `text_config`.

  Raises:
    CheckpointError: a file is damaged, or holds what is not a token id.
  """
  return _stop_token_ids(_Files(Path(directory)))


class _Files:
  """Contents of files by name, wherever they are."""

  def __init__(self, path: Path) -> None:
    self.path = path
    self.read: Callable[[str], bytes | None]
    self.more_templates: tuple[str, ...] = ()
    self._header: dict[str, Any] | None = None  # Of a KDTR file: its model's fields.
    if path.is_dir():
      self.read = self._from_directory
      self.more_templates = more_chat_templates(path)
    elif _starts_with(path, MAGIC):
      members = read_tokenizer_files(path)
      inside = f"{MORE_CHAT_TEMPLATES}/"
      self.more_templates = tuple(sorted(n for n in members if n.startswith(inside)))
      self.read = lambda name: members[name].encode() if name in members else None
      self._header = read_model_fields(path)
    else:
      self.read = lambda name: path.read_bytes() if name == TOKENIZER else None

  def _from_directory(self, name: str) -> bytes | None:
    try:
      return (self.path / name).read_bytes()
    except FileNotFoundError:
      return None
    except OSError as error:
      raise CheckpointError(
        self.path / name, "file", f"cannot be read: {error}"
      ) from error

  def where(self, name: str) -> Path:
    """What to call a file in messages."""
    return self.path / name if self.path.is_dir() else self.path

  def text(self, name: str) -> str | None:
    contents = self.read(name)
    try:
      return None if contents is None else contents.decode("utf-8")
    except UnicodeDecodeError as error:
      raise self.error(name, "text", f"is not UTF-8: {error}") from error

  def json(self, name: str) -> dict[str, Any] | None:
    text = self.text(name)
    return None if text is None else parse_json(self.where(name), text)

  def configs(self) -> list[Fields]:
    """The model's configuration, if there is one: the text model's, what is around."""
    if self._header is not None:
      return [Fields(self.path, self._header, "config.model.")]
    values = self.json(CONFIG_FILE)
    if values is None:
      return []
    outer = Fields(self.where(CONFIG_FILE), values)
    text = outer.optional("text_config")
    return (
      [outer.inner("text_config", text), outer] if isinstance(text, dict) else [outer]
    )

  def name(self, name: str) -> str:
    """What to call a file in one word or two, also inside of a KDTR file."""
    where = str(self.where(name))
    return where if self.path.is_dir() else f"{where}, {name}"

  def error(self, name: str, what: str, reason: str) -> CheckpointError:
    what = what if self.path.is_dir() else f"{name}, {what}"
    return CheckpointError(self.where(name), what, reason)


def _starts_with(path: Path, magic: bytes) -> bool:
  with open(path, "rb") as file:
    return file.read(len(magic)) == magic


def _load(files: _Files) -> Tokenizer:
  config = files.json(TOKENIZER_CONFIG)
  kimi = files.read(TOKENIZER) is None and files.read(RANKS) is not None
  backend = _kimi_backend(files, config) if kimi else _json_backend(files, config)
  special = _special_tokens(files, config or {})
  stop = _stop_token_ids(files)
  bos = _boolean(files, "add_bos_token", (config or {}).get("add_bos_token"))
  if bos is None and config is not None:
    bos = False
  eos = bool(_boolean(files, "add_eos_token", (config or {}).get("add_eos_token")))
  templates, template_files = _chat_templates(files, config or {})
  tokenizer = Tokenizer(
    backend,
    source=str(files.where(RANKS if kimi else TOKENIZER)),
    special_tokens={role: token for role, (token, _) in special.items()},
    chat_templates=templates,
    chat_template_files=template_files,
    stop_token_ids=stop,
    bos=bos,
    eos=eos,
    sort_tools=kimi,
  )
  for role, used in (("bos_token", bos), ("eos_token", eos or not stop)):
    token, file = special.get(role, (None, ""))
    if used and token is not None and backend.token_id(token) is None:
      raise files.error(file, role, f"{token!r} is not a token of the tokenizer")
  if not stop and tokenizer.eos_token_id is not None:
    # Without a model's configuration: the tokenizer's own end of text.
    end = tokenizer.eos_token_id
    tokenizer = dataclasses.replace(tokenizer, stop_token_ids=(end,))
  _check_model(files, tokenizer)
  return tokenizer


def _json_backend(files: _Files, config: dict[str, Any] | None) -> Backend:
  text = files.text(TOKENIZER)
  if text is None:
    raise files.error(
      TOKENIZER, "file", f"is missing, and so is {RANKS}: there is no tokenizer here"
    )
  try:
    backend = JsonBackend(text)
  except ValueError as error:
    raise files.error(TOKENIZER, "tokenizer", str(error)) from error
  added = _added_tokens(files, config or {})
  try:
    backend.add(
      {
        i: tokenizers.AddedToken(
          fields["content"],
          **{
            name: fields[name]
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if isinstance(fields.get(name), bool)
          },
        )
        for i, fields in added.items()
      }
    )
  except ValueError as error:
    raise files.error(TOKENIZER_CONFIG, "added_tokens_decoder", str(error)) from error
  return backend


def _kimi_backend(files: _Files, config: dict[str, Any] | None) -> Backend:
  if config is None:
    raise files.error(
      TOKENIZER_CONFIG, "file", f"is missing: it names the special tokens of {RANKS}"
    )
  name = config.get("tokenizer_class")
  if name != _KIMI_CLASS:
    raise files.error(
      TOKENIZER_CONFIG,
      "tokenizer_class",
      f"{name!r} is not supported; a {RANKS} must be Kimi's, which is {_KIMI_CLASS!r}",
    )
  contents = files.read(RANKS)
  assert contents is not None
  try:
    ranks = parse_ranks(contents)
  except ValueError as error:
    raise files.error(RANKS, "ranks", str(error)) from error
  added = _added_tokens(files, config)
  roles = {token for token, _ in _special_tokens(files, config).values()}
  more = config.get("additional_special_tokens")
  roles |= {_content(token) for token in more} if isinstance(more, list) else set()
  named = {i: fields["content"] for i, fields in added.items()}
  special = {
    i for i, fields in added.items() if fields.get("special") or named[i] in roles
  }
  try:
    return KimiBackend(ranks, named, special)
  except ValueError as error:
    raise files.error(TOKENIZER_CONFIG, "added_tokens_decoder", str(error)) from error


def _added_tokens(files: _Files, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
  """`added_tokens_decoder`: fields of a token by its id."""
  found = config.get("added_tokens_decoder", {})
  tokens: dict[int, dict[str, Any]] = {}
  for key, fields in found.items() if isinstance(found, dict) else [("", found)]:
    content = fields.get("content") if isinstance(fields, dict) else None
    if not key.isdecimal() or not isinstance(content, str) or not content:
      raise files.error(
        TOKENIZER_CONFIG,
        "added_tokens_decoder",
        f"{key!r}: {fields!r} is not a token's id and its fields",
      )
    tokens[int(key)] = fields
  return tokens


def _special_tokens(
  files: _Files, config: dict[str, Any]
) -> dict[str, tuple[str, str]]:
  """Text and file by role; old directories have a file for it."""
  old = None
  if "added_tokens_decoder" not in config:
    old = files.json(SPECIAL_TOKENS_MAP)
  tokens: dict[str, tuple[str, str]] = {}
  for role in _ROLES:
    value, file = (old or {}).get(role), SPECIAL_TOKENS_MAP
    if value is None:
      value, file = config.get(role), TOKENIZER_CONFIG
    if value is None:
      continue
    content = _content(value)
    if content is None:
      raise files.error(file, role, f"{value!r} is not a token")
    tokens[role] = content, file
  return tokens


def _content(token: Any) -> str | None:
  content = token.get("content") if isinstance(token, dict) else token
  return content if isinstance(content, str) else None


def _boolean(files: _Files, name: str, value: Any) -> bool | None:
  if value is not None and not isinstance(value, bool):
    raise files.error(TOKENIZER_CONFIG, name, f"{value!r} must be true or false")
  return value


def _chat_templates(
  files: _Files, config: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
  """Programs by name, and their files. Files go before the configuration's."""
  templates: dict[str, str] = {}
  sources: dict[str, str] = {}
  default = files.text(CHAT_TEMPLATE)
  if default is not None:
    templates["default"] = default
    sources["default"] = files.name(CHAT_TEMPLATE)
  for file in files.more_templates:
    text = files.text(file)
    assert text is not None
    name = PurePosixPath(file).stem
    templates[name], sources[name] = text, files.name(file)
  if not templates:
    templates = _templates_of_config(files, config)
    sources = dict.fromkeys(templates, files.name(TOKENIZER_CONFIG))
  return templates, sources


def _templates_of_config(files: _Files, config: dict[str, Any]) -> dict[str, str]:
  templates: dict[str, str] = {}
  found = config.get("chat_template")
  if found is None:
    return {}
  if isinstance(found, str):
    return {"default": found}
  rows = found if isinstance(found, list) else [found]
  for row in rows:
    row = row if isinstance(row, dict) else {}
    name, text = row.get("name"), row.get("template")
    if not isinstance(name, str) or not isinstance(text, str):
      raise files.error(
        TOKENIZER_CONFIG,
        "chat_template",
        "must be text, or a list of objects with name and template",
      )
    templates[name] = text
  return templates


def _stop_token_ids(files: _Files) -> tuple[int, ...]:
  fields = files.configs()
  generation = files.json(GENERATION_FILE)
  if generation is not None:
    fields.append(Fields(files.where(GENERATION_FILE), generation))
  found = (token for each in fields for token in each.token_ids("eos_token_id"))
  return tuple(dict.fromkeys(found))


def _check_model(files: _Files, tokenizer: Tokenizer) -> None:
  """Compares with the model's configuration that lies beside the tokenizer."""
  for fields in files.configs()[:1]:
    size = fields.optional("vocab_size")
    if not is_integer(size):
      raise fields.error("vocab_size", f"{size!r} must be an integer")
    try:
      tokenizer.check_fits(size, fields.path.name)
    except ConfigError as error:
      raise fields.error("vocab_size", str(error)) from error
