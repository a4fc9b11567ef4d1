"""Speculation gives the bits of plain decoding on a GPU, with the custom calls.

Few programs, since each takes seconds to compile: what can be a run-time value is
one (drafter, budget, prompts). `kdtree-bench --suite=exactness` runs the product.
"""

from __future__ import annotations

import functools

import pytest

import kdtree_jax as kd
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import DecodeResult
from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.decoding.rounds import OPS
from kdtree_jax.demo import load_demo, load_prompts
from kdtree_jax.ops import _implementation
from tests.decoding.models import (
  NEW,
  PROMPTS,
  ROWS,
  VOCAB,
  Mixed,
  decode,
  plain,
  script,
  target,
  true_script,
  watch_calls,
)
from tests.ops.custom_calls import need_library

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0.0}
COOL = {"temperature": 0.7, "seed": 3}
DTYPES = ("float32", "bfloat16")
# A part of the product, each value once.
CROSSED = [("float32", COOL), ("bfloat16", GREEDY)]

# Ops of a sampled round of tree decoding.
ROUND_OPS = sorted(set(OPS) - {"best_token", "chain_tree"})


@pytest.fixture(autouse=True)
def _library():
  need_library()


@pytest.fixture
def programs(monkeypatch):
  """Text of every compiled program that a decode runs, by name."""
  texts = {}

  def call(name, run, args, donate):
    del donate
    texts[name] = run.as_text()
    return run(*args)

  watch_calls(monkeypatch, call)
  return texts


@pytest.mark.parametrize("implementation", ["auto", "cuda"])
def test_the_rounds_run_the_custom_calls(programs, implementation):
  assert _implementation.CUDA_OPS.issuperset(ROUND_OPS)
  drafter = Mixed.create("dflash")
  decode(drafter, max_new_tokens=2, implementation=implementation, **COOL)
  for op in sorted(set(ROUND_OPS) - {"gated_matmul"}):  # That is matmul's call.
    assert f"kdtree_jax.{op}" in programs["ddtree rounds"], op
  assert "kdtree_jax.compact" in programs["prefill"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", [GREEDY, COOL], ids=["greedy", "T0.7"])
def test_any_drafter_and_budget_give_the_bits_of_plain_decoding(dtype, sampling):
  expected = plain(dtype, **sampling)
  truth = true_script(dtype, **sampling)
  rounds = {}
  for kind in Mixed.KINDS:  # a perfect one, wrong ones, and one that proposes NaN
    drafter = Mixed.create(kind, dtype, truth)
    for budget in (0, 1, ROWS - 1):
      result = decode(drafter, model=target(dtype), budget=budget, **sampling)
      assert first_difference(expected, result) is None, (kind, budget)
      rounds[kind, budget] = sum(s.rounds for s in result.stats)
  assert rounds["1.0", 0] == len(PROMPTS) * (NEW - 1)
  assert rounds["1.0", ROWS - 1] < rounds["0.5", ROWS - 1] < rounds["0.0", ROWS - 1]


@pytest.mark.parametrize(("dtype", "sampling"), CROSSED)
def test_a_chain_gives_the_bits_of_plain_decoding(dtype, sampling):
  expected = plain(dtype, **sampling)
  truth = true_script(dtype, **sampling)
  for kind in ("1.0", "0.5", "broken"):
    drafter = Mixed.create(kind, dtype, truth)
    for budget in (2, ROWS - 1):
      result = decode(
        drafter, model=target(dtype), method="chain", budget=budget, **sampling
      )
      assert first_difference(expected, result) is None, (kind, budget)


def test_neighbours_and_slots_do_not_matter():
  """More prompts than slots, in another order, under the same sequence ids."""
  order = [2, 0, 1, 2, 0]
  drafter = Mixed.create("0.5", continuations=true_script(**COOL))
  result = decode(drafter, [PROMPTS[i] for i in order], sequence_ids=order, **COOL)
  expected = DecodeResult(tuple(plain(**COOL)[i] for i in order))
  assert first_difference(expected, result) is None


def test_the_way_the_loop_is_started_does_not_matter():
  """Round by round from the host instead of as one graph."""
  by_host = decode(capture_loop=False, **COOL)
  assert first_difference(plain(**COOL), by_host) is None
  assert [s.rounds for s in by_host.stats] == [s.rounds for s in plain(**COOL).stats]


@functools.cache
def demo(dtype: str):
  model, drafter, tokenizer = load_demo(dtype)
  texts = [p["prompt"] for p in load_prompts("humaneval")[:4]]
  bos = [] if model.config.bos_token_id is None else [model.config.bos_token_id]
  return model, drafter, [bos + tokenizer.encode(text).ids for text in texts]


@pytest.mark.parametrize(("dtype", "sampling"), CROSSED)
def test_the_demo_pair(dtype, sampling):
  model, drafter, prompts = demo(dtype)
  common = {"rows": 32, "max_new_tokens": 48, "return_logits": True, **sampling}
  expected = kd.decode(model, None, prompts, DecodeConfig(method="plain", **common))
  config = DecodeConfig(method="ddtree", budget=31, **common)
  result = kd.decode(model, drafter, prompts, config)
  assert first_difference(expected, result) is None
  assert result.tokens_per_round > 2  # it does speculate


def test_scripts_of_another_text_are_only_slow():
  """A script that is right for a while, then wrong: paths of every length."""
  texts = [list(s.tokens) for s in plain(**COOL)]
  for text in texts:
    for t in (2, 3, 6, 11, 18):
      text[t] = (text[t] + 1) % VOCAB
  drafter = Mixed.create("1.0", continuations=script(PROMPTS, texts))
  result = decode(drafter, **COOL)
  assert first_difference(plain(**COOL), result) is None
  assert len({a for s in result.stats for a in s.accepted_lengths}) > 2
