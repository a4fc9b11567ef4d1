"""What does a round cost besides the models? Rounds as they run, and their parts.

The compiled loop is timed as a whole, and each part of a round alone, as a chain of
calls in one program on a round's shapes (see `timing`). What is left of a round
after its parts is the loop's: the host's part in it, and gaps between kernels. It
can be negative, where the loop overlaps or fuses what was timed apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdtree_jax.bench import report as reports
from kdtree_jax.bench.rounds import FORWARD, PARTS, Effort, Rounds, Start
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding.settings import check_implementation
from kdtree_jax.model.target import Target

BAR_US = 150.0  # all that is no forward pass, at budget 64 and Kimi's vocabulary
BAR_VOCAB = 163840


def run(
  target: Target,
  drafter: Any,
  prompt: Sequence[int],
  *,
  budgets: Sequence[int] = (64,),
  rounds: int = 32,
  base: DecodeConfig,
  effort: Effort | None = None,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Times rounds of plain decoding, the chain, and trees; one sequence.

  Args:
    target: the model.
    drafter: its drafter.
    prompt: tokens.
    budgets: of trees. The chain is as long as the drafter proposes.
    rounds: per call of the compiled loop.
    base: temperature, seed and implementation.
    effort: how much to measure.
    log: gets progress.

  Returns:
    The report; `measurements` has one entry per method.

  Raises:
    ValueError: so many rounds may fill more positions than the target has.
    NotImplementedError: an implementation that cannot run here.
  """
  check_implementation(base.implementation)
  effort = effort or Effort()
  ways: list[tuple[str, int | None]] = [("plain", None), ("chain", None)]
  ways += [("ddtree", budget) for budget in sorted(set(budgets))]
  start = Start.create(target, drafter, prompt, rounds, base.implementation)
  log("prompt read")
  measurements, captured = [], True
  for method, budget in ways:
    config = dataclasses.replace(base, method=method, budget=budget, rows=None)
    timed = Rounds(start, config, effort)
    captured &= timed.captured
    measured = timed.loop()
    parts = timed.parts()
    parts["loop"] = measured["round_us"] - sum(parts.values())
    forward = sum(parts[part] for part in FORWARD)
    overhead = measured["round_us"] - forward
    vocab = target.config.vocab_size
    asked = method == "ddtree" and budget == 64 and vocab >= BAR_VOCAB
    measurements.append(
      {
        "name": method,
        "budget": timed.budget,
        "rows": timed.program.rows,
        **measured,
        "forward_us": forward,
        "overhead_us": overhead,
        "bar_us": BAR_US if asked else None,
        "reached": overhead <= BAR_US if asked else None,
        "parts": parts,
      }
    )
    log(f"{method} {timed.budget}: round {measured['round_us']:.0f} us")
  return {
    "suite": "decode",
    "environment": reports.environment(),
    "settings": {
      "V": target.config.vocab_size,
      "layers": target.config.num_hidden_layers,
      "dtype": str(target.dtype),
      "prompt": len(prompt),
      "depth": drafter.max_depth,
      "rounds": rounds,
      "T": base.temperature,
      "ops": base.implementation,
      "captured": captured,
    },
    "measurements": measurements,
  }


def host_transfers(report: dict[str, Any]) -> int:
  """Transfers inside the compiled loops, all methods together."""
  return sum(m["host_transfers"] for m in report["measurements"])


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  parts = [
    reports.heading(report),
    reports.table(COLUMNS, [_row(m) for m in report["measurements"]]),
    "us per round. round: the compiled loop as a whole, median over its calls. The "
    "parts: each alone, as a chain\nin one program. draft, observe, verify are the "
    "models' passes; besides: round less these.\nloop: round less all parts; negative "
    "where the loop overlaps what was timed apart.\nhost: transfers in the text of the "
    "compiled loop; it ran under a guard that refuses transfers between its arguments\n"
    "and the host. (If the loop is not captured, XLA reads its condition each round.)",
    verdict(report),
  ]
  return "\n\n".join(parts)


COLUMNS = (
  "method",
  "budget",
  "rows",
  "round",
  *PARTS,
  "besides",
  "bar",
  "host",
  "tokens/round",
)


def _row(m: dict[str, Any]) -> list[Any]:
  """A measurement in the order of `COLUMNS`."""
  return [
    m["name"],
    m["budget"],
    m["rows"],
    f"{m['round_us']:.1f}",
    *(f"{m['parts'][part]:.1f}" for part in PARTS),
    f"{m['overhead_us']:.1f}",
    None if m["bar_us"] is None else f"{m['bar_us']:g}",
    m["host_transfers"],
    f"{m['tokens_per_round']:.2f}",
  ]


def verdict(report: dict[str, Any]) -> str:
  """One sentence on the bar and the host."""
  sentences = [
    f"{m['name']} at budget {m['budget']}: {m['overhead_us']:.0f} us besides the "
    f"models' passes; the bar of {m['bar_us']:g} us is "
    f"{'reached' if m['reached'] else 'NOT reached'}."
    for m in report["measurements"]
    if m["bar_us"] is not None
  ]
  count = host_transfers(report)
  sentences.append(
    "Nothing goes to the host inside a call."
    if count == 0
    else f"{count} HOST TRANSFERS inside the compiled loops."
  )
  return "\n".join(sentences)


def markdown(report: dict[str, Any]) -> str:
  """The report as a Markdown table, with where it was made."""
  settings = ", ".join(f"{k} {v}" for k, v in report["settings"].items())
  rows = [_row(m) for m in report["measurements"]]
  table = reports.markdown_table(COLUMNS, rows)
  return "\n".join(
    [*reports.markdown_origin(report), f"- settings: {settings}", "", *table]
  )
