"""Tokenizers of directories and KDTR files: what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.checkpoint import write as write_kdtr
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.config import ConfigError
from kdtree_jax.tokenizer import read_stop_token_ids
from kdtree_jax.tokenizer.backends import KimiBackend, parse_ranks
from tests.tokenizer.files import TEXT, kimi_config, ranks, ranks_file, train, write

SPECIAL = ("<s>", "</s>")
CONFIG = {
  "tokenizer_class": "PreTrainedTokenizerFast",
  "bos_token": "<s>",
  "eos_token": "</s>",
}


def directory(folder: Path, **files: Any) -> Path:
  return write(folder, tokenizer__json=train(400, SPECIAL).to_str(), **files)


def kimi_directory(folder: Path, **files: Any) -> Path:
  table = ranks()
  usual = {
    "tiktoken__model": ranks_file(table),
    "tokenizer_config__json": kimi_config(len(table)),
  }
  return write(folder, **(usual | files))


def refused(folder: Path, file: str, says: str) -> None:
  with pytest.raises(CheckpointError, match=says) as caught:
    kd.load_tokenizer(folder)
  assert caught.value.file == str(folder / file if file else folder)


def test_start_and_end_are_added_where_the_files_say_so(tmp_path):
  for i, (fields, first, last) in enumerate(
    [
      ({}, [], []),
      ({"add_bos_token": True}, [0], []),
      ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
      ({"add_bos_token": False}, [], []),
    ]
  ):
    folder = directory(tmp_path / str(i), tokenizer_config__json=CONFIG | fields)
    tokenizer = kd.load_tokenizer(folder)
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT) == [*first, *plain, *last]
    assert tokenizer.bos is bool(first)
  # Without a configuration, nobody knows.
  assert kd.load_tokenizer(directory(tmp_path / "alone")).bos is None


def test_a_file_alone(tmp_path):
  folder = directory(tmp_path / "d", tokenizer_config__json=CONFIG)
  tokenizer = kd.load_tokenizer(folder / "tokenizer.json")
  assert tokenizer.encode(TEXT) == kd.load_tokenizer(folder).encode(TEXT)
  assert tokenizer.bos_token_id is None and tokenizer.stop_token_ids == ()


def test_a_kdtr_file_carries_its_tokenizer(tmp_path):
  table = ranks()
  path = tmp_path / "kimi.kdtr"
  values = {"x": np.zeros(1, np.float32)}
  files = {
    "tiktoken.model": ranks_file(table).decode(),
    "chat_template.jinja": "{{ messages[0].content }}",
  }
  write_kdtr(path, values, {}, {"tokenizer_files": files})
  with pytest.raises(CheckpointError, match="tokenizer_config.json") as caught:
    kd.load_tokenizer(path)
  assert caught.value.file == str(path)
  files["tokenizer_config.json"] = json.dumps(kimi_config(len(table)))
  write_kdtr(path, values, {}, {"tokenizer_files": files})
  tokenizer = kd.load_tokenizer(path)
  expected = kd.load_tokenizer(kimi_directory(tmp_path / "d"))
  assert tokenizer.encode(TEXT) == expected.encode(TEXT)
  messages = [{"role": "user", "content": "x"}]
  assert tokenizer.apply_chat_template(messages, tokenize=False) == "x"
  write_kdtr(path, values, {}, {})
  with pytest.raises(CheckpointError, match="no tokenizer here"):
    kd.load_tokenizer(path)


def kdtr(path: Path, model: Any, kind: str = "target") -> Path:
  values = {"x": np.zeros(1, np.float32)}
  tokenizer = train(400, SPECIAL).to_str()
  files = {"tokenizer_config.json": json.dumps(CONFIG)}
  config = {"kind": kind, "model": model}
  write_kdtr(
    path, values, config, {"tokenizer_json": tokenizer} | {"tokenizer_files": files}
  )
  return path


@pytest.mark.parametrize(
  ("eos", "expected"),
  [([3, 5], (3, 5)), ([], (1,)), (None, (1,)), (7, (7,)), ([5, 5], (5,))],
)
def test_stop_tokens_of_a_kdtr_file_are_its_models(tmp_path, eos, expected):
  path = kdtr(tmp_path / "x", {"vocab_size": 400, "eos_token_id": eos})
  assert kd.load_tokenizer(path).stop_token_ids == expected
  # Fields of a drafter say nothing of the tokenizer.
  path = kdtr(tmp_path / "y", {"vocab_size": 9, "eos_token_id": eos}, "drafter")
  assert kd.load_tokenizer(path).stop_token_ids == (1,)


@pytest.mark.parametrize(
  ("fields", "name", "says"),
  [
    ({"vocab_size": 399}, "vocab_size", "= 400 does not fit .*= 399 of x"),
    ({"vocab_size": 163840}, "vocab_size", "does not fit"),
    ({"vocab_size": "400"}, "vocab_size", "must be an integer"),
    ({"vocab_size": 400, "eos_token_id": [-1]}, "eos_token_id", "must be a token id"),
  ],
)
def test_the_model_of_a_kdtr_file_must_fit(tmp_path, fields, name, says):
  with pytest.raises(CheckpointError, match=says) as caught:
    kd.load_tokenizer(kdtr(tmp_path / "x", fields))
  assert caught.value.file == str(tmp_path / "x")
  assert caught.value.what == f"field config.model.{name}"


@pytest.mark.parametrize(
  ("config", "generation", "expected"),
  [
    ({"eos_token_id": 3}, None, (3,)),
    ({"eos_token_id": [3, 5]}, {"eos_token_id": 4}, (3, 5, 4)),
    ({"eos_token_id": 5}, {"eos_token_id": [4, 5, 3]}, (5, 4, 3)),
    ({"eos_token_id": None}, {"eos_token_id": [7]}, (7,)),
    ({}, {"eos_token_id": None}, (1,)),
    ({"eos_token_id": 9, "text_config": {"eos_token_id": [8]}}, {}, (8, 9)),
    (None, {"eos_token_id": 2}, (2,)),
    (None, None, (1,)),
  ],
)
def test_stop_tokens(tmp_path, config, generation, expected):
  files = {"tokenizer_config__json": CONFIG}
  if config is not None:
    size = {"vocab_size": 400}
    inner = config.get("text_config")
    files["config__json"] = config | ({"text_config": inner | size} if inner else size)
  if generation is not None:
    files["generation_config__json"] = generation
  folder = directory(tmp_path / "d", **files)
  assert kd.load_tokenizer(folder).stop_token_ids == expected
  if expected != (1,):
    assert read_stop_token_ids(folder) == expected
  # (1,) is the tokenizer's, where the models say nothing.
  else:
    assert read_stop_token_ids(folder) == ()


@pytest.mark.parametrize("bad", ["3", 3.5, True, [3, None], -1, {"a": 1}])
def test_stop_tokens_that_are_none(tmp_path, bad):
  config = {"vocab_size": 400, "eos_token_id": bad}
  folder = directory(tmp_path / "a", config__json=config)
  refused(folder, "config.json", "eos_token_id")
  folder = directory(tmp_path / "b", generation_config__json={"eos_token_id": bad})
  refused(folder, "generation_config.json", "eos_token_id")


@pytest.mark.parametrize(
  ("size", "fits"),
  [(400, True), (399, False), (420, True), (426, True), (430, False), (163840, False)],
)
def test_the_vocabulary_must_be_the_models(tmp_path, size, fits):
  for i, config in enumerate(
    [{"vocab_size": size}, {"vocab_size": 1, "text_config": {"vocab_size": size}}]
  ):
    folder = directory(tmp_path / str(i), config__json=config)
    if fits:
      kd.load_tokenizer(folder).check_fits(size)
    else:
      refused(folder, "config.json", f"vocab_size = 400 does not fit .*= {size}")
      tokenizer = kd.load_tokenizer(folder / "tokenizer.json")
      with pytest.raises(ConfigError, match=f"= 400 .*= {size} of target x"):
        tokenizer.check_fits(size, "target x")


def test_published_paddings_fit(tmp_path):
  tokenizer = kd.load_tokenizer(directory(tmp_path))

  for tokens, rows in ((128_815, 129_280), (100_018, 102_400), (163_840, 163_840)):
    backend = types.SimpleNamespace(vocab_size=tokens)
    dataclasses.replace(tokenizer, backend=backend).check_fits(rows)


def test_damaged_and_missing_files(tmp_path):
  with pytest.raises(FileNotFoundError, match="nowhere"):
    kd.load_tokenizer(tmp_path / "nowhere")
  (tmp_path / "empty").mkdir()
  refused(tmp_path / "empty", "tokenizer.json", "no tokenizer here")
  refused(write(tmp_path / "a", tokenizer__json="{}"), "tokenizer.json", "not a token")
  refused(write(tmp_path / "b", tokenizer__json=b"\xff"), "tokenizer.json", "UTF-8")
  folder = directory(tmp_path / "c", tokenizer_config__json="{")
  refused(folder, "tokenizer_config.json", "damaged")
  folder = directory(tmp_path / "d", config__json={"vocab_size": None})
  refused(folder, "config.json", "vocab_size")
  (tmp_path / "text").write_text("no tokenizer")
  refused(tmp_path / "text", "", "not a tokenizer")


@pytest.mark.parametrize(
  ("fields", "says"),
  [
    ({"bos_token": 3}, "bos_token"),
    ({"eos_token": {"special": True}}, "eos_token"),
    ({"add_bos_token": "yes"}, "add_bos_token"),
    ({"add_bos_token": True, "bos_token": "<nope>"}, "bos_token: '<nope>' is not a"),
    ({"add_eos_token": True, "eos_token": "<nope>"}, "eos_token: '<nope>' is not a"),
    ({"eos_token": "<nope>"}, "eos_token: '<nope>' is not a"),  # It ends a text.
    ({"chat_template": 3}, "chat_template"),
    ({"chat_template": [{"name": "default"}]}, "chat_template"),
    ({"added_tokens_decoder": {"x": {"content": "<s>"}}}, "added_tokens_decoder"),
    ({"added_tokens_decoder": {"5": {"content": 3}}}, "added_tokens_decoder"),
    ({"added_tokens_decoder": ["<s>"]}, "added_tokens_decoder"),
    ({"added_tokens_decoder": {"7": {"content": "<s>"}}}, "<s>.*id 0 .* 7 here"),
    ({"added_tokens_decoder": {"401": {"content": "<new>"}}}, "id 400 .* 401 here"),
  ],
)
def test_what_tokenizer_config_may_not_say(tmp_path, fields, says):
  folder = directory(tmp_path / "d", tokenizer_config__json=CONFIG | fields)
  refused(folder, "tokenizer_config.json", says)


def test_special_tokens_that_are_none(tmp_path):
  """Refused only where they are used, with the file that names them."""
  unknown = CONFIG | {"bos_token": "<nope>", "eos_token": "<nope>"}
  model = {"vocab_size": 400, "eos_token_id": 1}
  files = {"tokenizer_config__json": unknown, "config__json": model}
  tokenizer = kd.load_tokenizer(directory(tmp_path / "a", **files))
  assert tokenizer.bos_token_id is None and tokenizer.stop_token_ids == (1,)
  folder = directory(
    tmp_path / "b",
    tokenizer_config__json=CONFIG | {"add_bos_token": True},
    special_tokens_map__json={"bos_token": {"content": "<nope>"}},
  )
  refused(folder, "special_tokens_map.json", "bos_token: '<nope>' is not a token")


def test_texts_and_ids_that_are_none(tmp_path):
  for name, make in (("json", directory), ("kimi", kimi_directory)):
    tokenizer = kd.load_tokenizer(make(tmp_path / name))
    with pytest.raises(ValueError, match="not valid Unicode"):
      tokenizer.encode("a\ud800")
    with pytest.raises(ValueError, match="holds -1"):
      tokenizer.decode([5, -1])
    a, size = tokenizer.encode("a"), tokenizer.vocab_size
    assert tokenizer.decode([*a, size, *a, size + 7]) == "a\ufffda\ufffd"
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(np.array(ids, np.int32)) == TEXT
    assert tokenizer.decode([]) == ""


def kimi(**named: int) -> KimiBackend:
  """Bytes, and some longer tokens that only a whole word can become."""
  table = {bytes((byte,)): byte for byte in range(256)}
  for token in named:
    for end in range(2, len(token.encode()) + 1):
      table.setdefault(token.encode()[:end], len(table))
  return KimiBackend(table, {}, set())


def test_kimi_splits_words_as_published():
  """Splits that are written down for Kimi K2's tokenizer elsewhere."""
  for text, expected in (
    ("中文English混合", ["中文", "English", "混合"]),
    ("汉字abc", ["汉字", "abc"]),
    ("北京市 Pascal", ["北京市", " Pascal"]),
    ("1234567890", ["123", "456", "789", "0"]),
    ("HelloWorld", ["Hello", "World"]),
    ("it's DON'T", ["it's", " DON'T"]),
    ("a\n\n  b", ["a", "\n\n", " ", " b"]),
    ("x =   1", ["x", " =", "  ", " ", "1"]),
  ):
    # With all prefixes of every word as tokens, a word is one token.
    backend = kimi(**dict.fromkeys(expected, 0))
    ids = backend.encode(text, False)
    assert [backend.decode([i], False) for i in ids] == expected


