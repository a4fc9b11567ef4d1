"""kdtree-decode on the demo pair: text, JSON, verification, and bad input.

One process per test is what a user runs; the compiled programs come from the disk
cache after the first of them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def run(*args: str) -> subprocess.CompletedProcess:
  command = [
    sys.executable,
    "-m",
    "kdtree_jax.cli.decode",
    "--max_new_tokens=12",
    *args,
  ]
  return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_text_output_verifies_and_draws():
  done = run("--humaneval=1", "--verify", "--draw")
  assert done.returncode == 0, done.stderr
  assert "identical to plain decoding: 12 tokens" in done.stdout
  assert "tokens per round" in done.stdout
  assert "round 1:" in done.stdout and "●" in done.stdout
  assert "Traceback" not in done.stderr


def test_json_has_a_line_per_prompt_and_keeps_good_lines_before_a_bad_one(tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_text(
    '{"id": "a", "prompt": "def add(a, b):\\n"}\n'
    "\n"
    '{"prompt": "import os\\n"}\n'
    '{"prompt": 3}\n'
    '{"prompt": "never read"}\n'
  )
  done = run(f"--prompts={path}", "--output=json", "--temperature=0.7")
  assert done.returncode == 2
  records = [json.loads(line) for line in done.stdout.splitlines()]
  assert [r["prompt"] for r in records] == ["def add(a, b):\n", "import os\n"]
  assert [r.get("id") for r in records] == ["a", None]
  assert "line 4" in done.stderr and '"prompt"' in done.stderr
  for r in records:
    assert sum(r["accepted_lengths"]) == len(r["tokens"]) - 1
    assert r["rounds"] == len(r["accepted_lengths"])
    assert r["method"] == "ddtree"
    assert r["finish_reason"] in ("stop", "length")
    assert r["text"] and r["seconds"] > 0 and r["tokens_per_second"] > 0


def test_verify_fails_with_status_1_at_the_first_difference(monkeypatch, capsys):
  import numpy as np
  from absl import flags

  from kdtree_jax.cli import decode
  from kdtree_jax.decoding import result as results

  if "verify" not in flags.FLAGS:
    decode.define_flags()
  flags.FLAGS(
    ["x", "--verify", "--prompt=x = 1\n", "--max_new_tokens=12", "--seed=0"],
  )
  original = decode._Run.decode

  def perturbed(self, config):
    result, seconds = original(self, config)
    if config.method == "plain":
      logits = result[0].logits.copy()
      logits[3, 7] = np.nextafter(logits[3, 7], np.float32(np.inf))
      changed = results.dataclasses.replace(result[0], logits=logits)
      result = results.DecodeResult((changed,))
    return result, seconds

  monkeypatch.setattr(decode._Run, "decode", perturbed)
  try:
    status = decode.main(["x"], None)
  finally:
    flags.FLAGS.unparse_flags()
  assert status == 1
  error = capsys.readouterr().err
  assert "DIFFERENT from plain decoding: sequence 0, token 3" in error
  assert "first at id 7" in error


@pytest.mark.parametrize(
  ("args", "says"),
  [
    (("--temperature=-1",), "temperature"),
    (("--temperature=nan",), "temperature"),
    (("--top_p=0",), "top_p"),
    (("--budget=-1",), "budget"),
    (("--budget=20", "--rows=8"), "rows"),
    (("--method=chain", "--budget=16"), "block"),
    (("--method=beam",), "method"),
    (("--nosuchflag=1",), "nosuchflag"),
    (("--prompt=",), "--prompt is empty"),
    (("--prompt=a", "--prompts=b"), "exclude"),
    (("--prompts=/nowhere/prompts.jsonl",), "/nowhere/prompts.jsonl"),
    (("--target=/nowhere/t.kdtr",), "/nowhere/t.kdtr"),
    (("--config=/nowhere/c.py",), "/nowhere/c.py"),
    (("stray",), "stray"),
    (("--implementation=cuda",), "cuda"),
  ],
)
def test_bad_input_is_one_line_and_status_2(args, says, monkeypatch, capsys):
  from absl import flags

  from kdtree_jax.cli import decode
  from kdtree_jax.cli import flags as cli_flags

  fresh = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", fresh)
  with pytest.raises(SystemExit) as stopped:
    _run_main(decode, cli_flags, fresh, ["kdtree-decode", *args], monkeypatch)
  error = capsys.readouterr().err
  assert stopped.value.code == 2
  assert says in error
  assert "Traceback" not in error


def _run_main(decode, cli_flags, fresh, argv, monkeypatch) -> None:
  """`decode.run()` without its own process: absl's flags are global."""
  import absl.app

  def app_run(main, argv, flags_parser):
    sys.exit(main(flags_parser(argv)))

  monkeypatch.setattr(absl.app, "run", app_run)
  _define_on(decode, fresh, monkeypatch)
  cli_flags.run(decode.main, argv)


def _define_on(decode, fresh, monkeypatch) -> None:
  from absl import flags

  for name in ("string", "integer", "float", "bool", "enum"):
    define = getattr(flags, f"DEFINE_{name}")
    monkeypatch.setattr(
      flags,
      f"DEFINE_{name}",
      lambda *a, _define=define, **k: _define(*a, flag_values=fresh, **k),
    )
  decode.define_flags()


def test_help_lists_the_programs_own_flags(monkeypatch, capsys):
  from absl import flags

  from kdtree_jax.cli import decode
  from kdtree_jax.cli import flags as cli_flags

  fresh = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", fresh)
  with pytest.raises(SystemExit) as stopped:
    _run_main(decode, cli_flags, fresh, ["kdtree-decode", "--help"], monkeypatch)
  assert stopped.value.code == 0
  text = capsys.readouterr().out
  assert "--verify" in text and "--prompts" in text and "continue prompts" in text


@pytest.mark.parametrize(
  ("content", "says"),
  [
    (b'{"prompt": "\\ud800"}\n', "Unicode"),
    (b"\xff\xfe\n", "line 1"),
    (b"", "no prompt"),
  ],
)
def test_files_that_are_not_text(content, says, tmp_path):
  from kdtree_jax.cli import prompts

  path = tmp_path / "p.jsonl"
  path.write_bytes(content)
  good, bad = prompts.read_jsonl(path)
  assert good == []
  assert (bad is None) if says == "no prompt" else (says in bad)


def test_a_byte_order_mark_is_no_error(tmp_path):
  from kdtree_jax.cli import prompts

  path = tmp_path / "p.jsonl"
  path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
  good, bad = prompts.read_jsonl(path)
  assert [p["prompt"] for p in good] == ["a", "b"] and bad is None
