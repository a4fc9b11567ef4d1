"""kdtree-decode on Hugging Face directories: a tiny pair with its own tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax import checkpoint
from kdtree_jax.checkpoint import export_hf, save_drafter, save_target
from kdtree_jax.reference.weights import random_drafter_weights, random_weights
from tests.cli.decode_test import _run_main
from tests.tokenizer.files import kimi_config, ranks, ranks_file, train
from tests.training import tiny

CHAT = (
  "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|mask|>")
VOCAB = 400
MODEL = dataclasses.replace(
  tiny.MODEL,
  vocab_size=VOCAB,
  num_hidden_layers=2,
  first_k_dense_replace=1,
  max_position_embeddings=256,
  tie_word_embeddings=False,
)
DRAFTER = dataclasses.replace(
  tiny.DRAFTER,
  vocab_size=VOCAB,
  num_target_layers=2,
  max_position_embeddings=256,
  mask_token_id=3,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
  """Folders "target" and "drafter"."""
  folder = tmp_path_factory.mktemp("pair")
  tokenizer = train(VOCAB, SPECIAL).to_str()
  weights = random_weights(MODEL, 1)
  save_target(folder / "t.kdtr", MODEL, weights, tokenizer_json=tokenizer)
  export_hf(folder / "t.kdtr", folder / "target")
  (folder / "target" / "chat_template.jinja").write_text(CHAT)
  save_drafter(folder / "d.kdtr", DRAFTER, random_drafter_weights(DRAFTER, 2))
  export_hf(folder / "d.kdtr", folder / "drafter")
  return folder


@pytest.fixture
def decode(monkeypatch, capsys):
  """Runs the command with flags; returns exit status, output, errors."""

  def run(*args: str):
    from absl import flags

    from kdtree_jax.cli import decode
    from kdtree_jax.cli import flags as cli_flags

    fresh = flags.FlagValues()
    with monkeypatch.context() as patch:
      patch.setattr(flags, "FLAGS", fresh)
      with pytest.raises(SystemExit) as stopped:
        argv = ["kdtree-decode", "--max_new_tokens=10", *args]
        _run_main(decode, cli_flags, fresh, argv, patch)
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err

  return run


def record(output: str) -> dict:
  return json.loads(output.splitlines()[0])


def test_a_directory_and_its_drafter(pair, decode):
  status, output, errors = decode(
    f"--target={pair / 'target'}",
    f"--drafter={pair / 'drafter'}",
    "--prompt=The quick",
    "--output=json",
    "--verify",
  )
  assert status == 0, errors
  assert "identical to plain decoding" in errors
  found = record(output)
  # The same by hand: the exported tokenizer begins texts as the model was trained.
  tokenizer = kd.load_tokenizer(pair / "target")
  prompt = tokenizer.encode("The quick")
  assert prompt[0] == 0 and tokenizer.decode(prompt[1:]) == "The quick"
  target = kd.load_checkpoint(pair / "target", "float32", "as_stored")
  plain = kd.DecodeConfig(method="plain", max_new_tokens=10, slots=1)
  expected = kd.decode(target, None, [prompt], plain)[0].tokens
  np.testing.assert_array_equal(found["tokens"], expected)
  assert found["text"] == tokenizer.decode(expected, skip_special_tokens=True)
  # The KDTR file holds the same model and a tokenizer that does not say how it begins.
  status, output, _ = decode(
    f"--target={pair / 't.kdtr'}", "--method=plain", "--prompt=The quick",
    "--output=json",
  )  # fmt: skip
  assert status == 0
  assert record(output)["tokens"] == found["tokens"]


@pytest.mark.parametrize(
  ("name", "flag", "expected"),
  [
    ("target", None, "as_stored"),
    ("target", "dequantized", "dequantized"),
    ("t.kdtr", None, "dequantized"),
    ("t.kdtr", "as_stored", "as_stored"),
  ],
)
def test_experts_of_a_directory_are_held_as_stored(
  pair, decode, monkeypatch, name, flag, expected
):
  def load(path: str, dtype: str, expert_dtype: str):
    raise ValueError(f"loads experts {expert_dtype}")

  monkeypatch.setattr(checkpoint, "load_target", load)
  arguments = (f"--target={pair / name}", "--method=plain", "--prompt=a")
  more = () if flag is None else (f"--expert_dtype={flag}",)
  status, _, errors = decode(*arguments, *more)
  assert status == 2 and f"loads experts {expected}\n" in errors


def test_chat_applies_the_template(pair, decode):
  status, output, errors = decode(
    f"--target={pair / 'target'}",
    "--chat",
    "--method=plain",
    "--prompt=The quick",
    "--output=json",
  )
  assert status == 0, errors
  tokenizer = kd.load_tokenizer(pair / "target")
  prompt = tokenizer.encode("<|user|>The quick<|assistant|>", add_special_tokens=False)
  target = kd.load_checkpoint(pair / "target", "float32", "as_stored")
  plain = kd.DecodeConfig(method="plain", max_new_tokens=10, slots=1)
  expected = kd.decode(target, None, [prompt], plain)[0].tokens
  np.testing.assert_array_equal(record(output)["tokens"], expected)
  # The text form keeps what was said and what is answered apart.
  status, output, _ = decode(
    f"--target={pair / 'target'}", "--chat", "--method=plain", "--prompt=The quick"
  )
  assert status == 0 and "The quick\n\n" in output


def test_another_tokenizer(pair, decode, tmp_path):
  """Kimi's kind of tokenizer, of the size of the model."""
  table = dict(list(ranks().items())[:256])
  path = tmp_path / "kimi"
  path.mkdir()
  (path / "tiktoken.model").write_bytes(ranks_file(table))
  (path / "tokenizer_config.json").write_text(json.dumps(kimi_config(256)))
  arguments = (f"--target={pair / 'target'}", "--method=plain", "--prompt=a")
  status, _, errors = decode(*arguments, f"--tokenizer={path}")
  assert status == 2
  assert "vocab_size = 512" in errors and f"vocab_size = {VOCAB}" in errors
  assert "Traceback" not in errors


