from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax import reference
from kdtree_jax.checkpoint import read_drafter, read_target, read_tokenizer_json
from kdtree_jax.config import ConfigError
from kdtree_jax.drafter import DFlash, check_drafter
from kdtree_jax.model import Target
from kdtree_jax.training import pipeline
from kdtree_jax.training.config import Experiment, GenerateConfig
from tests.training.tiny import (
  DRAFTER,
  DRAFTER_TRAIN,
  HELD_OUT,
  LENGTH,
  MODEL,
  PROMPT,
  SAMPLES,
  TRAIN,
  corpus,
)

EXPERIMENT = Experiment(
  model=MODEL,
  drafter=DRAFTER,
  target_train=dataclasses.replace(TRAIN, eval_every=40),
  generate=GenerateConfig(
    sequences=SAMPLES + 10,
    prompt_length=PROMPT,
    sequence_length=LENGTH,
    temperatures=(0.0, 1.0),
    batch_size=SAMPLES // 2,
  ),
  drafter_train=dataclasses.replace(DRAFTER_TRAIN, eval_every=150),
)


def train_text() -> np.ndarray:
  """Six documents."""
  tokens = corpus(3000)
  tokens[::500] = MODEL.bos_token_id
  return tokens


def write_corpus(folder: Path, train: np.ndarray, heldout: np.ndarray) -> Path:
  folder.mkdir(parents=True)
  train.astype("<u2").tofile(folder / "train.u16")
  heldout.astype("<u2").tofile(folder / "heldout.u16")
  return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("texts") / "corpus"
  return write_corpus(folder, train_text(), corpus(400))


@pytest.fixture(scope="module")
def work(texts, tmp_path_factory):
  """All stages run: the folder that they wrote to."""
  work = tmp_path_factory.mktemp("work")
  tokenizer = work / "tokenizer.json"
  tokenizer.write_text('{"version": "1.0"}')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pipeline, "HELD_OUT_SEQUENCES", HELD_OUT)
    wrote = [
      pipeline.train_target(EXPERIMENT, texts, work, tokenizer),
      pipeline.write_samples(EXPERIMENT, texts, work),
      pipeline.train_drafter(EXPERIMENT, work),
    ]
  assert [path.name for path in wrote] == ["target.kdtr", "samples.npy", "drafter.kdtr"]
  return work


def losses(folder: Path) -> list[dict]:
  return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize(("stage", "steps"), [("target", 40), ("drafter", 150)])
