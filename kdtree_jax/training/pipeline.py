"""The stages of training a target and its drafter, each from files to files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.checkpoint import load_target, save_drafter, save_target
from kdtree_jax.config import ConfigError, ModelConfig
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.model import Target, target_to_state_dict
from kdtree_jax.training.config import Experiment, TrainConfig
from kdtree_jax.training.corpus import load_tokens
from kdtree_jax.training.drafter_stage import DrafterStage
from kdtree_jax.training.generate import generate
from kdtree_jax.training.loop import fit
from kdtree_jax.training.optimizer import make_optimizer
from kdtree_jax.training.target_stage import TargetStage

TARGET_FILE = "target.kdtr"
SAMPLES_FILE = "samples.npy"
DRAFTER_FILE = "drafter.kdtr"
# Sequences of samples that the drafter is evaluated on and not trained on.
HELD_OUT_SEQUENCES = 512


def compute_dtype() -> jnp.dtype:
  """bf16 on an accelerator; fp32 on a CPU, which has no bf16 units to gain from."""
  return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def train_target(
  experiment: Experiment, corpus: Path, work: Path, tokenizer: Path | None
) -> Path:
  """Trains the target on token files and writes `work/target.kdtr`.

  Args:
    experiment: needs `target_train`.
    corpus: folder with `train.u16` and `heldout.u16` (or their `.xz` forms).
    work: folder of metrics, checkpoints and results.
    tokenizer: JSON file that travels inside the checkpoint.

  Returns:
    The path of the checkpoint: routed experts int4, the rest bf16.
  """
  config = _stage(experiment.target_train, "target_train")
  model = experiment.model
  _check_length("target_train", config.sequence_length, model)
  train = _tokens(corpus, "train", model)
  if len(train) < config.sequence_length + 2:
    raise ValueError(
      f"training text of {len(train)} tokens is shorter than a window of "
      f"sequence_length + 1 = {config.sequence_length + 1}"
    )
  held_out = _windows(_tokens(corpus, "heldout", model), config)
  stage = TargetStage(model, config, make_optimizer(config), compute_dtype())
  quantize_from = int(config.quantize_from * config.steps)
  steps = {q: stage.step_fn(quantized=q) for q in (False, True)}
  evals = {q: stage.eval_fn(quantized=q) for q in (False, True)}

  state = fit(
    stage.state,
    lambda step: steps[step >= quantize_from],
    jnp.asarray(train),
    config,
    work / "target",
    evaluate=lambda state, step: float(evals[step > quantize_from](state, held_out)),
    description="target",
  )
  path = work / TARGET_FILE
  save_target(
    path,
    model,
    target_to_state_dict(stage.target(state)),
    expert_format="int4",
    dtype="bfloat16",
    tokenizer_json=tokenizer.read_text() if tokenizer else None,
  )
  return path


def write_samples(experiment: Experiment, corpus: Path, work: Path) -> Path:
  """Lets the trained target continue corpus prompts: `work/samples.npy`, u16."""
  config = experiment.generate
  if config is None:
    raise ConfigError("the configuration has no 'generate' stage")
  _check_length("generate", config.sequence_length, experiment.model)
  target = _load_target(work)
  tokens = _tokens(corpus, "train", target.config)
  rng = np.random.default_rng(config.seed)
  starts = _prompt_starts(tokens, experiment.model.bos_token_id, rng, config.sequences)
  prompts = tokens[starts[:, None] + np.arange(config.prompt_length)]
  batches = generate(
    target,
    prompts,
    config.sequence_length,
    temperatures=config.temperatures,
    batch_size=config.batch_size,
    seed=config.seed,
  )
  path = work / SAMPLES_FILE
  np.save(path, np.concatenate(list(batches)))
  return path


def train_drafter(experiment: Experiment, work: Path) -> Path:
  """Trains the drafter on the samples and writes `work/drafter.kdtr`."""
  config = _stage(experiment.drafter_train, "drafter_train")
  if experiment.drafter is None or experiment.generate is None:
    raise ConfigError("the configuration has no 'drafter' or no 'generate' stage")
  target = _load_target(work)
  stage = DrafterStage(
    experiment.drafter,
    target,
    experiment.generate.prompt_length,
    config,
    make_optimizer(config),
  )
  samples = _samples(work)
  batch = min(config.batch_size, HELD_OUT_SEQUENCES)
  used = HELD_OUT_SEQUENCES // batch * batch
  held_out = samples[:used].reshape(-1, batch, samples.shape[1])
  step, evaluate = stage.step_fn(), stage.eval_fn()
  held_out_data = (stage.target_state, jnp.asarray(held_out))

  def held_out_loss(state, step_number: int) -> float:
    metrics = jax.device_get(evaluate(state, held_out_data))
    print(
      f"drafter step {step_number}: "
      + ", ".join(f"{k} {float(v):.3f}" for k, v in sorted(metrics.items()))
    )
    return float(metrics["loss"])

  state = fit(
    stage.state,
    lambda _: step,
    (stage.target_state, jnp.asarray(samples[HELD_OUT_SEQUENCES:])),
    config,
    work / "drafter",
    evaluate=held_out_loss,
    description="drafter",
  )
  drafter: DFlash = stage.drafter(state)
  path = work / DRAFTER_FILE
  save_drafter(
    path,
    dataclasses.replace(drafter.config, target_fingerprint=target.fingerprint),
    drafter.to_state_dict(),
    dtype="bfloat16",
  )
  return path


def _load_target(work: Path) -> Target:
  path = work / TARGET_FILE
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: run --stage=target first")
  dtype = "float32" if compute_dtype() == "float32" else "bfloat16"
  return load_target(path, dtype, "dequantized")


def _stage(config: TrainConfig | None, name: str) -> TrainConfig:
  if config is None:
    raise ConfigError(f"the configuration has no {name!r} stage")
  return config


def _check_length(stage: str, length: int, model: ModelConfig) -> None:
  if length > model.max_position_embeddings:
    raise ConfigError(
      f"{stage}.sequence_length = {length} exceeds the model's "
      f"max_position_embeddings = {model.max_position_embeddings}"
    )


def _samples(work: Path) -> np.ndarray:
  path = work / SAMPLES_FILE
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: run --stage=samples first")
  samples = np.load(path)
  if len(samples) <= HELD_OUT_SEQUENCES:
    raise ValueError(
      f"{path} holds {len(samples)} sequences; {HELD_OUT_SEQUENCES} are held out, so "
      "more are needed"
    )
  return samples


def _tokens(corpus: Path, split: str, model: ModelConfig) -> np.ndarray:
  for name in (f"{split}.u16", f"{split}.u16.xz"):
    if (corpus / name).exists():
      tokens = load_tokens(corpus / name)
      if tokens.max(initial=0) >= model.vocab_size:
        raise ValueError(
          f"{corpus / name} holds token {tokens.max()}; the model's vocab_size is "
          f"{model.vocab_size}"
        )
      return tokens
  raise FileNotFoundError(
    f"{corpus} holds no {split}.u16 or {split}.u16.xz: run --stage=corpus first"
  )


def _windows(tokens: np.ndarray, config: TrainConfig, most: int = 16) -> jax.Array:
  """Held-out windows i32 [K, B, T + 1] that do not overlap, K <= `most`."""
  size = config.sequence_length + 1
  count = min(len(tokens) // size // config.batch_size, most)
  if count == 0:
    raise ValueError(
      f"held-out text of {len(tokens)} tokens is shorter than one batch of "
      f"{config.batch_size} x {size}"
    )
  used = tokens[: count * config.batch_size * size].astype(np.int32)
  return jnp.asarray(used.reshape(count, config.batch_size, size))


def _prompt_starts(
  tokens: np.ndarray, bos: int | None, rng: np.random.Generator, count: int
) -> np.ndarray:
  """Half of the prompts start at a document's first token, half anywhere."""
  last = len(tokens) - 2048
  if last < 1:
    raise ValueError(f"training text of {len(tokens)} tokens is too short for prompts")
  anywhere = rng.integers(0, last, count)
  if bos is None:
    return anywhere
  starts = np.flatnonzero(tokens[:last] == bos)
  if starts.size:
    anywhere[::2] = rng.choice(starts, anywhere[::2].size)
  return anywhere
