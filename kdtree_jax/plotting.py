"""Pictures for notebooks: a round's tree, acceptance, tokens per round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kdtree_jax.decoding.result import Round

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

ACCEPTED, REJECTED = "#1b7837", "#bbbbbb"


def draw_tree(record: Round, decode: Callable[[int], str]) -> Figure:
  """One round's draft tree, the accepted path in green.

  A column per depth; the area of a node is the drafter's probability of its
  path.

  Args:
    record: a round of a result decoded with `return_trees=True`.
    decode: text of a token id.
  """
  children: dict[int, list[int]] = {}
  for node in range(1, record.size):
    children.setdefault(int(record.parents[node]), []).append(node)
  heights = _heights(children)
  accepted = set(record.path)
  depth = int(record.depths[: record.size].max())
  rows = max(heights.values()) + 1
  figure, axes = _figure(1.1 * (depth + 1) + 1, 0.34 * rows + 1)
  for node in range(record.size):
    x, y = int(record.depths[node]), -heights[node]
    if node:
      parent = int(record.parents[node])
      on_path = node in accepted
      axes.plot(
        [int(record.depths[parent]), x],
        [-heights[parent], y],
        color=ACCEPTED if on_path else REJECTED,
        lw=2 if on_path else 0.8,
        zorder=1,
      )
    color = ACCEPTED if node in accepted else REJECTED
    mass = math.exp(float(record.log_probs[node]))
    axes.scatter([x], [y], s=20 + 180 * mass, color=color, zorder=2)
    text = repr(decode(int(record.token_ids[node])))[1:-1].replace("$", r"\$")
    axes.annotate(text, (x, y), (4, 5), textcoords="offset points", fontsize=7)
  axes.set_axis_off()
  axes.set_title(
    f"{record.size - 1} drafts, {len(record.path) - 1} accepted", fontsize=9
  )
  return figure


def _heights(children: Mapping[int, Sequence[int]]) -> dict[int, float]:
  """A row for each node: leaves in order, parents level with their first child."""
  heights: dict[int, float] = {}
  leaves = 0

  def visit(node: int) -> None:
    nonlocal leaves
    own = children.get(node, ())
    for child in own:
      visit(child)
    if own:
      heights[node] = heights[own[0]]
    else:
      heights[node] = leaves
      leaves += 1

  visit(0)
  return heights


def plot_acceptance(
  accepted_lengths: Mapping[str, Sequence[int]], depth: int
) -> Figure:
  """Share of rounds in which at least d drafts were accepted, per method.

  Args:
    accepted_lengths: method to tokens committed by each round (drafts + bonus).
    depth: largest d shown.
  """
  figure, axes = _figure(5, 3)
  depths = np.arange(1, depth + 1)
  for name, lengths in accepted_lengths.items():
    drafts = np.asarray(lengths) - 1
    axes.plot(depths, [(drafts >= d).mean() for d in depths], "o-", ms=3, label=name)
  axes.set(xlabel="draft position", ylabel="share of rounds accepted", ylim=(0, 1))
  axes.legend()
  return figure


def plot_tokens_per_round(
  budgets: Sequence[int], curves: Mapping[str, Sequence[float]]
) -> Figure:
  """Tokens per round against the node budget, a curve per method."""
  figure, axes = _figure(5, 3)
  for name, values in curves.items():
    axes.plot(budgets, values, "o-", ms=4, label=name)
  axes.set(xlabel="budget (nodes without the root)", ylabel="tokens per round")
  axes.legend()
  return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
  """A figure outside pyplot: nothing global, closed with its last reference."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  return figure, figure.add_subplot()
