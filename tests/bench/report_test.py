"""Tables, JSON, the journal of finished work, and prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from kdtree_jax.bench import prompts, report
from kdtree_jax.bench.journal import Journal, digest, model_digest, source_digest
from kdtree_jax.demo import load_prompts
from tests.decoding import models


def test_json_has_no_nan(tmp_path):
  path = tmp_path / "report.json"
  value = {"a": float("nan"), "b": (np.float32(1.5), [np.int32(2)]), 3: np.arange(2)}
  report.write_json(path, value)
  assert json.loads(path.read_text()) == {"a": None, "b": [1.5, [2]], "3": [0, 1]}


def test_table_aligns_and_marks_what_is_missing():
  text = report.table(["name", "x"], [["a", 1.23456], ["long", float("nan")], ["b", 7]])
  assert text.splitlines() == [
    "name      x",
    "   a  1.235",
    "long      -",
    "   b      7",
  ]


def test_environment_names_device_versions_and_command():
  where = report.environment()
  assert "cpu" in where["device"] or "gpu" in where["device"]
  assert {"kdtree_jax", "python", "jax", "jaxlib", "flax", "numpy"} == set(
    where["versions"]
  )
  head = report.heading({"suite": "s", "environment": where, "settings": {"rows": 3}})
  assert "rows      3" in head
  assert where["command"] in head


def test_journal_survives_a_line_cut_short(tmp_path):
  path = tmp_path / "journal.jsonl"
  Journal(path).append({"cell": 1})
  with path.open("a") as file:
    file.write('{"cell": 2, "tok')  # a kill in the middle of a write
  journal = Journal(path)
  assert journal.records == [{"cell": 1}]
  journal.append({"cell": 3})
  assert Journal(path).records == [{"cell": 1}, {"cell": 3}]


def test_digests_tell_models_apart():
  assert model_digest(models.target()) == model_digest(models.target())
  assert model_digest(models.target()) != model_digest(models.target("bfloat16"))
  assert model_digest(models.dflash()) != model_digest(models.target())
  assert len(source_digest()) == len(digest(["x", 1])) == 16
  assert digest(["x", 1]) != digest(["x", 2])


def test_prompts_of_given_lengths():
  pool = [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
  assert prompts.of_lengths(pool, [3, 4, 1]) == [[0, 1, 2], [4, 5, 6, 7], [0]]
  assert prompts.of_lengths(pool, [2, 2], first=4) == [[4, 5], [6, 7]]
  assert prompts.interleave([[[1], [2]], [[3], [4], [5]]]) == [[1], [3], [2], [4]]


@pytest.mark.parametrize("name", prompts.SETS)
def test_held_out_prompts_begin_a_text(name):
  # Stands for a tokenizer: one token per character.
  tokenizer = SimpleNamespace(
    encode=lambda text: SimpleNamespace(ids=[ord(c) for c in text])
  )
  got = prompts.held_out(tokenizer, name, 0, 2)
  wanted = [[0, *map(ord, r["prompt"])] for r in load_prompts(name)[:2]]
  assert got == wanted
  assert len(prompts.held_out(tokenizer, name, None)) == len(load_prompts(name))
  with pytest.raises(ValueError, match="num_prompts = 1000"):
    prompts.held_out(tokenizer, name, 0, 1000)


def test_unknown_prompt_set():
  with pytest.raises(ValueError, match="prompt_set = 'mbpp'"):
    prompts.held_out(None, "mbpp", 0)
