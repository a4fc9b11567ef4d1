"""The code in the documentation runs and says what it should."""

from __future__ import annotations

import re
from pathlib import Path

import kdtree_jax as kd
from kdtree_jax.checkpoint import export_hf

ROOT = Path(__file__).parents[1]


def test_a_round_by_hand_gives_the_text_of_decode(capsys):
  page = (ROOT / "docs" / "steps.md").read_text()
  (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
  names: dict = {}
  exec(compile(code, "docs/steps.md", "exec"), names)
  count = len(names["text"])
  assert count > 6  # five rounds, at least one of which accepted a draft
  config = kd.DecodeConfig(
    budget=15, rows=16, max_new_tokens=count, stop_token_ids=(), cache_len=256
  )
  result = kd.decode(names["target"], names["drafter"], [names["prompt"]], config)
  assert result[0].tokens.tolist() == names["text"]
  assert names["tokenizer"].decode(names["text"]) in capsys.readouterr().out


def test_a_directory_of_hugging_face(tmp_path, monkeypatch, capsys):
  """With the demo's target in place of the one that the page names."""
  page = (ROOT / "docs" / "hugging_face.md").read_text()
  (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
  (name,) = set(re.findall(r"load_\w+\(\"([^\"]+)\"", code))
  monkeypatch.chdir(tmp_path)
  export_hf(ROOT / "kdtree_jax" / "demo" / "target.kdtr", name)
  names: dict = {}
  exec(compile(code, "docs/hugging_face.md", "exec"), names)
  assert names["prompt"][0] == names["target"].config.bos_token_id
  assert len(names["result"][0].tokens) > 4
  text = names["tokenizer"].decode(names["result"][0].tokens, skip_special_tokens=True)
  assert text in capsys.readouterr().out


def test_no_placeholder_is_left():
  for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
    assert not re.search(r"@[A-Z]+@", path.read_text()), path