def test_kimi_cuts_what_is_too_long():
  backend = kimi(aaaa=0)
  for count in (24_999, 25_000, 25_001, 60_003):
    for text in ("a" * count, "x " + "a" * count + "\n" + "a" * count):
      ids = backend.encode(text, False)
      assert backend.decode(ids, False) == text
  # 25,000 letters are 6,250 tokens of four; the next begins anew.
  ids = backend.encode("a" * 25_003, False)
  assert [len(backend.decode([i], False)) for i in ids] == [4] * 6_250 + [3]
  # One letter before shifts the run, not where it is cut.
  ids = backend.encode(" \n" + "a" * 25_002, False)
  assert [len(backend.decode([i], False)) for i in ids[-2:]] == [4, 2]
  text = ("ab " * 150_000)[:400_002]
  assert backend.decode(backend.encode(text, False), False) == text


def test_kimi_special_tokens(tmp_path):
  tokenizer = kd.load_tokenizer(kimi_directory(tmp_path))
  first = len(ranks())
  assert tokenizer.vocab_size == first + 256
  assert tokenizer.bos_token_id == first
  assert tokenizer.stop_token_ids == (first + 1,)
  text = f"a<|im_end|>b<|tool_calls_section_begin|>c<|reserved_token_{first + 5}|>"
  ids = tokenizer.encode(text)
  assert [i - first for i in ids if i >= first] == [2, 11, 5]
  assert tokenizer.decode(ids) == text
  # Only those that the files call special are left out.
  assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace(
    "<|im_end|>", ""
  )
  # Names beyond the reserved block are tokens too.
  config = kimi_config(first)
  config["added_tokens_decoder"][str(first + 256)] = {"content": "<|more|>"}
  tokenizer = kd.load_tokenizer(
    kimi_directory(tmp_path / "more", tokenizer_config__json=config)
  )
  assert tokenizer.vocab_size == first + 257
  assert tokenizer.encode("<|more|>") == [first + 256]


