"""Tokenizer files as checkpoints have them, small."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = (
  "def add(a, b):\n    return a + b\n\nThe quick brown fox jumps over the lazy dog's\n"
  "back. I'll say: \"it's 1234 or 56789\"! 中文字符 混合English。北京市 naïve café\r\n"
  "\t\tif x == None:\n\n\n  don't WE'VE They'll HTTPServer çok güzel Ελληνικά русский "
  "язык 日本語\n"
) * 4
# Ids of a control block as Kimi has it, from the first id after the ranks.
KIMI_NAMES = {
  0: ("[BOS]", True),
  1: ("[EOS]", True),
  2: ("<|im_end|>", True),
  3: ("<|im_user|>", True),
  4: ("<|im_assistant|>", True),
  10: ("<|im_system|>", True),
  11: ("<|tool_calls_section_begin|>", False),
  17: ("<|im_middle|>", True),
  254: ("[UNK]", True),
  255: ("[PAD]", True),
}
# As Kimi K2's is built: a system prompt of its own, roles as tokens, tools as JSON.
KIMI_TEMPLATE = """{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>
  {%- endif -%}
  {%- if message['role'] == 'system' -%}<|im_system|>
  {%- elif message['role'] == 'user' -%}<|im_user|>
  {%- else -%}<|im_assistant|>
  {%- endif -%}
  {{ message.get('name') or message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""  # noqa: E501


def train(size: int = 400, special: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
  """A byte-level BPE with the special tokens first."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=list(special),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
  return tokenizer


def write(folder: Path, **files: Any) -> Path:
  """Files by name, "__" standing for the dot; objects become JSON."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, contents in files.items():
    path = folder / name.replace("__", ".")
    if isinstance(contents, bytes):
      path.write_bytes(contents)
    elif isinstance(contents, str):
      path.write_text(contents, "utf-8")
    else:
      path.write_text(json.dumps(contents), "utf-8")
  return folder


def ranks() -> dict[bytes, int]:
  """Tokens by rank as tiktoken has them: bytes, then merges in their order."""
  alphabet = {text: byte for byte, text in _byte_texts().items()}
  tokenizer = json.loads(train(600).to_str())
  tokens = [bytes((byte,)) for byte in range(256)]
  for merge in tokenizer["model"]["merges"]:
    token = bytes(alphabet[c] for c in "".join(merge))
    if token not in tokens:
      tokens.append(token)
  return {token: rank for rank, token in enumerate(tokens)}


def ranks_file(table: dict[bytes, int]) -> bytes:
  lines = (b"%s %d\n" % (base64.b64encode(t), rank) for t, rank in table.items())
  return b"".join(lines)


def kimi_config(first: int, **fields: Any) -> dict[str, Any]:
  """Kimi's `tokenizer_config.json` for so many ranks."""
  flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
  return {
    "added_tokens_decoder": {
      str(first + i): {"content": name, "special": special, **flags}
      for i, (name, special) in KIMI_NAMES.items()
    },
    "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "chat_template": KIMI_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "[EOS]",
    "model_max_length": 1000000000000000019884624838656,
    "pad_token": "[PAD]",
    "tokenizer_class": "TikTokenTokenizer",
    "unk_token": "[UNK]",
    **fields,
  }


def _byte_texts() -> dict[int, str]:
  """How byte-level BPE writes bytes: visible ones as they are, others shifted."""
  visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in visible]
  return {byte: chr(byte) for byte in visible} | {
    byte: chr(256 + i) for i, byte in enumerate(others)
  }
