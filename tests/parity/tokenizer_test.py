"""Tokens and chat templates against transformers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter

import kdtree_jax as kd
from kdtree_jax.tokenizer.backends import KIMI_WORDS
from tests.tokenizer.files import (
  KIMI_TEMPLATE,
  TEXT,
  kimi_config,
  ranks,
  ranks_file,
  train,
  write,
)

SPECIAL = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<think>")
TEXTS = [
  "",
  " ",
  "Hello, world!",
  TEXT,
  "  two  spaces\n\n\ttabs  ",
  "a<|user|>b</s></s> c<think>d",
  "naïve café, 中文English混合 🙂🙃 \U0001f468\u200d\U0001f469",
  "\x00\x7f\u2028\ufffd",
]
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|user|>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|assistant|>' + content + eos_token }}{%- endif %}{%- endfor -%}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""  # noqa: E501
TEMPLATES = {
  "deepseek": DEEPSEEK,
  "kimi": KIMI_TEMPLATE,
  "blocks": """
    {% for message in messages %}
      {% if loop.index0 == 9 %}
        {% break %}
      {% elif message.role == 'tool' %}
        {% continue %}
      {% endif %}
  {{ message.role }}: {{ message.content | trim }}
      {# A comment. #}
    {% endfor %}
    {%- if add_generation_prompt %}
  assistant:
    {% endif %}
""",
  "json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools|tojson("
  "ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}|{{ documents|tojson }}"
  "{{ messages | tojson }}",
  "variables": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}|{{ mood }}"
  "{{ enable_thinking is defined and enable_thinking }}{{ add_generation_prompt }}",
  "reasoning": "{% for m in messages %}{{ m.role }}[{{ m.reasoning_content }}]"
  "[{{ m.thinking }}]{{ 'content' in m }}{{ 'tool_calls' in m }}{% endfor %}",
  "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% set x = 1 %}"
  "{% generation %}{% set x = 2 %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
  "{{ x }}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
  "python": "{% set d = dict(a=1, b=[1, 2]) %}{{ d.items() | list }}"
  "{% for k, v in d | dictsort %}{{ k }}{{ v }}{% endfor %}"
  "{{ messages[0].content.upper()[::-1] }}{{ messages | map(attribute='role') | "
  "join(',') }}{{ '%05.2f' | format(3.14159) }}{{ [1, 2] + [3] }}{{ {'x': none} }}"
  "{{ 7 // 2 }}",
  "date": "{{ strftime_now('%Y-%m-%d') }}",
}
MESSAGES = [
  {"role": "system", "content": "Be brief & <kind>."},
  {"role": "user", "content": "  What is 1 < 2? ñ 中 \n"},
  {"role": "assistant", "content": "<think>hm</think>True", "reasoning": "a thought"},
  {"role": "tool", "content": "42", "name": "calc", "tool_calls": None},
  {"role": "user", "content": "Thanks!", "extra": [1, 2.5, {"a": None}, True]},
]
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "calc",
      "description": "Computes 'x' & \"y\" <br> für 中",
      "parameters": {"type": "object", "properties": {"b": {}, "a": {"x": [1, None]}}},
    },
  }
]
CALLS: dict[str, dict[str, Any]] = {
  "plain": {},
  "prompt": {"add_generation_prompt": True},
  "tools": {
    "tools": TOOLS,
    "documents": [{"title": "t", "text": "é"}],
    "add_generation_prompt": True,
    "mood": "calm",
    "enable_thinking": False,
    "pad_token": "other",
  },
}


def directory(folder: Path, template: Any = None, **files: Any) -> Path:
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True, "__type": "AddedToken"},
    "pad_token": "<pad>",
    "clean_up_tokenization_spaces": False,
  }
  if template is not None:
    config["chat_template"] = template
  return write(
    folder,
    tokenizer__json=train(400, SPECIAL).to_str(),
    tokenizer_config__json=config,
    **files,
  )


def test_tokens(tmp_path):
  folder = directory(tmp_path / "d")
  ours = kd.load_tokenizer(folder)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  assert ours.vocab_size == len(theirs) == 400
  assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
  assert ours.stop_token_ids == (theirs.eos_token_id,)
  for text in TEXTS:
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    for skip in (False, True):
      decoded = ours.decode(ids, skip_special_tokens=skip)
      assert decoded == theirs.decode(ids, skip_special_tokens=skip)
  # Half of a character.
  assert ours.decode(ours.encode("中")[:1]) == theirs.decode(theirs("中").input_ids[:1])


def test_added_tokens_and_postprocessor(tmp_path):
  """Tokens that only tokenizer_config.json has; a start token by tokenizer.json."""
  tokenizer = train(400, SPECIAL)
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
  )
  flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
  folder = write(
    tmp_path / "d",
    tokenizer__json=tokenizer.to_str(),
    tokenizer_config__json={
      "tokenizer_class": "PreTrainedTokenizerFast",
      "bos_token": "<s>",
      "eos_token": "</s>",
      "add_bos_token": True,
      "added_tokens_decoder": {
        "0": {"content": "<s>", "special": True, **flags},
        "400": {"content": "<|new|>", "special": True, **flags},
        "401": {"content": "<|other|>", "special": False, **flags},
      },
    },
  )
  ours = kd.load_tokenizer(folder)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  assert ours.vocab_size == len(theirs) == 402
  for text in [*TEXTS, "x<|new|>y <|other|>"]:
    for special in (False, True):
      ids = ours.encode(text, add_special_tokens=special)
      assert ids == theirs(text, add_special_tokens=special).input_ids
    for skip in (False, True):
      decoded = ours.decode(ids, skip_special_tokens=skip)
      assert decoded == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template(tmp_path, name, call):
  folder = directory(tmp_path / "d", TEMPLATES[name])
  ours = kd.load_tokenizer(folder)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  arguments = CALLS[call]
  text = ours.apply_chat_template(MESSAGES, tokenize=False, **arguments)
  assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, **arguments)
  ids = ours.apply_chat_template(MESSAGES, **arguments)
  assert ids == theirs.apply_chat_template(MESSAGES, return_dict=False, **arguments)
  if name == "date":
    assert text == datetime.date.today().isoformat()


def test_where_templates_are(tmp_path):
  """A list of named ones, a file, more files, and a text in place of a name."""
  rows = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "tool_use", "template": "T{{ tools | length }}"},
    {"name": "rag", "template": "R"},
  ]
  listed = directory(tmp_path / "listed", rows)
  file = directory(tmp_path / "file", rows, chat_template__jinja="F")
  more = directory(tmp_path / "more", rows, chat_template__jinja="F")
  write(more / "additional_chat_templates", tool_use__jinja="M{{ tools | length }}")
  for folder, expected in ((listed, "DT"), (file, "FF"), (more, "FM")):
    ours = kd.load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for tools, first in ((None, expected[0]), (TOOLS, expected[1])):
      text = ours.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
      assert text[0] == first
      assert text == theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
  ours = kd.load_tokenizer(listed)
  theirs = transformers.AutoTokenizer.from_pretrained(listed)
  for wanted in ("rag", "{{ messages | length }}"):
    arguments = {"chat_template": wanted, "tokenize": False}
    text = ours.apply_chat_template(MESSAGES, **arguments)
    assert text == theirs.apply_chat_template(MESSAGES, **arguments)
  without = kd.load_tokenizer(directory(tmp_path / "without"))
  with pytest.raises(ValueError, match="no default chat template"):
    without.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
  "template",
  [
    "{{ raise_exception('Roles must alternate') }}",
    "{{ messages[0].content.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ dict.__base__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ (1).__class__.__mro__ }}",
    "{{ messages[0].nothing.more }}",
    "{% if %}",
    "{{ 1 / 0 }}",
    "{{ messages + 1 }}",
  ],
)
def test_what_a_template_may_not_do(tmp_path, template):
  folder = directory(tmp_path / "d", template)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  try:
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False)
  except Exception:
    with pytest.raises(ValueError, match="chat template"):
      kd.load_tokenizer(folder).apply_chat_template(MESSAGES)
  else:  # Attributes that a sandbox hides are undefined: nothing.
    found = kd.load_tokenizer(folder).apply_chat_template(MESSAGES, tokenize=False)
    assert found == expected == ""


def test_the_demo_exported(tmp_path):
  from kdtree_jax.checkpoint.hf.export import export_hf

  demo = Path(kd.__file__).parent / "demo" / "target.kdtr"
  export_hf(demo, tmp_path / "d")
  ours = kd.load_tokenizer(tmp_path / "d")
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "d")
  assert ours.vocab_size == len(theirs) == 4096
  assert ours.stop_token_ids == (0,)
  for text in TEXTS:
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Path:
  table = ranks()
  return write(
    tmp_path_factory.mktemp("kimi") / "d",
    tiktoken__model=ranks_file(table),
    tokenizer_config__json=kimi_config(len(table)),
  )


@pytest.fixture(scope="module")
def converted(kimi, tmp_path_factory) -> transformers.PreTrainedTokenizerFast:
  """Kimi's tokens by another library: the regular expression by oniguruma."""
  ours = kd.load_tokenizer(kimi)
  config = json.loads((kimi / "tokenizer_config.json").read_text())
  # transformers' converter reads the ranks; special tokens follow in order of ids.
  converter = TikTokenConverter(str(kimi / "tiktoken.model"), pattern=KIMI_WORDS)
  tokenizer = converter.converted()
  names = {int(i): t["content"] for i, t in config["added_tokens_decoder"].items()}
  first = len(ranks())
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(
        names.get(i, f"<|reserved_token_{i}|>"), normalized=False, special=True
      )
      for i in range(first, ours.vocab_size)
    ]
  )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token="[BOS]",
    eos_token="[EOS]",
    pad_token="[PAD]",
    unk_token="[UNK]",
    chat_template=KIMI_TEMPLATE,
  )