def test_kimi_files_that_are_none(tmp_path):
  folder = write(tmp_path / "a", tiktoken__model=ranks_file(ranks()))
  refused(folder, "tokenizer_config.json", "is missing")
  first = len(ranks())
  for i, (fields, says) in enumerate(
    [
      ({"tokenizer_class": "LlamaTokenizer"}, "LlamaTokenizer.*not supported"),
      ({"added_tokens_decoder": {"5": {"content": "<x>"}}}, "id 5 is one of"),
      ({"added_tokens_decoder": {"9" * 12: {"content": "<x>"}}}, "id 9{12} is beyond"),
      (
        {
          "added_tokens_decoder": {
            str(first): {"content": "<x>"},
            str(first + 1): {"content": "<x>"},
          }
        },
        "name of two",
      ),
    ]
  ):
    config = kimi_config(first, **fields)
    folder = kimi_directory(tmp_path / f"b{i}", tokenizer_config__json=config)
    refused(folder, "tokenizer_config.json", says)
  folder = kimi_directory(tmp_path / "c", tiktoken__model=b"AA== 0\n!! 1\n")
  refused(folder, "tiktoken.model", "line 2")


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (lambda lines: [*lines, b"AA== 999"], "line 257 has a token"),
    (lambda lines: [*lines, b"AAAA"], "line 257"),
    (lambda lines: [*lines, b"AAAA x"], "line 257"),
    (lambda lines: [*lines, b"AAAA 300"], "257 tokens do not count from 0"),
    (lambda lines: [*lines, b"AAAA 255"], "257 tokens do not count from 0"),
    (lambda lines: lines[:-1], "byte 255 is missing"),
    (lambda lines: [], "byte 0 is missing"),
  ],
)
def test_ranks_that_are_none(change, says):
  lines = ranks_file({bytes((b,)): b for b in range(256)}).splitlines()
  assert len(parse_ranks(b"\n".join(lines) + b"\n\n")) == 256
  with pytest.raises(ValueError, match=says):
    parse_ranks(b"\n".join(change(lines)))


