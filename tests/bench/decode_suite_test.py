"""The decode suite: parts of a round that are those of decoding, and their report."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.bench import decode as suite
from kdtree_jax.bench import kimi_like, markdown, plots, report
from kdtree_jax.bench.rounds import (
  FORWARD,
  HOST,
  OVERHEAD,
  PARTS,
  Effort,
  Rounds,
  Start,
)
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.rounds import one_round
from kdtree_jax.environment import DECODE_LOOP_OPTIONS
from kdtree_jax.ops import _implementation
from tests.decoding import models

EFFORT = Effort(calls=2, repeats=2, runs=2, seconds=1e-4, warmups=1)
PROMPT = models.PROMPTS[1]


@pytest.fixture(scope="module")
def measured():
  return suite.run(
    models.target(),
    models.dflash(),
    PROMPT,
    budgets=(7,),
    rounds=3,
    base=DecodeConfig(),
    effort=EFFORT,
  )


def test_every_method_and_part_is_measured(measured):
  names = [(m["name"], m["budget"], m["rows"]) for m in measured["measurements"]]
  depth = models.DEPTH
  assert names == [("plain", 0, 1), ("chain", depth, depth + 1), ("ddtree", 7, 8)]
  for m in measured["measurements"]:
    assert tuple(m["parts"]) != () and set(m["parts"]) == set(PARTS)
    unused = {"draft", "observe", "build"} if m["name"] == "plain" else set()
    for part in set(PARTS) - {"loop"}:
      assert (m["parts"][part] > 0) == (part not in unused), part


def test_a_round_is_the_sum_of_its_parts(measured):
  for m in measured["measurements"]:
    parts = m["parts"]
    assert sum(parts.values()) == pytest.approx(m["round_us"])
    assert sum(parts[p] for p in FORWARD) == pytest.approx(m["forward_us"])
    assert sum(parts[p] for p in OVERHEAD) == pytest.approx(m["overhead_us"])
    assert m["round_us_low"] <= m["round_us"] <= m["round_us_high"]


def test_captured_is_what_was_done(measured):
  on_gpu = jax.default_backend() == "gpu"
  assert measured["settings"]["captured"] == on_gpu
  start = Start.create(models.target(), models.dflash(), PROMPT, 2, "auto")
  for asked in (True, False):
    timed = Rounds(start, DecodeConfig(capture_loop=asked), EFFORT)
    assert timed.captured == (asked and on_gpu)
    assert (timed._options.items() >= DECODE_LOOP_OPTIONS.items()) == timed.captured
    assert (timed._options.items() >= modules.SAME_SUMS_OPTIONS.items()) == on_gpu


def test_cuda_that_cannot_run_is_refused_before_anything_runs(monkeypatch):
  monkeypatch.setattr(Start, "create", None)

  def check_runs(op, implementation):
    raise NotImplementedError(f"{implementation} of {op} cannot run")

  monkeypatch.setattr(_implementation, "check_runs", check_runs)
  with pytest.raises(NotImplementedError, match="cuda of .* cannot run"):
    suite.run(None, None, PROMPT, base=DecodeConfig(implementation="cuda"))


def test_nothing_goes_to_the_host(measured):
  assert suite.host_transfers(measured) == 0
  assert "Nothing goes to the host" in suite.verdict(measured)
  called_back = jax.jit(
    lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), "float32"), x)
  )
  assert HOST.search(called_back.lower(jnp.float32(1)).compile().as_text())


def test_the_bar_is_for_a_large_vocabulary_and_a_tree_of_64(measured):
  assert all(m["bar_us"] is None for m in measured["measurements"])
  judged = measured["measurements"][2] | {"bar_us": 150.0, "overhead_us": 151.0}
  for reached, words in ((False, "is NOT reached"), (True, "is reached")):
    one = measured | {"measurements": [judged | {"reached": reached}]}
    assert f"the bar of 150 us {words}" in suite.verdict(one)
  one = {"measurements": [judged | {"host_transfers": 2, "reached": True}]}
  assert "2 HOST TRANSFERS" in suite.verdict(one)


def test_report_is_text_json_markdown_and_picture(measured, tmp_path):
  text = suite.render(measured)
  assert all(part in text for part in PARTS)
  path = tmp_path / "d.json"
  report.write_json(path, measured)
  again = json.loads(path.read_text())
  for key in ("device", "versions", "date", "command"):
    assert again["environment"][key]
  assert markdown.table(again) == markdown.table(measured)
  plots.decode(again, tmp_path / "d.png")
  assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_each_call_of_the_loop_begins_anew():
  """A drafter that is always right: each round of each call commits a whole block."""
  drafter = models.scripted(models.true_script())
  start = Start.create(models.target(), drafter, models.PROMPTS[0], 2, "auto")
  timed = Rounds(start, DecodeConfig(method="chain"), EFFORT)
  assert timed.loop()["tokens_per_round"] == models.DEPTH + 1


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_the_parts_make_the_round_that_decoding_makes(method):
  start = Start.create(models.target(), models.dflash(), PROMPT, 2, "auto")
  budget = {"ddtree": 7}.get(method)
  timed = Rounds(start, DecodeConfig(method=method, budget=budget), EFFORT)
  state, arrays = timed._state, timed._arrays
  target, drafter = timed._models(arrays)
  wanted, _ = jax.jit(
    lambda state: one_round(
      target, drafter, state, timed._sampler, timed._limits, timed.program
    )
  )(state)

  tree = suite_tree(timed, state)
  logits, features, keys = jax.jit(timed._verify)(arrays, state.cache, tree)
  accepted = jax.jit(timed._accept)(
    arrays, tree, state, timed._sampler, (logits, tree.size)
  )
  path, length = accepted.path, accepted.length
  lengths = state.cache.lengths
  data = jax.jit(timed._compact)(
    arrays, state.cache.data, (keys, path, length, lengths)
  )
  emitted = jax.jit(timed._emit)(arrays, timed._limits, state, accepted)
  # Programs of other extent fuse otherwise: fp32 sums of up to 64 products.
  np.testing.assert_allclose(data, wanted.cache.data, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(lengths + length, wanted.cache.lengths)
  new = slice(1, 1 + int(length[0]))
  np.testing.assert_array_equal(emitted.tokens[0, new], wanted.tokens[0, new])
  np.testing.assert_allclose(
    emitted.logprobs[0, new], wanted.logprobs[0, new], rtol=1e-4, atol=1e-5
  )
  if method != "plain":
    inputs = (features, path, length, lengths)
    seen = jax.jit(timed._observe)(arrays, tree, state.drafter, inputs)
    np.testing.assert_allclose(seen.keys, wanted.drafter.keys, rtol=1e-4, atol=1e-5)


def suite_tree(timed, state):
  """The tree of the first round."""
  from kdtree_jax.tree import Tree

  if timed.program.method == "plain":
    return Tree.root_only(state.root, timed.program.rows)
  logits = jax.jit(timed._draft)(timed._arrays, state, state.root)
  return jax.jit(timed._build)(timed._arrays, (logits, state.root))


def test_too_many_rounds_for_the_target():
  with pytest.raises(ValueError, match="rounds = 100 may need 80. positions"):
    Start.create(models.target(), models.dflash(), PROMPT, 100, "auto")


def test_the_random_pair_has_kimis_sizes_per_token():
  target, drafter, prompt = kimi_like.kimi_like("float32", 256, 5)
  assert target.config.cache_width == 576 and target.config.num_attention_heads == 64
  assert drafter.max_depth == 15 and max(drafter.feature_layers) < 2
  assert len(prompt) == 5 and max(prompt) < 256
