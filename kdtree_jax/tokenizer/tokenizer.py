"""A tokenizer with its special tokens, stop tokens and chat templates."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from kdtree_jax.config import ConfigError
from kdtree_jax.tokenizer import chat
from kdtree_jax.tokenizer.backends import Backend

# Models have more rows than their tokenizer has tokens, for round sizes: V3 has 465 of
# 129,280, V2-Lite 2,382 of 102,400. A larger share means another tokenizer.
_MOST_PADDING = 1 / 16


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text to token ids and back, and conversations to text.

  Attributes:
    backend: the tokens.
    source: where it was loaded from, for messages.
    special_tokens: text by role: "bos_token", "eos_token", "pad_token", ...
    chat_templates: Jinja programs by name; the usual one is "default".
    stop_token_ids: tokens that end a text, of `config.json` first, then of
      `generation_config.json`.
    bos: whether `encode` begins a text with the token for it (`add_bos_token`, which
      transformers 4 reads and transformers 5 does not where there is a
      `tokenizer.json`); None where the files do not say, and then it does not.
    eos: whether `encode` ends a text with the token for it, on top of what
      `tokenizer.json` does.
    sort_tools: whether the members of tools are sorted by name before they are
      rendered, as Kimi's code does.
    chat_template_files: where the templates were loaded from, by name, for messages.
  """

  backend: Backend
  source: str = ""
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
  chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)
  stop_token_ids: tuple[int, ...] = ()
  bos: bool | None = None
  eos: bool = False
  sort_tools: bool = False
  chat_template_files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def vocab_size(self) -> int:
    """The largest token id plus one."""
    return self.backend.vocab_size

  @property
  def bos_token_id(self) -> int | None:
    return self._special_id("bos_token")

  @property
  def eos_token_id(self) -> int | None:
    return self._special_id("eos_token")

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; the names of special tokens in it become these tokens.

    Args:
      text: any valid Unicode.
      add_special_tokens: whether to begin and end it as the files say. A text of
        `apply_chat_template` has its special tokens already.

    Raises:
      ValueError: the text holds half a surrogate pair.
    """
    try:
      text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(f"text is not valid Unicode: {error}") from error
    ids = self.backend.encode(text, add_special_tokens)
    if not add_special_tokens:
      return ids
    added = self.backend.encode("", True)
    bos, eos = self.bos_token_id, self.eos_token_id
    if self.bos and bos is not None and bos not in added:
      ids = [bos, *ids]
    if self.eos and eos is not None and eos not in added:
      ids = [*ids, eos]
    return ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text of token ids; bytes that are no UTF-8 become U+FFFD.

    So do ids at and beyond `vocab_size`: rows that a model has for round sizes.

    Args:
      ids: any number of them, as a list or an array.
      skip_special_tokens: whether to leave out tokens such as the end of the text.

    Raises:
      ValueError: an id is negative.
    """
    pieces: list[list[int]] = [[]]
    for i in map(operator.index, ids):
      if i < 0:
        raise ValueError(f"ids holds {i}; token ids are 0 or more")
      if i < self.vocab_size:
        pieces[-1].append(i)
      else:
        pieces.append([])
    return "\ufffd".join(
      self.backend.decode(piece, skip_special_tokens) for piece in pieces
    )

  @overload
  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenize: Literal[True] = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
  ) -> list[int]: ...

  @overload
  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenize: Literal[False],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
  ) -> str: ...

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenize: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
  ) -> list[int] | str:
    """A conversation as the model was trained to see it.

    Args:
      messages: such as `[{"role": "user", "content": "Hello"}]`.
      tokenize: whether to return token ids rather than text.
      tools: JSON schemas of functions that the model may call.
      documents: texts for the model to refer to.
      chat_template: the name of one of `chat_templates`, or a Jinja program. None
        takes "tool_use" where there are tools and such a template, else "default".
      add_generation_prompt: whether to end with the beginning of an answer.
      **variables: further values for the template, `enable_thinking` for example.

    Raises:
      ValueError: there is no template or no message, or the template refuses the
        conversation.
    """
    if tools is not None and self.sort_tools:
      tools = _sorted(tools)
    name = self._template_name(chat_template, tools is not None)
    text = chat.render(
      self.chat_templates.get(name, name),
      messages,
      self.chat_template_files.get(name, ""),
      tools=tools,
      documents=documents,
      add_generation_prompt=add_generation_prompt,
      **{**self.special_tokens, **variables},
    )
    return self.encode(text, add_special_tokens=False) if tokenize else text

  def check_fits(self, vocab_size: int, model: str = "the model") -> None:
    """Raises unless a model's vocabulary can be this tokenizer's.

    Args:
      vocab_size: the model's. It may have up to 1/16 more rows than there are tokens.
      model: what to call it.

    Raises:
      ConfigError: naming both sizes.
    """
    own = self.vocab_size
    if own > vocab_size:
      why = "tokens beyond it would have no embedding"
    elif vocab_size - own > vocab_size * _MOST_PADDING:
      why = "too many rows for padding; this is another model's tokenizer"
    else:
      return
    raise ConfigError(
      f"tokenizer {self.source}: vocab_size = {own} does not fit vocab_size = "
      f"{vocab_size} of {model}: {why}"
    )

  def _special_id(self, role: str) -> int | None:
    token = self.special_tokens.get(role)
    return None if token is None else self.backend.token_id(token)

  def _template_name(self, wanted: str | None, has_tools: bool) -> str:
    """A name of `chat_templates`, or the program that the caller gave."""
    templates = self.chat_templates
    if wanted is not None:
      return wanted
    if has_tools and "tool_use" in templates:
      return "tool_use"
    if "default" in templates:
      return "default"
    have = f"it has only {sorted(templates)}" if templates else "it has none"
    raise ValueError(
      f"tokenizer {self.source} has no default chat template: {have}; name one or give "
      "one as chat_template"
    )


def _sorted(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _sorted(inner) for key, inner in sorted(value.items())}
  if isinstance(value, list | tuple):
    return [_sorted(inner) for inner in value]
  return value