@pytest.mark.parametrize(
  ("template", "says"),
  [
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion depth"),
    ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "nested blocks"),
    ("{{ cycler() }}", "at least one item"),
    ("{{ 'a' * 10**13 }}", "MemoryError"),
    ("{{ 3 | dictsort }}", "'int' object has no attribute 'items'"),
    ("{{ 3 | int(base='x') + 'x' }}", "unsupported operand"),
    ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ 1 + }}", "unexpected .end of print statement"),
    ("{{ raise_exception('not like this') }}", "not like this"),
  ],
)
def test_templates_that_fail(tmp_path, template, says):
  tokenizer = kd.load_tokenizer(directory(tmp_path))
  messages = [{"role": "user", "content": "x"}]
  with pytest.raises(ValueError, match=f"^chat template.*: .*{says}"):
    tokenizer.apply_chat_template(messages, chat_template=template)


def test_a_template_that_fails_is_named_by_its_file(tmp_path):
  messages = [{"role": "user", "content": "x"}]
  bad = "{{ raise_exception('not like this') }}"
  config = CONFIG | {"chat_template": bad}
  for file, files in (
    ("chat_template.jinja", {"chat_template__jinja": bad}),
    ("tokenizer_config.json", {"tokenizer_config__json": config}),
  ):
    folder = directory(tmp_path / file, **files)
    tokenizer = kd.load_tokenizer(folder)
    says = f"^chat template of {re.escape(str(folder / file))}: not like this$"
    with pytest.raises(ValueError, match=says):
      tokenizer.apply_chat_template(messages, chat_template="default")
    with pytest.raises(ValueError, match=says):
      tokenizer.apply_chat_template(messages)
  path = tmp_path / "x.kdtr"
  files = {"chat_template.jinja": "{{ 1 + }}"}
  header = {"tokenizer_json": train(400, SPECIAL).to_str(), "tokenizer_files": files}
  write_kdtr(path, {"x": np.zeros(1, np.float32)}, {}, header)
  with pytest.raises(ValueError, match=r"of .*x\.kdtr, chat_template\.jinja, line 1: "):
    kd.load_tokenizer(path).apply_chat_template(messages)


def test_a_conversation_that_holds_itself(tmp_path):
  content: list = []
  content.append(content)
  messages = [{"role": "user", "content": content}]
  tokenizer = kd.load_tokenizer(directory(tmp_path))
  with pytest.raises(ValueError, match="nested too deeply"):
    tokenizer.apply_chat_template(messages, chat_template="x")


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ({"messages": []}, "at least one"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": {"role": "user"}}, "messages must be a list"),
    ({"messages": ["hello"]}, r"messages\[0\]"),
    ({"messages": [{"role": "user", "content": object()}]}, r"\['content'\].*object"),
    ({"tools": [len]}, "tools"),
    ({"documents": ["a"]}, "documents"),
    ({"mood": object()}, "mood"),
  ],
)
def test_conversations_that_are_none(tmp_path, arguments, says):
  tokenizer = kd.load_tokenizer(directory(tmp_path))
  arguments = {"messages": [{"role": "user"}], "chat_template": "x"} | arguments
  with pytest.raises(ValueError, match=says):
    tokenizer.apply_chat_template(**arguments)
