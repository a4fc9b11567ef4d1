"""How many tokens a round commits: chain and tree, over budgets and temperatures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kdtree_jax.bench import metrics
from kdtree_jax.bench import report as reports
from kdtree_jax.config import DecodeConfig, TreeConfig
from kdtree_jax.decoding import DecodeResult, decode
from kdtree_jax.model.cache import round_up
from kdtree_jax.model.target import Target


def run(
  target: Target,
  drafter: Any,
  prompts: Sequence[Sequence[int]],
  *,
  budgets: Sequence[int],
  temperatures: Sequence[float],
  base: DecodeConfig,
  rows: int | None = None,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Decodes the prompts with chains and trees, and counts.

  All budgets share one `rows`, so a budget does not compile a program of its
  own, and all texts of a temperature must be the same to the last token.

  Args:
    target: the model.
    drafter: its drafter, of depth L.
    prompts: token lists.
    budgets: of trees. A chain is measured at each budget below L, and at L.
    temperatures: 0 is greedy.
    base: slots, max_new_tokens, seed and all else.
    rows: of the verify step; None takes the fewest that fit, a multiple of 8.
    log: gets progress.

  Returns:
    The report. `measurements` has one entry per temperature, method and budget:
    the fields of `metrics.Acceptance`, to depth min(budget, L), and those added
    here. `text_difference` is None, or says which text depended on the method.

  Raises:
    ValueError: no budget, no temperature, or one that is not allowed.
  """
  depth = drafter.max_depth
  if not budgets or not temperatures:
    raise ValueError("budgets and temperatures must not be empty")
  for budget in budgets:
    TreeConfig(budget=budget)  # Before rows that nobody gave are refused.
  rows = rows or round_up(max(depth, *budgets) + 1, 8)
  methods = [("chain", b) for b in sorted({min(b, depth) for b in (depth, *budgets)})]
  methods += [("ddtree", b) for b in sorted(set(budgets))]
  measurements, text_difference = [], None
  for temperature in temperatures:
    results: dict[tuple[str, int], DecodeResult] = {}
    for method, budget in methods:
      config = dataclasses.replace(
        base, method=method, budget=budget, rows=rows, temperature=temperature
      )
      start = time.perf_counter()
      result = decode(
        target, drafter, prompts, config, on_compile=reports.compile_log(log)
      )
      seconds = time.perf_counter() - start
      results[method, budget] = result
      log(
        f"T={temperature} {method} {budget}: {result.tokens_per_round:.3f} tokens per "
        f"round (micro), {seconds:.0f} s"
      )
      measurements.append(
        {"temperature": temperature, "method": method, "budget": budget}
        | _measure(
          result,
          results["chain", depth] if method == "ddtree" else None,
          min(budget, depth),
        )
      )
      first = results[methods[0]]
      text_difference = text_difference or _text_difference(
        first, result, f"T={temperature} {method} {budget}"
      )
  return {
    "suite": "acceptance",
    "environment": reports.environment(),
    "settings": {
      "prompts": len(prompts),
      "max_new": base.max_new_tokens,
      "rows": rows,
      "slots": base.slots,
      "depth": depth,
      "dtype": str(target.dtype),
      "top_p": base.top_p,
      "seed": base.seed,
    },
    "measurements": measurements,
    "text_difference": text_difference,
  }


def _measure(
  result: DecodeResult, chain: DecodeResult | None, depth: int
) -> dict[str, Any]:
  lengths = [s.stats.accepted_lengths for s in result]
  counted = dataclasses.asdict(metrics.acceptance(lengths, depth))
  ratio, interval = None, None
  if chain is not None:
    ratio = counted["tokens_per_round_micro"] / chain.tokens_per_round
    interval = metrics.ratio_interval(_sums(result), _sums(chain))
  reasons = [s.finish_reason for s in result]
  return counted | {
    "ratio_to_full_chain_micro": ratio,
    "ratio_interval_95": interval,
    "repeated_8gram_share": metrics.repeated_ngram_share(result.tokens),
    "finish_reasons": {r: reasons.count(r) for r in sorted(set(reasons))},
  }


def _sums(result: DecodeResult) -> tuple[list[int], list[int]]:
  """Committed tokens and rounds of each prompt."""
  stats = result.stats
  return [sum(s.accepted_lengths) for s in stats], [s.rounds for s in stats]


def _text_difference(
  expected: DecodeResult, actual: DecodeResult, name: str
) -> str | None:
  for i, (want, have) in enumerate(zip(expected.tokens, actual.tokens, strict=True)):
    if want.tolist() != have.tolist():
      return f"{name}: the text of prompt {i} is not that of the first method"
  return None


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  parts = [reports.heading(report)]
  columns = (
    "method",
    "budget",
    "micro",
    "macro",
    "x chain",
    "95 %",
    "a = 0",
    "rep. 8-grams",
    "rounds",
    "committed",
  )
  depth = report["settings"]["depth"]
  temperatures = dict.fromkeys(m["temperature"] for m in report["measurements"])
  for temperature in temperatures:
    rows = [m for m in report["measurements"] if m["temperature"] == temperature]
    parts.append(
      f"T = {temperature}: tokens per round (accepted drafts + 1, cut at stop and "
      "limit)\n" + reports.table(columns, [_table_row(m) for m in rows])
    )
    for key, title in (
      ("unconditional", "u_d, unconditional: share of rounds with d or more accepted"),
      ("conditional", "c_d = u_d / u_(d-1), conditional on depth d - 1 accepted"),
    ):
      parts.append(
        f"T = {temperature}: {title}\n"
        + reports.table(
          ["d", *map(str, range(1, depth + 1))],
          [[_name(m), *_padded(map(_share, m[key]), depth)] for m in rows],
        )
      )
    parts.append(
      f"T = {temperature}: rounds by number a of accepted drafts\n"
      + reports.table(
        ["a", *map(str, range(depth + 1))],
        [[_name(m), *_padded(m["histogram"], depth + 1)] for m in rows],
      )
    )
  parts.append(
    "micro: pooled over rounds; macro: mean over prompts of each prompt's mean.\n"
    f"x chain: ratio of micro figures to the chain of {depth}, with a paired bootstrap "
    "over prompts.\na = 0: share of rounds without an accepted draft.\n"
    "rep. 8-grams: share of the 8-grams of the generated texts that occurred before "
    "in the same text, pooled."
  )
  parts.append(
    "The texts of a temperature are the same for all methods and budgets."
    if report["text_difference"] is None
    else f"TEXTS DIFFER: {report['text_difference']}"
  )
  return "\n\n".join(parts)


def _name(m: dict[str, Any]) -> str:
  return f"{m['method']} {m['budget']}"


def _padded(values: Iterable[Any], count: int) -> list[Any]:
  """A budget below L ends a row of the table early."""
  values = list(values)
  return values + ["-"] * (count - len(values))


def _share(value: float | None) -> str:
  """Two digits, without the leading zero where there is one."""
  text = reports.cell(value)
  return text if text == "-" else f"{value:.2f}".removeprefix("0")


def _table_row(m: dict[str, Any]) -> list[Any]:
  interval = m["ratio_interval_95"]
  return [
    m["method"],
    m["budget"],
    m["tokens_per_round_micro"],
    m["tokens_per_round_macro"],
    m["ratio_to_full_chain_micro"],
    "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
    m["zero_share"],
    m["repeated_8gram_share"],
    m["rounds"],
    m["committed"],
  ]
