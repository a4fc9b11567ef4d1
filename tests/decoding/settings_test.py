"""What `decode` refuses, and what it fills in."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.config import ConfigError, DecodeConfig
from kdtree_jax.decoding.rounds import OPS
from kdtree_jax.decoding.settings import check_prompts, complete
from kdtree_jax.drafter import DFlash, NGram, Scripted
from kdtree_jax.model.state_dict import target_from_state_dict
from kdtree_jax.ops import _implementation
from tests.decoding.models import CONFIG, DEPTH, VOCAB, WEIGHTS, drafter_config, target

DRAFTER = NGram(VOCAB, depth=DEPTH)
SHORT = [[1, 2, 3]]


def refused(prompts=None, drafter=DRAFTER, sequence_ids=None, **fields):
  """The error that decoding raises, before anything is run."""
  prompts = SHORT if prompts is None else prompts
  with pytest.raises(ValueError) as caught:
    # A stream that nobody reads decodes nothing.
    kd.stream(
      target(), drafter, prompts, DecodeConfig(**fields), sequence_ids=sequence_ids
    )
  return str(caught.value)


@pytest.mark.parametrize(
  ("prompts", "message"),
  [
    ([], "prompts is empty"),
    ([[1], []], r"prompts[1] is empty"),
    (np.zeros((0, 4), np.int32), "prompts is empty"),
    ([[1, 97]], "prompts[0] holds token id 97, out of range"),
    ([[1], [5, -1]], "prompts[1] holds token id -1, out of range"),
    ([[2**40]], f"prompts[0] holds token id {2**40}, out of range"),
    ([[1.0, 2.0]], "prompts[0] must be a flat list of integer token ids"),
    ([[True]], "prompts[0] must be a flat list of integer token ids"),
    ([[[1, 2]]], "prompts[0] must be a flat list of integer token ids"),
    ([[[1], [2, 3]]], "prompts[0] must be a flat list of integer token ids"),
    ([[1, None]], "prompts[0] must be a flat list of integer token ids"),
    (["text"], "prompts[0] must be a flat list of integer token ids"),
    ([1, 2, 3], "prompts[0] must be a flat list of integer token ids"),
    ("text", "prompts must be a list of token lists"),
    (None.__class__, "prompts must be a list of token lists"),
  ],
)
def test_prompts(prompts, message):
  assert message in refused(prompts)


@pytest.mark.parametrize(
  ("fields", "messages"),
  [
    ({"method": "tree"}, ("method = 'tree'", "'plain', 'chain', 'ddtree'")),
    ({"implementation": "fast"}, ("implementation = 'fast'",)),
    ({"budget": -1}, ("budget = -1", "0 .. 46335")),
    ({"budget": 8, "rows": 8}, ("budget = 8", "needs 9 rows", "rows = 8")),
    ({"budget": DEPTH + 1, "method": "chain"}, ("budget = 8", "at most 7 drafts")),
    ({"rows": 0}, ("rows = 0",)),
    ({"slots": 0}, ("slots = 0",)),
    ({"slots": -3}, ("slots = -3",)),
    ({"max_new_tokens": 0}, ("max_new_tokens = 0",)),
    ({"chunk_rounds": 0}, ("chunk_rounds = 0",)),
    ({"prefill_chunk": 0}, ("prefill_chunk = 0",)),
    ({"temperature": -0.1}, ("temperature = -0.1",)),
    ({"temperature": math.nan}, ("temperature = nan",)),
    ({"temperature": math.inf}, ("temperature = inf",)),
    ({"temperature": 1e-40}, ("temperature = 1e-40", "too small")),
    ({"top_p": 0.0}, ("top_p = 0.0",)),
    ({"top_p": 1.1}, ("top_p = 1.1",)),
    ({"top_p": math.nan}, ("top_p = nan",)),
    ({"seed": -1}, ("seed = -1",)),
    ({"seed": 2**32}, ("seed = 4294967296",)),
    ({"stop_token_ids": (3, VOCAB)}, ("stop_token_ids holds 97", "from 0 to 96")),
    ({"stop_token_ids": (-1,)}, ("stop_token_ids holds -1",)),
    ({"stop_token_ids": (2.5,)}, ("stop_token_ids holds 2.5",)),
    ({"cache_len": 513}, ("cache_len = 513", "max_position_embeddings = 512")),
    ({"cache_len": 2}, ("prompts[0] has 3 tokens", "cache_len = 2")),
    ({"cache_len": 0}, ("cache_len = 0",)),
  ],
)
def test_fields(fields, messages):
  error = refused(**fields)
  for message in messages:
    assert message in error


def test_prompt_longer_than_the_model_allows():
  error = refused([[1], [0] * 513])
  assert "prompts[1] has 513 tokens" in error
  assert "max_position_embeddings = 512" in error


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    ([0, 1], "sequence_ids has 2 entries for 1 prompts"),
    ([], "sequence_ids has 0 entries for 1 prompts"),
    ([-1], "sequence_ids holds -1"),
    ([2**31], "sequence_ids holds 2147483648"),
    ([0.5], "sequence_ids holds 0.5"),
  ],
)
def test_sequence_ids(ids, message):
  assert message in refused(sequence_ids=ids)


def test_drafter_and_method():
  assert "drafter must be None" in refused(method="plain")
  for method in ("chain", "ddtree"):
    assert "needs a drafter" in refused(drafter=None, method=method)
  assert "has no method init_state" in refused(drafter=object())


def test_drafters_of_another_target():
  model = target_from_state_dict(CONFIG, WEIGHTS, fingerprint="this one")
  for bond, fits in (("another", False), ("this one", True), (None, True)):
    drafter = DFlash(drafter_config(target_fingerprint=bond))
    if fits:
      complete(model, drafter, SHORT, DecodeConfig())
    else:
      with pytest.raises(ConfigError, match="target_fingerprint = 'another'"):
        kd.decode(model, drafter, SHORT, DecodeConfig())
  other = DFlash(drafter_config(num_target_layers=3))
  assert "num_target_layers = 3" in refused(drafter=other)
  assert "vocab_size = 50" in refused(drafter=NGram(50))
  small = Scripted(jnp.zeros((1, 4), jnp.int32), 1.0, 96)
  assert "vocab_size = 96" in refused(drafter=small)


def settings(prompts=((1, 2, 3),), drafter=DRAFTER, **fields):
  config = DecodeConfig(**fields)
  if config.method == "plain":
    drafter = None
  return complete(target(), drafter, [np.array(p) for p in prompts], config)


def test_defaults_of_the_width():
  assert (settings(method="plain").rows, settings(method="plain").depth) == (1, 0)
  tree = settings()
  assert (tree.budget, tree.rows, tree.depth) == (16, 24, DEPTH)
  assert settings(budget=7).rows == 8 and settings(budget=8).rows == 16
  assert settings(budget=0).rows == 8
  chain = settings(method="chain")
  assert (chain.budget, chain.rows, chain.depth) == (DEPTH, 8, DEPTH)
  narrow = settings(budget=2, rows=3)
  assert (narrow.rows, narrow.depth) == (3, 2)


def test_defaults_of_slots_and_capacity():
  assert settings([(1,)] * 5).slots == 5
  assert settings([(1,)] * 50).slots == 8
  assert settings([(1,)] * 5, slots=2).slots == 2
  assert settings([(1,) * 9, (1,) * 30], max_new_tokens=10).capacity == 40
  assert settings([(1,) * 500], max_new_tokens=100).capacity == 512
  assert settings([(1,) * 9], cache_len=77).capacity == 77
  assert settings([(1,) * 512], cache_len=512).capacity == 512


def test_stop_tokens_come_from_the_target():
  config = dataclasses.replace(CONFIG, eos_token_id=(5, 9))
  model = target_from_state_dict(config, WEIGHTS)
  prompts = [np.array([1])]
  plain = DecodeConfig(method="plain")
  assert complete(model, None, prompts, plain).stop_tokens == (5, 9)
  for given in ((), (1, 2, 3)):
    chosen = dataclasses.replace(plain, stop_token_ids=given)
    assert complete(model, None, prompts, chosen).stop_tokens == given


def test_prompts_may_be_arrays_and_tuples():
  for prompts in (((0, 96),), [np.array([0, 96], np.uint8)], np.array([[0, 96]])):
    (checked,) = check_prompts(prompts, VOCAB)
    assert checked.dtype == np.int32 and checked.tolist() == [0, 96]


@pytest.fixture
def checked(monkeypatch):
  """(op, implementation) that were found to run here, as all do."""
  calls = []
  monkeypatch.setattr(_implementation, "check_runs", lambda *call: calls.append(call))
  return calls


@pytest.mark.parametrize(
  ("fields", "name"),
  [
    ({"rows": 129}, "rows = 129 "),
    ({"budget": 128}, "rows = 136 "),
    ({"prefill_chunk": 129}, "prefill_chunk = 129 "),
  ],
)
def test_what_attention_on_cuda_cannot_take_is_named(checked, fields, name):
  with pytest.raises(ConfigError, match=f"^{name}.*at most 128 rows") as error:
    settings(implementation="cuda", **fields)
  assert "'auto' or 'xla'" in str(error.value)
  for implementation in ("auto", "xla"):
    settings(implementation=implementation, **fields)
  settings(implementation="cuda", rows=128, prefill_chunk=128)


def test_every_op_of_a_round_is_asked_whether_it_runs(checked):
  settings(implementation="cuda")
  assert checked == [(op, "cuda") for op in OPS]
