"""Acceptance and speed: what they make of results that are known."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from absl import flags

from kdtree_jax.bench import acceptance, plots, report, speed
from kdtree_jax.bench.stages import STAGES, StageTimer
from kdtree_jax.cli import bench as cli
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import DecodeResult, SequenceResult, Stats
from kdtree_jax.drafter import NGram
from tests.decoding import models

PROMPTS = [[1, 2], [3]]
BASE = DecodeConfig(max_new_tokens=10, slots=2)


def sequence(lengths, seconds=1.0, first=7) -> SequenceResult:
  """A text of distinct tokens, committed in rounds of the given lengths."""
  tokens = np.arange(first, first + 1 + sum(lengths), dtype=np.int32)
  return SequenceResult(
    tokens=tokens,
    finish_reason="length",
    logprobs=np.zeros(len(tokens), np.float32),
    stats=Stats(len(lengths), tuple(lengths), 0.0, seconds, 0.0),
  )


def rounds_of(config: DecodeConfig) -> list[list[int]]:
  """Rounds of both prompts: a chain accepts 1 draft, a tree 2, or none at budget 1."""
  if config.method == "chain":
    return [[2, 2, 2], [2, 1, 1]]
  return [[3, 3], [3, 1]] if config.budget > 1 else [[1] * 6, [1] * 4]


@pytest.fixture
def counted(monkeypatch):
  """The report on made-up results of two prompts, and the configurations asked for."""
  configs = []

  def decode(target, drafter, prompts, config, **options):
    configs.append(config)
    return DecodeResult(tuple(sequence(r) for r in rounds_of(config)))

  monkeypatch.setattr(acceptance, "decode", decode)
  result = acceptance.run(
    models.target(),
    models.dflash(),
    PROMPTS,
    budgets=(12, 3, 1, 12),
    temperatures=(0.0, 0.7),
    base=BASE,
  )
  return result, configs


def test_acceptance_measures_chains_to_the_depth_and_trees_at_each_budget(counted):
  result, configs = counted
  asked = [(c.method, c.budget) for c in configs]
  chains, trees = [1, 3, models.DEPTH], [1, 3, 12]
  half = [("chain", b) for b in chains] + [("ddtree", b) for b in trees]
  assert asked == 2 * half
  assert {c.rows for c in configs} == {16}  # one program for all budgets
  assert [c.temperature for c in configs] == 6 * [0.0] + 6 * [0.7]
  assert len(result["measurements"]) == 12


def test_acceptance_figures(counted):
  result, _ = counted
  chain = result["measurements"][2]
  tree = result["measurements"][5]
  assert (chain["method"], chain["budget"]) == ("chain", models.DEPTH)
  assert (tree["method"], tree["budget"]) == ("ddtree", 12)
  assert chain["tokens_per_round_micro"] == 10 / 6
  assert chain["ratio_to_full_chain_micro"] is None
  assert tree["tokens_per_round_micro"] == 10 / 4
  assert tree["tokens_per_round_macro"] == (3 + 2) / 2
  assert tree["ratio_to_full_chain_micro"] == 10 / 4 / (10 / 6)
  assert tree["zero_share"] == 1 / 4
  assert math.isnan(tree["repeated_8gram_share"])  # texts of 7 and 5 tokens
  assert tree["unconditional"][:3] == (3 / 4, 3 / 4, 0)
  # A budget of 1 holds no second draft.
  assert [len(m["unconditional"]) for m in result["measurements"][:6]] == [
    1,
    3,
    models.DEPTH,
    1,
    3,
    models.DEPTH,
  ]
  low, high = tree["ratio_interval_95"]
  assert low <= 1.5 <= high


def test_acceptance_report_is_text_json_and_picture(counted, tmp_path):
  result, _ = counted
  text = acceptance.render(result)
  for words in ("micro", "macro", "unconditional", "conditional", "rep. 8-grams"):
    assert words in text
  assert "same for all methods and budgets" in text
  report.write_json(tmp_path / "a.json", result)
  assert json.loads((tmp_path / "a.json").read_text())["suite"] == "acceptance"
  plots.acceptance(result, tmp_path / "a.png")
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_acceptance_says_so_when_a_text_depends_on_the_method(monkeypatch):
  def decode(target, drafter, prompts, config, **options):
    first = 8 if config.budget == 3 and config.method == "ddtree" else 7
    return DecodeResult(
      (sequence([1, 1]), sequence([2], first=first)),
    )

  monkeypatch.setattr(acceptance, "decode", decode)
  result = acceptance.run(
    models.target(),
    models.dflash(),
    PROMPTS,
    budgets=(2, 3, 4),
    temperatures=(0.0,),
    base=BASE,
  )
  assert "T=0.0 ddtree 3: the text of prompt 1" in result["text_difference"]
  assert "TEXTS DIFFER" in acceptance.render(result)


def test_acceptance_needs_budgets_and_temperatures():
  for budgets, temperatures in (((), (0.0,)), ((3,), ())):
    with pytest.raises(ValueError, match="must not be empty"):
      acceptance.run(
        models.target(),
        models.dflash(),
        PROMPTS,
        budgets=budgets,
        temperatures=temperatures,
        base=BASE,
      )


def test_speed_compares_medians_and_interleaves(monkeypatch, tmp_path):
  calls = []

  def decode(target, drafter, prompts, config, *, sequence_ids, on_compile):
    assert (drafter is None) == (config.method == "plain")
    calls.append((config.method, config.rows, sequence_ids[0]))
    # Plain: 12 rounds of a token in 4 s. Chain: 6 rounds in 2 s. Tree: 4 in 1 s.
    rounds, seconds = {
      "plain": ([1] * 12, 4.0),
      "chain": ([2] * 6, 2.0),
      "ddtree": ([3] * 4, 1.0),
    }[config.method]
    # The second prompt takes twice as long, the third eight times.
    return DecodeResult((sequence(rounds, seconds * (1, 2, 8)[sequence_ids[0]]),))

  monkeypatch.setattr(speed, "decode", decode)
  result = speed.run(
    models.target(),
    models.dflash(),
    [*PROMPTS, [4]],
    budgets=(3,),
    repetitions=2,
    stage_repeats=0,
    base=BASE,
  )
  methods = [("plain", 1), ("chain", models.DEPTH + 1), ("ddtree", 4)]
  assert calls[:3] == [(*m, 0) for m in methods]  # each once, to compile
  assert calls[3:] == 2 * [(*m, i) for i in (0, 1, 2) for m in methods]
  plain, chain, tree = result["measurements"]
  assert plain["tokens_per_second"] == 12 / 8  # the second prompt's
  assert [m["ratio_to_plain"] for m in (plain, chain, tree)] == [1, 2, 4]
  np.testing.assert_allclose(tree["ratio_interval_95"], 4, rtol=1e-12)
  assert tree["tokens_per_round_micro"] == 3
  assert tree["round_ms"] == 500
  assert "ddtree at budget 3: 4.00 x plain" in speed.render(result)
  stages = dict.fromkeys(STAGES, 50.0)
  for m in result["measurements"]:
    m["stages"] = stages
  # The tree's row ends with the rest, 500 - 5 * 50, and the round.
  assert re.search(r"250\.000 +500\.000$", speed.render(result))
  plots.speed(result, tmp_path / "s.png")
  assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_speed_says_so_when_speculation_does_not_pay():
  measured = [
    {"name": "plain", "budget": 0, "ratio_to_plain": 1.0},
    {"name": "ddtree", "budget": 3, "ratio_to_plain": 0.9},
  ]
  assert "Nothing is faster" in speed.verdict({"measurements": measured})


def test_speed_refuses_texts_without_rounds(monkeypatch):
  monkeypatch.setattr(
    speed, "decode", lambda *a, **k: DecodeResult((sequence([], 0.0),))
  )
  with pytest.raises(ValueError, match="nothing can be timed"):
    speed.run(models.target(), models.dflash(), PROMPTS, stage_repeats=0, base=BASE)


def test_every_stage_takes_time():
  timer = StageTimer(
    models.target(), NGram(models.VOCAB), models.PROMPTS[0], BASE, 200, repeats=2
  )
  tree = timer.measure("ddtree", 3, 4)
  assert tuple(tree) == STAGES
  assert all(math.isfinite(t) and t > 0 for t in tree.values())
  plain = timer.measure("plain", 0, 1)
  assert plain["draft"] == plain["build"] == 0 < plain["verify"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "kdtree_jax.cli.bench", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ((), "--suite is needed, one of acceptance, exactness, speed, kernels, decode"),
    (("--suite=speed", "--slots=1,2"), "speed decodes one sequence"),
    (("--suite=exactness", "--budgets=7,x"), "--budgets=7,x is not allowed"),
    (("--suite=acceptance", "--budgets=99999"), "budget = 99999 is not allowed"),
    (("--suite=exactness", "--max_seconds=-5"), "--max_seconds=-5"),
    (("--suite=acceptance", "--rounds=3"), "--rounds: --suite=acceptance does not"),
    (("--suite=kernels", "--seed=1"), "--seed: --suite=kernels does not take it"),
    (("--suite=kernels", "--config=configs/demo.py"), "--config: --suite=kernels does"),
    (("--suite=decode", "--rows=8"), "--rows: --suite=decode does not take it"),
    (("--suite=decode", "--temperatures=0,1"), "--temperatures=0,1: decode takes one"),
    (
      ("--suite=decode", "--model=kimi_like", "--target=t"),
      "--target: --model=kimi_like makes a pair",
    ),
    (("--suite=decode", "--implementation=cuda"), "implementation='cuda' of "),
  ],
)
def test_bad_flags_are_one_line(arguments, words, tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  done = command(*arguments, f"--output_dir={tmp_path / 'new'}")
  assert done.returncode == 2
  assert words in done.stderr
  assert "Traceback" not in done.stderr
  assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_refused_before_anything_runs(tmp_path):
  file = tmp_path / "file"
  file.write_text("mine")
  for folder in (file, file / "below"):
    done = command("--suite=speed", f"--output_dir={folder}")
    assert done.returncode == 2
    assert f"--output_dir={folder} is not allowed: {file} is a file" in done.stderr
  assert file.read_text() == "mine"


def _is_a_command_flag(name: str) -> bool:
  return (flags.FLAGS.find_module_defining_flag(name) or "").startswith(
    "kdtree_jax.cli"
  )


def test_each_flag_belongs_to_a_suite():
  flags.FLAGS.unparse_flags()
  # Another test of this process may have defined another command's flags.
  others = {name: flags.FLAGS[name] for name in flags.FLAGS}
  removed = [name for name in others if _is_a_command_flag(name)]
  for name in removed:
    delattr(flags.FLAGS, name)
  before = set(flags.FLAGS)
  cli.define_flags()
  defined = set(flags.FLAGS) - before
  for name in defined:
    delattr(flags.FLAGS, name)
  for name in removed:
    flags.FLAGS[name] = others[name]
  taken = {name for names in cli.SUITES.values() for name in names}
  assert defined - {"suite", "output_dir"} == taken - {"config"}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "files"),
  [
    (
      ("--suite=acceptance", "--num_prompts=2", "--budgets=7", "--slots=2"),
      ("acceptance_humaneval.json", "acceptance_humaneval.png"),
    ),
    (
      ("--suite=exactness", "--scale=0.01", "--dtype=float32", "--slots=3"),
      ("exactness.json", "exactness.jsonl"),
    ),
    (
      ("--suite=speed", "--num_prompts=1", "--budgets=7", "--repetitions=1"),
      ("speed.json", "speed.png"),
    ),
  ],
)
def test_suites_on_the_demo_pair(arguments, files, tmp_path):
  done = command(*arguments, "--max_new_tokens=24", f"--output_dir={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert arguments[0] in done.stdout
  for name in files:
    assert (tmp_path / name).stat().st_size > 0


def test_method_configs_use_their_own_width():
  config = speed.Method("ddtree", 7).config(BASE)
  assert (config.method, config.budget, config.rows) == ("ddtree", 7, 8)
  plain = speed.Method("plain", 0).config(BASE)
  assert plain == dataclasses.replace(BASE, method="plain", budget=None, rows=1)
