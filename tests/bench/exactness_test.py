"""The exactness suite on a tiny random model: it passes, it catches, it resumes."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.bench import exactness
from kdtree_jax.bench.exactness import Cell, Product
from kdtree_jax.bench.journal import Journal
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import decode
from kdtree_jax.drafter import Scripted
from tests.decoding import models

PRODUCT = Product(
  dtypes=("float32",),
  temperatures=(0.7,),
  budgets=(0, 7),
  slots=(2,),
  drafters=("dflash", "scripted_0", "scripted_50", "scripted_100"),
  lengths=(126, 20, 118),
  rows=8,
  min_tokens=0,
  base=DecodeConfig(max_new_tokens=20, chunk_rounds=4),
)
# The first prompt ends by a full cache: its room is SHORT_OF less than 20, and the
# last token needs no row.
TOKENS = 20 + 20 + 20 - exactness.SHORT_OF + 1


def load(dtype):
  return models.target(dtype), models.dflash(dtype)


def run(journal=None, product=PRODUCT, **options):
  return exactness.run(
    load, models.PROMPTS, product, journal=journal or Journal(None), **options
  )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """(journal's path, report, log) of one run."""
  path, log = tmp_path_factory.mktemp("exactness") / "e.jsonl", []
  return path, run(Journal(path), log=log.append), log


def test_speculation_is_plain_decoding(finished):
  _, report, _ = finished
  assert report["difference"] is None
  assert report["complete"]
  assert report["finished_cells"] == 8
  assert report["tokens"] == 8 * TOKENS
  assert "identical to plain decoding: " in exactness.render(report)


def test_the_drafters_are_as_good_as_they_say(finished):
  _, report, _ = finished
  rounds = {
    (r["cell"]["drafter"], r["cell"]["budget"]): r["rounds"] for r in report["records"]
  }
  # Without drafts, and with wrong ones only, a round commits one token.
  none_accepted = TOKENS - 3
  assert {rounds[d, 0] for d in PRODUCT.drafters} == {none_accepted}
  assert rounds["scripted_0", 7] == none_accepted
  # Its five best nodes on the true path, the other two beside it (0.7**5 < 0.2), so
  # rounds of 6 for 19, 19 and 16 tokens.
  assert rounds["scripted_100", 7] == 4 + 4 + 3
  assert rounds["scripted_100", 7] < rounds["scripted_50", 7] < none_accepted
  [record] = [
    r
    for r in report["records"]
    if r["cell"]["drafter"] == "scripted_100" and r["cell"]["budget"] == 7
  ]
  assert record["paths_across_chunks"] == 2
  assert record["finish_reasons"] == ["cache", "length", "length"]


def test_budgets_and_accuracies_do_not_compile(finished):
  _, _, log = finished
  programs = [line for line in log if line.startswith("compiled ddtree rounds")]
  # One for DFlash, one for the scripted drafters; fewer if another test made them.
  assert len(programs) <= 2
  assert sum("identical" in line for line in log) == 8


def test_finished_cells_are_not_run_again(finished, monkeypatch):
  path, report, _ = finished

  def never(*args, **kwargs):
    raise AssertionError("decoded again")

  monkeypatch.setattr(exactness, "decode", never)
  again = run(Journal(path))
  assert again["complete"]
  assert again["records"] == report["records"]
  # Other rows are another setup, whose cells are not finished.
  with pytest.raises(AssertionError, match="decoded again"):
    run(Journal(path), dataclasses.replace(PRODUCT, rows=9))


def perturb_logit(sequence):
  """The lowest bit of one logit."""
  logits = sequence.logits.copy()
  logits.view(np.uint32)[5, 3] ^= 1
  return dataclasses.replace(sequence, logits=logits)


def perturb_token(sequence):
  tokens = sequence.tokens.copy()
  tokens[5] = (tokens[5] + 1) % models.VOCAB
  return dataclasses.replace(sequence, tokens=tokens)


def perturb_length(sequence):
  """One token too many would look the same from the other side."""
  return dataclasses.replace(
    sequence, tokens=sequence.tokens[:-1], logits=sequence.logits[:-1]
  )


def perturb_reason(sequence):
  return dataclasses.replace(sequence, finish_reason="stop")


@pytest.mark.parametrize(
  ("perturb", "words"),
  [
    (perturb_logit, "sequence 1, token 5: expected id"),
    (perturb_token, "sequence 1, token 5: expected id"),
    (perturb_length, "sequence 1: expected 20 tokens"),
    (perturb_reason, "expected finish reason 'length', got 'stop'"),
  ],
)
def test_a_perturbation_is_caught(perturb, words, finished, monkeypatch, tmp_path):
  calls = itertools.count()

  def wrong_at_the_end(target, drafter, prompts, config, **options):
    result = decode(target, drafter, prompts, config, **options)
    # Plain decoding comes first, then DFlash at budgets 0 and 7, then scripted_0.
    if next(calls) != 3:
      return result
    first, second, third = result
    return dataclasses.replace(result, sequences=(first, perturb(second), third))

  monkeypatch.setattr(exactness, "decode", wrong_at_the_end)
  path = tmp_path / "e.jsonl"
  report = run(Journal(path))
  assert not report["complete"]
  assert report["finished_cells"] == 2
  assert "drafter='scripted_0', budget=0" in report["difference"]
  assert words in report["difference"]
  # Run again, the programs tell which of the two changed by itself.
  assert "plain decoding gives the same bits" in report["difference"]
  assert "this cell gives OTHER BITS" in report["difference"]
  assert "DIFFERENT from plain decoding" in exactness.render(report)
  # The journal keeps the failure, and does not take it for a finished cell.
  assert [r["difference"] is None for r in Journal(path).records] == [True, True, False]
  monkeypatch.setattr(exactness, "decode", decode)
  report = run(Journal(path))
  assert report["complete"]
  assert report["tokens"] == 8 * TOKENS
  assert len(Journal(path).records) == 3 + 6


def test_time_limit_stops_before_a_cell_and_the_rest_follows(finished, tmp_path):
  path = tmp_path / "e.jsonl"
  report = run(Journal(path), max_seconds=-1)
  assert (report["complete"], report["difference"]) == (False, None)
  assert report["finished_cells"] == 0
  assert "nothing was compared\nNOT COMPLETE" in exactness.render(report)
  assert run(Journal(path))["complete"]


def test_more_tokens_come_from_other_prompts_and_seeds(monkeypatch):
  asked = []

  def note(target, drafter, prompts, config, **options):
    asked.append((tuple(prompts[0]), config.seed))
    return decode(target, drafter, prompts, config, **options)

  monkeypatch.setattr(exactness, "decode", note)
  product = dataclasses.replace(
    PRODUCT,
    drafters=("dflash",),
    budgets=(7,),
    # One prompt each time, which ends by a full cache.
    lengths=(126,),
    min_tokens=2 * 17 + 1,
  )
  report = run(product=product)
  assert report["complete"]
  assert [r["repeat"] for r in report["records"]] == [0, 1, 2]
  assert report["tokens"] == 3 * 17
  # Plain decoding and speculation, of the same prompt each time.
  assert asked[::2] == asked[1::2]
  prompts, seeds = zip(*asked[::2], strict=True)
  pool = models.PROMPTS
  assert prompts == tuple(
    tuple((pool[i] + pool[(i + 1) % 3] + pool[(i + 2) % 3])[:126]) for i in range(3)
  )
  assert seeds == (0, 1, 2)


def test_the_whole_product():
  cells = Product().cells()
  assert len(cells) == len(set(cells)) == 2 * 3 * 6 * 3 * 5
  # 2 dtypes, greedy and sampled, 3 widths of the batch, 3 kinds of drafter.
  assert len({c.program for c in cells}) == 36
  # Plain results are shared by neighbours.
  keys = [(c.dtype, c.slots, c.temperature) for c in cells]
  assert len(list(itertools.groupby(keys))) == 2 * 3 * 3


def test_a_small_sample_touches_every_factor():
  cells = Product(scale=0.1).cells()
  programs = {c.program for c in cells}
  assert len(programs) == 4
  dtypes, slots, sampled, kinds = map(set, zip(*programs, strict=True))
  assert dtypes == set(exactness.DTYPES)
  assert slots == set(exactness.SLOTS)
  assert sampled == {False, True}
  assert kinds == {"dflash", "ngram", "scripted"}
  assert {c.budget for c in cells} == set(exactness.BUDGETS)
  assert set(cells) < set(Product().cells())
  assert Product(scale=1e-9).cells()


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"scale": 0.0}, "scale = 0.0"),
    ({"scale": 1.5}, "scale = 1.5"),
    ({"min_tokens": -1}, "min_tokens = -1"),
    ({"drafters": ("eagle",)}, "drafter 'eagle'"),
    ({"budgets": (64,)}, "budgets hold 64"),
  ],
)
def test_bad_products_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    Product(**changes)


def test_crossings_of_a_chunk_end():
  # Roots at 126, 127 and 130. From 126 a tree of depth 2 reaches 128; the path that
  # accepts two drafts after 127 lies across; at 130 nothing ends.
  assert exactness.crossings(126, (1, 3, 1), 2) == (2, 1)
  assert exactness.crossings(126, (1, 3, 1), 0) == (0, 1)
  # A path that ends at 127 does not cross.
  assert exactness.crossings(126, (2,), 1) == (0, 0)


def test_runtime_accuracy_is_the_scripted_drafter():
  script = jax.random.randint(jax.random.key(0), (2, 40), 0, models.VOCAB)
  ids, lengths = jnp.arange(2), jnp.array([3, 20])
  for accuracy in (0.0, 0.5, 1.0):
    fixed = Scripted(script, accuracy, models.VOCAB)
    free = exactness._AnyAccuracy(script, jnp.float32(accuracy), models.VOCAB)
    want, have = (
      jax.jit(lambda d: d.draft(None, (), ids, lengths, ids))(d) for d in (fixed, free)
    )
    np.testing.assert_array_equal(want, have)
  assert Cell("float32", 1, 0.0, "scripted_50", 7).program[-1] == "scripted"
