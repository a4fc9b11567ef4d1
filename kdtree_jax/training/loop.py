"""The training loop: steps, progress, metrics, checkpoints, exact resume.

A step is a function of the state and the data alone (batches are drawn from the
step number), so a run that was killed and resumed from its last checkpoint
repeats the same losses to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tqdm

from kdtree_jax.training.config import TrainConfig
from kdtree_jax.training.optimizer import TrainState

StepFn = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


class NonFiniteError(RuntimeError):
  """Too many steps in a row had a loss or gradient that was not finite."""


# Skipped steps in a row after which a run has diverged and is stopped.
MAX_SKIPPED_IN_A_ROW = 50


def fit(
  state: TrainState,
  step_at: Callable[[int], StepFn],
  data: Any,
  config: TrainConfig,
  folder: Path,
  *,
  evaluate: Callable[[TrainState, int], float] | None = None,
  description: str = "train",
) -> TrainState:
  """Trains until `config.steps`, resuming from the folder's last checkpoint.

  Writes `metrics.jsonl` (a line per step, and one per evaluation), `loss.png`
  and `checkpoints/` into the folder.

  Args:
    state: the fresh state; replaced by the last checkpoint where one exists.
    step_at: gives the step function for a step number.
    data: passed to every step.
    config: of the stage.
    folder: created if missing.
    evaluate: held-out loss of a state at a step.
    description: label of the progress bar.

  Returns:
    The state after the last step.

  Raises:
    NonFiniteError: `MAX_SKIPPED_IN_A_ROW` steps in a row were skipped.
  """
  folder.mkdir(parents=True, exist_ok=True)
  metrics_path = folder / "metrics.jsonl"
  with ocp.CheckpointManager(
    (folder / "checkpoints").resolve(),
    options=ocp.CheckpointManagerOptions(max_to_keep=2),
  ) as checkpoints:
    first = 0
    if checkpoints.latest_step() is not None:
      first = checkpoints.latest_step()
      state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
    _truncate_metrics(metrics_path, first)
    writer = _MetricsWriter(metrics_path, int(state.skipped))
    bar = tqdm.tqdm(
      total=config.steps, initial=first, desc=description, mininterval=5.0
    )
    for step in range(first, config.steps):
      state, metrics = step_at(step)(state, data)
      writer.add(step, metrics)
      done = step + 1
      if done % config.log_every == 0 or done == config.steps:
        last = writer.flush()
        bar.set_postfix(loss=f"{last['loss']:.3f}", skipped=int(last["skipped"]))
        bar.update(done - bar.n)
      if evaluate and (done % config.eval_every == 0 or done == config.steps):
        held_out = float(evaluate(state, done))
        writer.write({"step": done, "heldout_loss": held_out})
        bar.write(f"{description}: step {done}, held-out loss {held_out:.4f}")
      if done % config.checkpoint_every == 0 and done < config.steps:
        writer.flush()  # A resumed run does not repeat the lines before this point.
        checkpoints.save(done, args=ocp.args.StandardSave(state))
    bar.close()
  plot_losses(metrics_path, folder / "loss.png", description)
  return state


class _MetricsWriter:
  """Keeps metrics on the device until `flush`, so that steps are not waited for."""

  def __init__(self, path: Path, skipped: int):
    self._path = path
    self._pending: list[tuple[int, dict[str, jax.Array]]] = []
    self._start = time.perf_counter()
    self._skipped_in_a_row = 0
    self._last_skipped = skipped

  def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
    self._pending.append((step, metrics))

  def flush(self) -> dict[str, float]:
    """Writes the pending lines; returns the last one."""
    values: dict[str, float] = {}
    for step, metrics in jax.device_get(self._pending):
      values = {k: float(v) for k, v in metrics.items()}
      self._watch(step, int(values["skipped"]))
      self.write({"step": step + 1, **values})
    self._pending.clear()
    return values

  def write(self, record: dict[str, float]) -> None:
    # JSON has no NaN: a number that is not finite is written as text.
    line: dict[str, object] = {
      k: v if math.isfinite(v) else str(v) for k, v in record.items()
    }
    line["seconds"] = round(time.perf_counter() - self._start, 3)
    with self._path.open("a") as f:
      f.write(json.dumps(line) + "\n")

  def _watch(self, step: int, skipped: int) -> None:
    was_skipped = skipped > self._last_skipped
    self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
    self._last_skipped = skipped
    if was_skipped:
      print(f"step {step + 1}: loss or gradient not finite, step skipped")
    if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
      raise NonFiniteError(
        f"{MAX_SKIPPED_IN_A_ROW} steps in a row up to step {step + 1} had a loss or "
        "gradient that was not finite; lower learning_rate"
      )


def _truncate_metrics(path: Path, step: int) -> None:
  """Keeps the lines up to the step that a run starts from, a killed run's included."""
  kept = []
  if path.exists():
    for line in path.read_text().splitlines():
      try:
        record = json.loads(line)
      except ValueError:  # The run was killed while it wrote this line.
        break
      if record["step"] <= step:
        kept.append(line + "\n")
  path.write_text("".join(kept))


def plot_losses(metrics_path: Path, image_path: Path, title: str) -> None:
  """Draws training and held-out loss against steps."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  records = [json.loads(line) for line in metrics_path.read_text().splitlines()]
  train = [(r["step"], float(r["loss"])) for r in records if "loss" in r]
  held = [(r["step"], float(r["heldout_loss"])) for r in records if "heldout_loss" in r]
  figure = Figure(figsize=(6, 3.5), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  if train:
    steps, losses = np.array(train).T
    axes.plot(steps, losses, lw=0.6, label="training")
  if held:
    axes.plot(*np.array(held).T, "o-", ms=3, label="held out")
  axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
  axes.legend()
  figure.savefig(image_path, dpi=120)