def test_kimi_tokens(kimi, converted, monkeypatch, tmp_path):
  monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # The converter's reader caches by path.
  ours = kd.load_tokenizer(kimi)
  assert ours.vocab_size == len(converted) == len(ranks()) + 256
  texts = [
    *TEXTS,
    "北京市 Pascal 汉字abc ABC中DEF",
    f"[BOS]x<|im_end|> <|reserved_token_{len(ranks()) + 5}|>",
    "<|tool_calls_section_begin|>call<|no_token|>",
    "don't DON'T she'LL 12345 1 22 333\r\n\r\n   \n x  y",
    "ÀÉÎ ß ǅ ʰ ا́ हिन्दी \u0301 123٣٤٥६७८",
    "".join(chr(c) for c in range(32, 0x3100)),
  ]
  for text in texts:
    ids = ours.encode(text)
    assert ids == converted(text).input_ids
    assert ours.decode(ids) == text


def test_kimi_chat(kimi, converted):
  ours = kd.load_tokenizer(kimi)
  for arguments in ({}, {"add_generation_prompt": True}):
    text = ours.apply_chat_template(MESSAGES, tokenize=False, **arguments)
    assert text == converted.apply_chat_template(MESSAGES, tokenize=False, **arguments)
    ids = ours.apply_chat_template(MESSAGES, **arguments)
    assert ids == converted.apply_chat_template(
      MESSAGES, return_dict=False, **arguments
    )
  # Kimi's own code sorts what tools have in them.
  text = ours.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
  tools = json.loads(json.dumps(TOOLS, sort_keys=True))
  assert text == converted.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
  assert '[{"function":{"description":' in text
