from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from kdtree_jax.cli.flags import check_folder, load_experiment, override

ROOT = pathlib.Path(__file__).parents[2]

# A program with one flag of its own, which prints what it was given.
PROGRAM = """
import sys
from absl import flags
from kdtree_jax.cli import flags as cli_flags

flags.DEFINE_enum("stage", "all", ["all", "target"], "What to run.")

def main(positional, experiment):
  if positional[1:]:
    raise ValueError(f"unexpected argument {positional[1]!r}\\nof this program")
  print(flags.FLAGS.stage, experiment and experiment.decode.budget)
  if flags.FLAGS.stage == "target":
    return 3
  if experiment:
    print(experiment.model.rope_scaling.factor)

cli_flags.run(main, sys.argv)
"""

MODEL = """
model = ModelConfig(
  vocab_size=100, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
  num_hidden_layers=3, num_attention_heads=4, q_lora_rank=None, kv_lora_rank=32,
  qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8,
  num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
  norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
  topk_method="noaux_tc", first_k_dense_replace=1, rms_norm_eps=1e-5,
  latent_norm_eps=1e-6, rope_theta=10000.0, rope_interleave=True,
  max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=(1,),
  rope_scaling=YarnConfig(
    factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
  ),
)
"""
CONFIG = f"""
from kdtree_jax.config import DecodeConfig, ModelConfig, YarnConfig
from kdtree_jax.training.config import Experiment, GenerateConfig, TrainConfig
{MODEL}
def get_config():
  return Experiment(
    model=model,
    decode=DecodeConfig(budget=15),
    target_train=TrainConfig(
      steps=300, batch_size=4, sequence_length=16, learning_rate=1e-3
    ),
    generate=GenerateConfig(
      sequences=8, prompt_length=4, sequence_length=16, temperatures=(0.0, 1.0),
      batch_size=4,
    ),
  )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("flags")
  (folder / "config.py").write_text(CONFIG)
  (folder / "program.py").write_text(PROGRAM)
  return folder


@pytest.fixture(scope="module")
def experiment(folder):
  return load_experiment(folder / "config.py")


def run(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "program.py", *arguments],
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ("arguments", "printed"),
  [
    ([], "all None\n"),
    (["--config=config.py"], "all 15\n64.0\n"),
    (["--config", "config.py", "--config.decode.budget", "7"], "all 7\n64.0\n"),
    (
      [
        "--config.decode.budget=9",
        "--config=config.py",
        "--config.model.rope_scaling.factor=32",
        "--config.decode.budget=8",
      ],
      "all 8\n32.0\n",
    ),
  ],
)
def test_file_and_overrides_reach_the_program(folder, arguments, printed):
  result = run(folder, *arguments)
  assert (result.stdout, result.returncode) == (printed, 0), result.stderr


def test_the_exit_status_is_what_the_program_returns(folder):
  assert run(folder, "--stage=target").returncode == 3


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (["--config=config.py", "--config.decode.bugdet=3"], "--config.decode.bugdet"),
    (["--config=config.py", "--config.decode.budget=many"], "of type int"),
    (["--config=config.py", "--config.decode.budget=-1"], "budget = -1"),
    (["--config=config.py", "--config.decode.budget"], "--config.decode.budget"),
    (["--config.decode.budget=3"], "needs --config=FILE"),
    (["--config=none.py"], "none.py: no such file"),
    (["--config=config.py", "--stage=corpse"], "should be one of <all|target>"),
    (["--config=config.py", "--stege=all"], "'stege'. Did you mean: stage"),
    (["stray"], "unexpected argument 'stray' of this program"),
  ],
)
def test_a_bad_argument_is_one_line_and_status_2(folder, arguments, says):
  result = run(folder, *arguments)
  assert result.returncode == 2 and result.stdout == ""
  assert result.stderr.startswith("error: ") and says in result.stderr
  assert result.stderr.count("\n") == 1, result.stderr


def test_overrides_of_every_type(experiment):
  changed = override(
    experiment,
    {
      "model": {
        "rope_theta": "5e4",
        "norm_topk_prob": "False",
        "q_lora_rank": "24",
        "eos_token_id": "(0, 5)",
        "scoring_func": "softmax",
        "rope_scaling": {"beta_fast": "1"},
      },
      "decode": {
        "budget": "none",
        "rows": "12",
        "stop_token_ids": "7",
        "temperature": "0.5",
        "return_logits": "true",
      },
      "generate": {"temperatures": "[0.1, 1]"},
    },
  )
  model, decode = changed.model, changed.decode
  assert model.rope_theta == 5e4 and model.norm_topk_prob is False
  assert model.q_lora_rank == 24 and model.eos_token_id == (0, 5)
  assert model.scoring_func == "softmax" and model.rope_scaling.beta_fast == 1.0
  assert decode.budget is None and decode.rows == 12 and decode.stop_token_ids == (7,)
  assert decode.temperature == 0.5 and decode.return_logits is True
  assert changed.generate.temperatures == (0.1, 1.0)
  assert all(isinstance(t, float) for t in changed.generate.temperatures)
  # What was not named stays, and the original is left alone.
  assert model.rope_scaling.factor == 64.0 and decode.max_new_tokens == 128
  assert changed.target_train == experiment.target_train
  assert experiment.decode.budget == 15
  assert override(experiment, {"decode": {"stop_token_ids": "()"}}).decode == (
    override(experiment, {"decode": {"stop_token_ids": ""}}).decode
  )
  assert override(experiment, {}) == experiment


def test_fields_are_checked_together(experiment):
  # Warm-up takes 200 steps unless told otherwise: neither order of two single
  # replacements would do.
  changed = override(
    experiment, {"target_train": {"steps": "100", "warmup_steps": "10"}}
  )
  assert (changed.target_train.steps, changed.target_train.warmup_steps) == (100, 10)
  with pytest.raises(ValueError, match="warmup_steps = 200"):
    override(experiment, {"target_train": {"steps": "100"}})


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"modle": {"vocab_size": "3"}}, r"--config\.modle: no such field.*model"),
    ({"model": {"rope_tehta": "3"}}, r"--config\.model\.rope_tehta.*rope_theta"),
    ({"decode": "3"}, r"--config\.decode=3"),
    ({"decode": {"budget": {"x": "3"}}}, r"decode\.budget\.x: .*budget is 15"),
    ({"drafter": {"block_size": "3"}}, r"drafter\.block_size: .*drafter is None"),
    ({"model": {"vocab_size": "2.5"}}, r"vocab_size=2\.5.*type int"),
    ({"model": {"vocab_size": "none"}}, r"vocab_size=none.*type int"),
    ({"model": {"norm_topk_prob": "0.3"}}, r"norm_topk_prob=0\.3.*type bool"),
    ({"model": {"rope_theta": "ten"}}, r"rope_theta=ten.*type float"),
    ({"model": {"eos_token_id": "(0, x)"}}, r"eos_token_id=x.*type int"),
    ({"model": {"scoring_func": "tanh"}}, r"scoring_func = 'tanh'"),
    ({"decode": {"method": "none"}}, r"method = 'none'"),
  ],
)
def test_overrides_that_do_not_fit_are_named(experiment, changes, says):
  with pytest.raises(ValueError, match=says):
    override(experiment, changes)


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("x = 1", r"defines no get_config\(\)"),
    ("def get_config(): return {}", "must return an Experiment, not dict"),
    ("def get_config(:", "SyntaxError"),
    # A field without default, such as rope_theta, that the file forgot.
    (CONFIG.replace("rope_theta=10000.0, ", ""), "TypeError.*rope_theta"),
    (CONFIG.replace("rms_norm_eps=1e-5", "rms_norm_eps=0.0"), "rms_norm_eps = 0.0"),
  ],
)
def test_files_that_give_no_experiment(tmp_path, text, says):
  path = tmp_path / "config.py"
  path.write_text(text)
  with pytest.raises(ValueError, match=rf"--config={path}: .*{says}"):
    load_experiment(path)


def test_the_demo_configuration_loads():
  experiment = load_experiment(ROOT / "configs" / "demo.py")
  drafter, model = experiment.drafter, experiment.model
  assert drafter is not None and drafter.vocab_size == model.vocab_size
  assert drafter.num_target_layers == model.num_hidden_layers


def test_ctrl_c_is_one_line(tmp_path):
  """What was printed before arrives, and nothing of Python's."""
  program = PROGRAM.replace(
    "  if positional", "  print('begun')\n  raise KeyboardInterrupt\n  if positional"
  )
  (tmp_path / "program.py").write_text(program)
  done = run(tmp_path)
  assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "stopped\n")


def test_a_folder_is_checked_and_not_made(tmp_path):
  check_folder("workdir", tmp_path / "new" / "below")
  assert not list(tmp_path.iterdir())
  (tmp_path / "file").write_text("mine")
  for folder in (tmp_path / "file", tmp_path / "file" / "below"):
    with pytest.raises(ValueError, match=r"--workdir=.*file is a file; give a folder"):
      check_folder("workdir", folder)
