from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kdtree_jax.training import loop
from kdtree_jax.training.loop import NonFiniteError, fit
from kdtree_jax.training.optimizer import apply_gradients, init_state, make_optimizer
from tests.training.tiny import TRAIN, corpus, fresh, target_stage, target_step

OPTIMIZER = optax.adam(0.1)
CONFIG = dataclasses.replace(TRAIN, steps=6, warmup_steps=0, log_every=1, eval_every=3)


def new_state():
  """A state of four numbers that the loss pulls towards 1."""
  params = {"w": jnp.zeros(4)}
  return init_state(params, {"seen": jnp.zeros(())}, OPTIMIZER)


@jax.jit
def toy_step(state, data):
  """The loss is scaled by data[step], which may not be finite."""

  def loss_of(params):
    return jnp.sum((params["w"] - 1) ** 2) * data[state.step]

  loss, gradients = jax.value_and_grad(loss_of)(state.params)
  extra = {"seen": state.extra["seen"] + 1}
  state, metrics = apply_gradients(state, OPTIMIZER, loss, gradients, extra)
  return state, {"loss": loss, **metrics}


def toy_fit(folder, data, step_at=lambda step: toy_step, **changes):
  config = dataclasses.replace(CONFIG, steps=len(data), **changes)
  return fit(new_state(), step_at, jnp.asarray(data, jnp.float32), config, folder)


def lines(folder) -> list[dict]:
  return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def losses(folder) -> dict[int, float]:
  return {r["step"]: r["loss"] for r in lines(folder) if "loss" in r}


class Killed(Exception):
  pass


def killed_at(step: int, step_fn):
  def step_at(index: int):
    if index == step:
      raise Killed
    return step_fn

  return step_at


def test_a_killed_run_resumes_to_the_bit(tmp_path):
  """Six steps of a real target, and the same run killed in its fifth."""
  stage, step = target_stage(), target_step()
  data = jnp.asarray(corpus())
  config = dataclasses.replace(CONFIG, checkpoint_every=3)
  arguments = (data, config)
  whole = fit(fresh(stage.state), lambda _: step, *arguments, tmp_path / "whole")
  broken = tmp_path / "broken"
  with pytest.raises(Killed):
    fit(fresh(stage.state), killed_at(4, step), *arguments, broken)
  assert list(losses(broken)) == [1, 2, 3, 4]
  ran = []
  resumed = fit(
    # Other values: all of the state must come from the checkpoint.
    jax.tree.map(jnp.ones_like, stage.state),
    lambda index: ran.append(index) or step,
    *arguments,
    broken,
  )
  assert ran == [3, 4, 5]
  assert losses(broken) == losses(tmp_path / "whole")
  assert list(losses(broken)) == [1, 2, 3, 4, 5, 6]
  for got, want in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(got, want)
  # The losses are not all alike, so that equality says something.
  assert len(set(losses(broken).values())) == 6


@pytest.mark.parametrize("log_every", [1, 50])
def test_metrics_of_a_killed_run_are_neither_lost_nor_doubled(tmp_path, log_every):
  """However often they are written, and whenever the run is killed."""
  data = np.ones(7)
  changes = {"log_every": log_every, "checkpoint_every": 2}
  toy_fit(tmp_path / "whole", data, **changes)
  broken = tmp_path / "broken"
  for step in (1, 5, 6):  # before the first checkpoint, between two, at the end
    with pytest.raises(Killed):
      toy_fit(broken, data, killed_at(step, toy_step), **changes)
  toy_fit(broken, data, **changes)
  assert [r["step"] for r in lines(broken) if "loss" in r] == [1, 2, 3, 4, 5, 6, 7]
  assert losses(broken) == losses(tmp_path / "whole")


def test_a_line_that_was_cut_by_a_kill_is_dropped(tmp_path):
  data = np.ones(5)
  with pytest.raises(Killed):
    toy_fit(tmp_path, data, killed_at(3, toy_step), checkpoint_every=2)
  with (tmp_path / "metrics.jsonl").open("a") as f:
    f.write('{"step": 4, "lo')
  toy_fit(tmp_path, data, checkpoint_every=2)
  assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]


def test_steps_that_are_not_finite_are_skipped_counted_and_reported(tmp_path, capsys):
  data = [np.nan, 1, np.inf, 1, 1, np.nan]
  state = toy_fit(tmp_path, data)
  assert (int(state.step), int(state.skipped)) == (6, 3)
  assert float(state.extra["seen"]) == 3  # what moves by other rules stays, too
  # What is left is a run of three good steps.
  good = toy_fit(tmp_path / "good", [1, 1, 1])
  np.testing.assert_array_equal(state.params["w"], good.params["w"])
  for got, want in zip(
    jax.tree.leaves(state.opt_state), jax.tree.leaves(good.opt_state), strict=True
  ):
    np.testing.assert_array_equal(got, want)
  assert [r["skipped"] for r in lines(tmp_path) if "loss" in r] == [1, 1, 2, 2, 2, 3]
  assert losses(tmp_path)[1] == "nan" and losses(tmp_path)[3] == "inf"
  printed = capsys.readouterr().out
  for step in (1, 3, 6):
    assert f"step {step}: loss or gradient not finite, step skipped" in printed
  assert printed.count("skipped") == 3
  assert (tmp_path / "loss.png").stat().st_size > 0