def test_each_stage_logs_and_learns(work, stage, steps):
  records = losses(work / stage)
  assert [r["step"] for r in records if "loss" in r] == list(range(1, steps + 1))
  assert {"loss", "grad_norm", "skipped", "seconds", "step"} <= set(records[0])
  held_out = [r for r in records if "heldout_loss" in r]
  assert [r["step"] for r in held_out] == [steps]
  assert held_out[0]["heldout_loss"] < 0.5 * records[0]["loss"]
  assert (work / stage / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_target_loads_with_int4_experts(work):
  target = kd.load_checkpoint(work / "target.kdtr", "float32")
  assert isinstance(target, Target) and target.config == MODEL
  config, weights, fingerprint = read_target(work / "target.kdtr")
  assert (config, fingerprint) == (MODEL, target.fingerprint)
  for name, array in weights.items():
    if ".mlp.experts." in name:
      # 16 values a group at most.
      groups = array.reshape(-1, 32)
      assert max(len(np.unique(group)) for group in groups) <= 16, name
  assert read_tokenizer_json(work / "target.kdtr") == '{"version": "1.0"}'
  # It has learnt its text, and computes what the reference does.
  text = corpus()[:40].astype(np.int32)
  logits = np.asarray(jax.jit(kd.forward)(target, text[None])[0])
  assert np.mean(logits[:-1].argmax(-1) == text[1:]) > 0.9
  want = reference.forward(MODEL, weights, text).logits
  np.testing.assert_allclose(logits, want, rtol=0, atol=3e-5)


def test_samples_are_corpus_prompts_and_the_targets_own_text(work):
  samples = np.load(work / "samples.npy")
  assert samples.dtype == np.uint16 and samples.shape == (
    SAMPLES,
    LENGTH,
  )  # whole batches
  # Half of the prompts begin with a document.
  assert np.all(samples[0::2, 0] == MODEL.bos_token_id)
  windows = np.lib.stride_tricks.sliding_window_view(train_text(), PROMPT)
  known = {window.tobytes() for window in windows}
  assert all(prompt.tobytes() in known for prompt in samples[:, :PROMPT].copy())
  target = kd.load_checkpoint(work / "target.kdtr", "float32")
  logits = np.asarray(jax.jit(kd.forward)(target, samples.astype(np.int32)))
  np.testing.assert_array_equal(
    samples[0::2, PROMPT:], logits[0::2, PROMPT - 1 : -1].argmax(-1)
  )


def test_the_drafter_loads_and_is_bonded_to_its_target(work):
  target = kd.load_checkpoint(work / "target.kdtr", "float32")
  drafter = kd.load_checkpoint(work / "drafter.kdtr", "float32")
  assert isinstance(drafter, DFlash)
  assert drafter.config.target_fingerprint == target.fingerprint
  want = dataclasses.replace(DRAFTER, target_fingerprint=target.fingerprint)
  assert drafter.config == want
  check_drafter(drafter, target.config, target.fingerprint)
  with pytest.raises(ConfigError, match="target_fingerprint"):
    check_drafter(drafter, target.config, "another")
  assert set(read_drafter(work / "drafter.kdtr")[1]) == set(
    reference.drafter_weight_shapes(DRAFTER)
  )


def test_the_target_is_quantised_from_a_share_of_the_steps_on(
  texts, tmp_path, monkeypatch
):
  """Training and evaluation switch together, and on time."""

  class Stage:
    def __init__(self, *arguments):
      self.state = None

    def step_fn(self, quantized):
      return f"step {quantized}"

    def eval_fn(self, quantized):
      return lambda state, held_out: float(quantized)

    def target(self, state):
      raise StopIteration  # enough seen

  asked = {}

  def record(state, step_at, data, config, folder, *, evaluate, description):
    asked["steps"] = [step_at(step) for step in range(config.steps)]
    asked["evals"] = [evaluate(state, done) for done in range(1, config.steps + 1)]

  monkeypatch.setattr(pipeline, "TargetStage", Stage)
  monkeypatch.setattr(pipeline, "fit", record)
  train = dataclasses.replace(TRAIN, steps=10, quantize_from=0.7)
  experiment = dataclasses.replace(EXPERIMENT, target_train=train)
  with pytest.raises(StopIteration):
    pipeline.train_target(experiment, texts, tmp_path, None)
  assert asked["steps"] == ["step False"] * 7 + ["step True"] * 3
  # After 7 steps none was quantised yet.
  assert asked["evals"] == [0.0] * 7 + [1.0] * 3


def run_stage(stage: str, experiment: Experiment, texts: Path, work: Path):
  if stage == "target":
    return pipeline.train_target(experiment, texts, work, None)
  if stage == "samples":
    return pipeline.write_samples(experiment, texts, work)
  return pipeline.train_drafter(experiment, work)


@pytest.mark.parametrize(
  ("stage", "field"),
  [
    ("target", "target_train"),
    ("samples", "generate"),
    ("drafter", "drafter_train"),
    ("drafter", "drafter"),
    ("drafter", "generate"),
  ],
)
def test_a_stage_that_is_not_configured_is_named(texts, work, stage, field):
  experiment = dataclasses.replace(EXPERIMENT, **{field: None})
  with pytest.raises(ConfigError, match=f"no '{field}'"):
    run_stage(stage, experiment, texts, work)


@pytest.mark.parametrize("stage", ["samples", "drafter"])
def test_a_stage_that_was_not_run_is_named(texts, tmp_path, stage):
  with pytest.raises(FileNotFoundError, match="run --stage=target first"):
    run_stage(stage, EXPERIMENT, texts, tmp_path)


def test_a_missing_corpus_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no train\.u16.*--stage=corpus"):
    run_stage("target", EXPERIMENT, tmp_path, tmp_path)


@pytest.mark.parametrize(
  ("train", "heldout", "says"),
  [
    (corpus(17), corpus(400), "training text of 17 tokens"),
    (corpus(400), corpus(60), "held-out text of 60 tokens is shorter than one batch"),
    (np.full(400, 64), corpus(400), r"train\.u16 holds token 64.*vocab_size is 64"),
    (corpus(400), np.full(400, 99), r"heldout\.u16 holds token 99"),
  ],
)
def test_a_corpus_that_does_not_fit_is_an_error(tmp_path, train, heldout, says):
  folder = write_corpus(tmp_path / "corpus", train, heldout)
  with pytest.raises(ValueError, match=says):
    run_stage("target", EXPERIMENT, folder, tmp_path)


def test_sequences_longer_than_the_model_allows_are_an_error(texts, work):
  train = dataclasses.replace(TRAIN, sequence_length=65)
  experiment = dataclasses.replace(EXPERIMENT, target_train=train)
  with pytest.raises(ConfigError, match="target_train.sequence_length = 65"):
    run_stage("target", experiment, texts, work)
  generate = dataclasses.replace(EXPERIMENT.generate, sequence_length=65)
  experiment = dataclasses.replace(EXPERIMENT, generate=generate)
  with pytest.raises(ConfigError, match="generate.sequence_length = 65"):
    run_stage("samples", experiment, texts, work)


def test_too_little_text_for_prompts_or_a_drafter(work, tmp_path):
  folder = write_corpus(tmp_path / "corpus", corpus(2000), corpus(400))
  with pytest.raises(ValueError, match="2000 tokens is too short for prompts"):
    run_stage("samples", EXPERIMENT, folder, work)
  with pytest.raises(ValueError, match="holds 80 sequences; 512 are held out"):
    run_stage("drafter", EXPERIMENT, folder, work)


def test_training_computes_in_float32_on_a_cpu(monkeypatch):
  for backend, dtype in (("cpu", jnp.float32), ("gpu", jnp.bfloat16)):
    fake = SimpleNamespace(default_backend=lambda backend=backend: backend)
    monkeypatch.setattr(pipeline, "jax", fake)
    assert pipeline.compute_dtype() == dtype
