"""Pictures of the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdtree_jax.bench.rounds import OVERHEAD, PARTS
from kdtree_jax.bench.stages import STAGES

# Conditional acceptance is drawn where it is a share of at least so many rounds.
_FEWEST_ROUNDS = 20
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
_PALETTE = (*_COLORS, "tab:brown", "tab:pink", "tab:gray")


def acceptance(report: dict[str, Any], path: Path) -> None:
  """Tokens per round against budget, and acceptance by position."""
  measured = report["measurements"]
  temperatures = list(dict.fromkeys(m["temperature"] for m in measured))
  widest = max(m["budget"] for m in measured)
  figure = _figure(report, columns=1 + len(temperatures))
  axes = figure.add_subplot(1, 1 + len(temperatures), 1)
  for i, temperature in enumerate(temperatures):
    for method, line in (("chain", "o--"), ("ddtree", "s-")):
      points = [
        (m["budget"], m["tokens_per_round_micro"])
        for m in measured
        if (m["temperature"], m["method"]) == (temperature, method)
      ]
      color = _COLORS[i % len(_COLORS)]
      name = f"{method}, T = {temperature}"
      axes.plot(*zip(*points, strict=True), line, color=color, label=name)
      # A chain ends where the drafter's block does; more budget does not help it.
      axes.hlines(points[-1][1], points[-1][0], widest, color=color, ls=":", lw=0.8)
  axes.set(xlabel="budget (tree nodes without the root)", ylabel="tokens per round")
  axes.set_title("drafts + 1, pooled over rounds", fontsize=9)
  axes.set_ylim(bottom=1)
  axes.legend(fontsize=8)
  for i, temperature in enumerate(temperatures):
    axes = figure.add_subplot(1, 1 + len(temperatures), 2 + i)
    for method, color in (("chain", _COLORS[0]), ("ddtree", _COLORS[1])):
      m = [
        m for m in measured if (m["temperature"], m["method"]) == (temperature, method)
      ][-1]
      depths = range(1, 1 + len(m["unconditional"]))
      name = f"{method} {m['budget']}"
      axes.plot(depths, m["unconditional"], "o-", color=color, ms=3, label=f"{name}, u")
      reached = [s * m["rounds"] for s in (1.0, *m["unconditional"][:-1])]
      shown = [
        (d, c)
        for d, c, count in zip(depths, m["conditional"], reached, strict=True)
        if count >= _FEWEST_ROUNDS
      ]
      if shown:
        axes.plot(
          *zip(*shown, strict=True), "x:", color=color, ms=4, label=f"{name}, c"
        )
    axes.set(xlabel="depth d", ylabel="share of rounds", ylim=(0, 1))
    axes.set_title(f"T = {temperature}: u_d, and c_d = u_d / u_(d-1)", fontsize=9)
    axes.legend(fontsize=8)
  figure.savefig(path, dpi=120)


def speed(report: dict[str, Any], path: Path) -> None:
  """Speed relative to plain decoding, and where a round's time goes."""
  measured = report["measurements"]
  staged = measured[0]["stages"] is not None
  figure = _figure(report, columns=1 + staged)
  axes = figure.add_subplot(1, 1 + staged, 1)
  names = [
    m["name"] if m["name"] == "plain" else f"{m['name']}\n{m['budget']}"
    for m in measured
  ]
  ratios = [m["ratio_to_plain"] for m in measured]
  axes.bar(names, ratios, color="tab:blue")
  for i, m in enumerate(measured):
    axes.plot([i, i], m["ratio_interval_95"], color="black", lw=1)
  axes.axhline(1, color="gray", lw=0.8)
  axes.set(ylabel="decode-only tokens/s relative to plain")
  axes.set_title("ratio of medians, 95 % over prompts", fontsize=9)
  if staged:
    axes = figure.add_subplot(1, 2, 2)
    bottom = [0.0] * len(measured)
    for stage, color in zip(STAGES, _COLORS, strict=True):
      heights = [m["stages"][stage] for m in measured]
      axes.bar(names, heights, bottom=bottom, color=color, label=stage)
      bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.plot(names, [m["round_ms"] for m in measured], "k_", ms=18, label="round")
    axes.set(ylabel="ms per round")
    axes.set_title("stages timed alone, and the whole round", fontsize=9)
    axes.legend(fontsize=8)
  figure.savefig(path, dpi=120)


def kernels(report: dict[str, Any], path: Path) -> None:
  """Time of each kernel beside XLA's form, its bar and its floor."""
  measured = report["measurements"][::-1]
  figure = _figure(report, columns=2)
  axes = figure.add_subplot(1, 1, 1)
  names = [f"{m['op']}\n{m['shape']}" for m in measured]
  for form, color, shift in (("xla", _COLORS[1], 0.2), ("cuda", _COLORS[0], -0.2)):
    points = [
      (i + shift, m[form]["us"]) for i, m in enumerate(measured) if "us" in m[form]
    ]
    if points:
      places, heights = zip(*points, strict=True)
      axes.barh(places, heights, 0.4, color=color, label=form)
  floors = [m["floor_us"] for m in measured]
  axes.plot(floors, range(len(measured)), "k|", ms=14, label="floor")
  bars = [(m["bar_us"], i) for i, m in enumerate(measured) if m["bar_us"]]
  if bars:
    axes.plot(*zip(*bars, strict=True), "r|", ms=14, label="bar")
  axes.set_yticks(range(len(measured)), names, fontsize=6)
  axes.set(xscale="log", xlabel="us per call")
  axes.set_xlim(left=0.1)  # a launch alone takes longer
  axes.legend(fontsize=8)
  figure.savefig(path, dpi=120)


def decode(report: dict[str, Any], path: Path) -> None:
  """Where a round's time goes, and what of it is no model's forward pass."""
  measured = report["measurements"]
  figure = _figure(report, columns=2)
  names = [
    m["name"] if m["name"] == "plain" else f"{m['name']}\n{m['budget']}"
    for m in measured
  ]
  for column, parts in enumerate((PARTS, OVERHEAD)):
    axes = figure.add_subplot(1, 2, 1 + column)
    bottom = [0.0] * len(measured)
    for part in parts:
      heights = [max(m["parts"][part], 0.0) for m in measured]
      color = _PALETTE[PARTS.index(part)]
      axes.bar(names, heights, bottom=bottom, color=color, label=part)
      bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(ylabel="us per round")
    axes.legend(fontsize=7)
    axes.set_title(
      "whole round" if column == 0 else "all but the models' passes", fontsize=9
    )
  figure.savefig(path, dpi=120)


def _figure(report: dict[str, Any], columns: int):
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(1 + 4 * columns, 4), layout="constrained")
  FigureCanvasAgg(figure)
  where = report["environment"]
  settings = ", ".join(f"{k} {v}" for k, v in report["settings"].items())
  figure.suptitle(f"{where['device']}, {where['date']}\n{settings}", fontsize=8)
  return figure