def test_a_directory_without_tokenizer(pair, decode, tmp_path):
  shutil.copytree(pair / "target", tmp_path / "t")
  (tmp_path / "t" / "tokenizer.json").unlink()
  arguments = (f"--target={tmp_path / 't'}", "--method=plain", "--prompt=a")
  status, _, errors = decode(*arguments)
  assert status == 2 and "no tokenizer here" in errors
  tokenizer = pair / "target" / "tokenizer.json"
  status, output, errors = decode(*arguments, f"--tokenizer={tokenizer}")
  assert status == 0, errors
  status, _, errors = decode(*arguments, f"--tokenizer={tokenizer}", "--chat")
  assert status == 2 and "no default chat template" in errors


def test_a_drafter_of_another_target(pair, decode, tmp_path):
  shutil.copytree(pair / "drafter", tmp_path / "d")
  path = tmp_path / "d" / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"num_target_layers": 3}))
  status, _, errors = decode(
    f"--target={pair / 'target'}", f"--drafter={tmp_path / 'd'}", "--prompt=a"
  )
  assert status == 2
  assert "num_target_layers = 3 does not fit the target" in errors


@pytest.mark.parametrize(
  ("args", "says"),
  [
    (("--drafter=x",), "--drafter needs --target"),
    (("--tokenizer=x",), "--tokenizer needs --target"),
    (("--drafter_rope_amplitude=1",), "--drafter_rope_amplitude needs --target"),
    (
      ("--target=TARGET", "--drafter_rope_amplitude=1"),
      "--drafter_rope_amplitude needs --drafter",
    ),
    (
      ("--target=TARGET", "--drafter=DRAFTER", "--drafter_rope_amplitude=0"),
      "rope_amplitude",
    ),
    (("--target=TARGET", "--drafter_causal=all"), "--drafter_causal needs --drafter"),
    (("--target=TARGET", "--tokenizer=/nowhere"), "/nowhere"),
    (("--chat", "--prompt=a"), "no default chat template"),  # The demo has none.
  ],
)
def test_bad_input(pair, decode, args, says):
  args = [
    a.replace("TARGET", str(pair / "target")).replace("DRAFTER", str(pair / "drafter"))
    for a in args
  ]
  status, _, errors = decode(*args)
  assert status == 2 and says in errors and "Traceback" not in errors