def test_a_gradient_that_is_not_finite_is_enough():
  """The loss is 0 there, its derivative infinite."""
  optimizer = optax.sgd(0.1)
  state = init_state({"w": jnp.ones(2)}, {}, optimizer)
  gradients = {"w": jnp.array([jnp.inf, 0.0])}
  new, metrics = apply_gradients(state, optimizer, jnp.zeros(()), gradients, {})
  assert int(metrics["skipped"]) == 1 and int(new.step) == 1
  np.testing.assert_array_equal(new.params["w"], [1, 1])


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_that_has_diverged_is_stopped(tmp_path, monkeypatch, log_every):
  monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 3)
  bad = np.nan
  toy_fit(tmp_path / "a", [bad, bad, 1, bad, bad, 1], log_every=log_every)
  with pytest.raises(NonFiniteError, match="3 steps in a row up to step 5"):
    toy_fit(tmp_path / "b", [bad, 1, bad, bad, bad, 1, 1, 1], log_every=log_every)


def test_skipped_steps_in_a_row_are_counted_across_a_resume(tmp_path, monkeypatch):
  monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 2)
  data = [1, np.nan, 1, np.nan, np.nan, 1]
  with pytest.raises(Killed):
    toy_fit(tmp_path, data, killed_at(3, toy_step), checkpoint_every=3)
  with pytest.raises(NonFiniteError, match="up to step 5"):
    toy_fit(tmp_path, data, checkpoint_every=3)


def test_the_held_out_loss_is_written(tmp_path):
  asked = []

  def evaluate(state, step):
    asked.append((step, int(state.step)))
    return float("nan") if step == 3 else 0.5 * step

  config = dataclasses.replace(CONFIG, steps=7)
  fit(new_state(), lambda _: toy_step, jnp.ones(7), config, tmp_path, evaluate=evaluate)
  assert asked == [(3, 3), (6, 6), (7, 7)]  # each third step, and the last
  written = {r["step"]: r["heldout_loss"] for r in lines(tmp_path) if "loss" not in r}
  assert written == {3: "nan", 6: 3.0, 7: 3.5}
  assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_each_step_asks_for_its_own_function(tmp_path):
  asked = []
  toy_fit(tmp_path, np.ones(3), lambda step: asked.append(step) or toy_step)
  assert asked == [0, 1, 2]


def test_the_schedule_warms_up_and_ends_at_zero():
  config = dataclasses.replace(
    TRAIN, steps=10, warmup_steps=4, learning_rate=1.0, weight_decay=0.0
  )
  optimizer = make_optimizer(config)
  params = {"w": jnp.zeros((2, 2))}
  state, sizes = optimizer.init(params), []
  for _ in range(11):
    updates, state = optimizer.update({"w": jnp.ones((2, 2))}, state, params)
    sizes.append(float(-updates["w"][0, 0]))
  # A constant gradient makes Adam's step the learning rate itself.
  half = 0.5 * (1 + np.cos(np.pi * np.arange(7) / 6))
  want = [0, 0.25, 0.5, 0.75, *half]
  np.testing.assert_allclose(sizes, want, atol=1e-4)


def test_only_matrices_decay_and_large_gradients_are_clipped():
  config = dataclasses.replace(
    TRAIN, steps=10, warmup_steps=0, weight_decay=0.5, learning_rate=0.1
  )
  optimizer = make_optimizer(config)
  params = {"matrix": jnp.full((2, 2), 3.0), "vector": jnp.full((2,), 3.0)}
  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zero, optimizer.init(params), params)
  np.testing.assert_allclose(updates["matrix"], -0.1 * 0.5 * 3, rtol=1e-5)
  np.testing.assert_array_equal(updates["vector"], 0)
  huge = jax.tree.map(lambda p: jnp.full_like(p, 1e6), params)
  _, state = optimizer.update(huge, optimizer.init(params), params)
  moments = next(s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s)).mu
  # (1 - b1) * gradient, the gradient scaled to a norm of clip_norm = 1.
  norm = optax.tree.norm(moments)
  assert float(norm) == pytest.approx(0.1, rel=1e-5)


def _is_adam(x) -> bool:
  return isinstance(x, optax.ScaleByAdamState)
