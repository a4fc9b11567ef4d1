"""Chat templates, rendered as `transformers` renders them.

A template is a Jinja program that a checkpoint brings along, so it runs in a sandbox
and sees nothing but plain values. The environment is that of Hugging Face's
documentation ("Writing a chat template"): blocks are trimmed, `tojson` escapes nothing,
loops have `break` and `continue`, and there are `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import numpy as np

# What a message's thoughts are called; the first is what templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
  template: str,
  messages: Sequence[Mapping[str, Any]],
  source: str = "",
  /,
  *,
  tools: Sequence[Mapping[str, Any]] | None = None,
  documents: Sequence[Mapping[str, Any]] | None = None,
  add_generation_prompt: bool = False,
  **variables: Any,
) -> str:
  """The text of a conversation.

  Args:
    template: the Jinja program.
    messages: with `role`, `content` and whatever else the template reads.
    source: the template's file, for messages.
    tools: JSON schemas of functions that the model may call.
    documents: texts for the model to refer to.
    add_generation_prompt: whether the text ends with the beginning of an answer.
    **variables: further values that the template may read.

  Raises:
    ValueError: there are no messages, an argument holds what JSON does not, or the
      template is not valid, fails, or refuses the conversation.
  """
  if isinstance(messages, str | Mapping) or not messages:
    raise ValueError("messages must be a list of at least one message")
  try:
    values = {name: _plain(value, name) for name, value in variables.items()} | {
      "messages": [_message(message, i) for i, message in enumerate(messages)],
      "tools": _objects(tools, "tools"),
      "documents": _objects(documents, "documents"),
      "add_generation_prompt": add_generation_prompt,
    }
  except RecursionError as error:
    raise ValueError("messages, tools or documents are nested too deeply") from error
  what = f"chat template of {source}" if source else "chat template"
  try:
    return _compile(template).render(values)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f"{what}, line {error.lineno}: {error.message}") from error
  except Exception as error:  # A program may fail in any way.
    raise ValueError(f"{what}: {str(error) or type(error).__name__}") from error


def _message(message: Any, index: int) -> dict[str, Any]:
  name = f"messages[{index}]"
  if not isinstance(message, Mapping):
    raise ValueError(f"{name} must be a mapping with a role, not {message!r}")
  # Templates tell a missing member, but not null, from an empty one.
  plain = {k: v for k, v in _plain(message, name).items() if v is not None}
  thoughts = [plain[key] for key in _REASONING if key in plain]
  if thoughts:
    plain = {"thinking": thoughts[0]} | plain | {"reasoning_content": thoughts[0]}
  return plain


def _objects(
  values: Sequence[Mapping[str, Any]] | None, name: str
) -> list[dict[str, Any]] | None:
  if values is None:
    return None
  if not all(isinstance(value, Mapping) for value in values):
    raise ValueError(f"{name} must be a list of mappings (of JSON schemas, for tools)")
  return [_plain(value, f"{name}[{i}]") for i, value in enumerate(values)]


def _plain(value: Any, name: str) -> Any:
  """A copy that has no methods but those of Python's own types."""
  if value is None or type(value) in (str, int, float, bool):
    return value
  if isinstance(value, np.generic):
    return _plain(value.item(), name)
  for kind in (str, int, float):  # Subclasses: enumerations, for one.
    if isinstance(value, kind):
      return kind(value)
  if isinstance(value, Mapping):
    return {_plain(k, name): _plain(v, f"{name}[{k!r}]") for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_plain(v, f"{name}[{i}]") for i, v in enumerate(value))
  raise ValueError(
    f"{name} is a {type(value).__name__}; a chat template takes text, numbers, true, "
    "false, null, lists and mappings"
  )


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals |= {
    "dict": _make_dict,
    "namespace": _Namespace,
    "raise_exception": _raise,
    "strftime_now": lambda form: datetime.datetime.now().strftime(form),
  }
  return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
  """`{% generation %}`: marks an answer for training; the text is what is inside."""

  tags = {"generation"}

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    # A scope: what is assigned inside is not seen outside, as in transformers.
    return [jinja2.nodes.Scope(body, lineno=line)]


class _Namespace(jinja2.utils.Namespace):
  """Without names that begin with an underscore, which reach into Python."""

  def __init__(*args: Any, **kwargs: Any) -> None:
    self, args = args[0], args[1:]
    values = dict(*args, **kwargs)
    for name in values:
      _check_name(name)
    jinja2.utils.Namespace.__init__(self, values)

  def __setitem__(self, name: str, value: Any) -> None:
    _check_name(name)
    super().__setitem__(name, value)


def _check_name(name: Any) -> None:
  if isinstance(name, str) and name.startswith("_"):
    raise jinja2.exceptions.SecurityError(
      f"{name!r} is not a name of a namespace's values"
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict:
  """The type itself would lead a template to the rest of Python."""
  return dict(*args, **kwargs)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """JSON as `json.dumps` writes it: Jinja's own filter escapes for HTML."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)
