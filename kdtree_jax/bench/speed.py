"""Is it faster? Plain decoding at its best against chain and trees, one sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kdtree_jax.bench import metrics
from kdtree_jax.bench import report as reports
from kdtree_jax.bench.stages import STAGES, StageTimer
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import SequenceResult, decode
from kdtree_jax.model.target import Target

BUDGETS = (3, 7, 15, 23, 31)


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to decode, at the width that is best for it.

  Attributes:
    name: "plain", "chain" or "ddtree".
    budget: tree nodes without the root.
  """

  name: str
  budget: int

  @property
  def rows(self) -> int:
    return self.budget + 1

  def config(self, base: DecodeConfig) -> DecodeConfig:
    budget = None if self.name == "plain" else self.budget
    return dataclasses.replace(base, method=self.name, budget=budget, rows=self.rows)


def run(
  target: Target,
  drafter: Any,
  prompts: Sequence[Sequence[int]],
  *,
  budgets: Sequence[int] = BUDGETS,
  temperature: float = 0.0,
  repetitions: int = 3,
  stage_repeats: int = 20,
  base: DecodeConfig,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Times decoding of one sequence at a time, and the stages of a round.

  Every method decodes every prompt in turn, `repetitions` times over, so that a
  slow minute of the machine falls on all of them. Each runs at its own width:
  plain decoding at one row, the others at budget + 1. Compilation, prefill and
  the first token are not counted.

  Args:
    target: the model.
    drafter: its drafter.
    prompts: token lists.
    budgets: of trees. The chain is as long as the drafter proposes.
    temperature: 0 is greedy.
    repetitions: times that each prompt is decoded by each method.
    stage_repeats: calls per measurement of a stage; 0 leaves the stages out.
    base: max_new_tokens, seed and all else.
    log: gets progress.

  Returns:
    The report; `measurements` has one entry per method.

  Raises:
    ValueError: no text is longer than the token that the prefill gives.
  """
  if repetitions < 1 or not prompts:
    raise ValueError("repetitions must be 1 or more, and prompts not empty")
  cache_len = max(map(len, prompts)) + base.max_new_tokens
  base = dataclasses.replace(
    base,
    slots=1,
    temperature=temperature,
    cache_len=cache_len,
    # A whole text per call of the compiled program, for all methods alike.
    chunk_rounds=base.max_new_tokens,
    return_logits=False,
    return_trees=False,
  )
  methods = [Method("plain", 0), Method("chain", drafter.max_depth)]
  methods += [Method("ddtree", b) for b in sorted(set(budgets))]

  def decode_one(method: Method, index: int) -> SequenceResult:
    return decode(
      target,
      None if method.name == "plain" else drafter,
      [prompts[index]],
      method.config(base),
      sequence_ids=[index],
      on_compile=reports.compile_log(log),
    )[0]

  for method in methods:
    decode_one(method, 0)
    log(f"warm: {method.name} {method.budget}")
  results: dict[Method, list[list[SequenceResult]]] = {
    m: [[] for _ in prompts] for m in methods
  }
  for repetition in range(repetitions):
    for index in range(len(prompts)):
      for method in methods:
        results[method][index].append(decode_one(method, index))
    log(f"repetition {repetition + 1} of {repetitions} done")
  timer = None
  if stage_repeats:
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    timer = StageTimer(target, drafter, prompt, base, cache_len, stage_repeats)
  timed = _timed(results.values())
  texts = {m: [results[m][i] for i in timed] for m in methods}
  plain = _speeds(texts[methods[0]])
  measurements = []
  for method in methods:
    measured = _measure(texts[method], plain)
    stages = None
    if timer is not None:
      stages = timer.measure(method.name, method.budget, method.rows)
      log(f"stages of {method.name} {method.budget} done")
    measurements.append(
      dataclasses.asdict(method) | {"rows": method.rows} | measured | {"stages": stages}
    )
  return {
    "suite": "speed",
    "environment": reports.environment(),
    "settings": {
      "prompts": len(timed),
      "max_new": base.max_new_tokens,
      "repeats": repetitions,
      "T": temperature,
      "dtype": str(target.dtype),
      "depth": drafter.max_depth,
      "seed": base.seed,
    },
    "measurements": measurements,
  }


def _timed(results: Iterable[Sequence[Sequence[SequenceResult]]]) -> list[int]:
  """The prompts for which every method had rounds to time."""
  rounds = [[text[0].stats.rounds for text in texts] for texts in results]
  kept = [i for i, counts in enumerate(zip(*rounds, strict=True)) if min(counts)]
  if not kept:
    raise ValueError("every text ended with its first token: nothing can be timed")
  return kept


def _speeds(texts: Sequence[Sequence[SequenceResult]]) -> np.ndarray:
  """[prompts, repetitions] decode-only tokens per second."""
  return np.array(
    [[(len(s.tokens) - 1) / s.stats.decode_seconds for s in text] for text in texts]
  )


def _measure(
  texts: Sequence[Sequence[SequenceResult]], plain: np.ndarray
) -> dict[str, Any]:
  speeds = _speeds(texts)
  firsts = [text[0] for text in texts]
  committed = sum(sum(s.stats.accepted_lengths) for s in firsts)
  rounds = sum(s.stats.rounds for s in firsts)
  round_ms = [
    1e3 * s.stats.decode_seconds / s.stats.rounds for text in texts for s in text
  ]
  return {
    "tokens_per_second": float(np.median(speeds)),
    "quartiles": np.percentile(speeds, [25, 75]).tolist(),
    "ratio_to_plain": float(np.median(speeds) / np.median(plain)),
    "ratio_interval_95": metrics.median_ratio_interval(speeds, plain),
    "tokens_per_round_micro": committed / rounds,
    "repeated_8gram_share": metrics.repeated_ngram_share([s.tokens for s in firsts]),
    "round_ms": float(np.median(round_ms)),
    "tokens": sum(len(s.tokens) for s in firsts),
  }


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  measured = report["measurements"]
  columns = (
    "method",
    "budget",
    "rows",
    "tokens/s",
    "x plain",
    "95 %",
    "tokens/round",
    "round ms",
    "rep. 8-grams",
  )
  rows = []
  for m in measured:
    low, high = m["ratio_interval_95"]
    rows.append(
      [
        m["name"],
        m["budget"],
        m["rows"],
        f"{m['tokens_per_second']:.1f}",
        f"{m['ratio_to_plain']:.2f}",
        f"{low:.2f}-{high:.2f}",
        m["tokens_per_round_micro"],
        m["round_ms"],
        m["repeated_8gram_share"],
      ]
    )
  parts = [
    reports.heading(report),
    reports.table(columns, rows),
    "tokens/s: decode only (compilation, prefill and first token not counted), median "
    "over prompts\nand repetitions. x plain: ratio of these medians, with a paired "
    "bootstrap over prompts.\ntokens/round: micro (pooled over rounds). round ms: "
    "median over decodes of time per round.",
    verdict(report),
  ]
  if measured[0]["stages"] is not None:
    parts.append(
      "One round in ms, each stage compiled and timed alone on the same shapes; 'rest' "
      "is\nthe measured round less their sum (what fuses or overlaps in the loop makes "
      "it smaller):\n"
      + reports.table(
        ("method", "budget", *STAGES, "rest", "round"),
        [
          [
            m["name"],
            m["budget"],
            *(m["stages"][s] for s in STAGES),
            m["round_ms"] - sum(m["stages"].values()),
            m["round_ms"],
          ]
          for m in measured
        ],
      )
    )
  return "\n\n".join(parts)


def verdict(report: dict[str, Any]) -> str:
  """One sentence: does speculation pay here?"""
  best = max(report["measurements"][1:], key=lambda m: m["ratio_to_plain"])
  name = f"{best['name']} at budget {best['budget']}"
  if best["ratio_to_plain"] > 1:
    return f"The best here is {name}: {best['ratio_to_plain']:.2f} x plain decoding."
  return (
    f"Nothing is faster than plain decoding here; the best is {name} at "
    f"{best['ratio_to_plain']:.2f} x."
  )
