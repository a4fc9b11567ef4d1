"""A slice of a large model, timed: rounds, their parts, and the sum of their floors.

The compiled loop of rounds is timed as a whole, and so are its parts, each alone (see
`rounds` and `slice_parts`). A floor is what a part's counted bytes take at the copy
rate, or its operations at the product rate, both measured in the same process,
whichever is longer (see `slice_work`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.bench import kimi_slice, slice_work
from kdtree_jax.bench import report as reports
from kdtree_jax.bench.rounds import Effort, Rounds, Start
from kdtree_jax.bench.slice_parts import LayerParts
from kdtree_jax.bench.slice_work import PARTS, TARGET_PARTS
from kdtree_jax.bench.timing import Ceilings
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding.settings import check_implementation
from kdtree_jax.training.config import Experiment

CONTEXTS = (1024,)  # by default; more with a flag
BUDGETS = (16, 64)
BAR = 1.5  # times the sum of floors,
BAR_CONTEXT = 1024  # at up to so many tokens,
BAR_BUDGETS = (0, 16)  # for plain decoding and for this tree
WORKSPACE_BAR = 1 << 30  # bytes besides weights and caches
WHOLE_LAYERS = 61  # of the model that the slice is cut from
EFFORT = Effort(calls=2, runs=5, seconds=0.02, warmups=2)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to measure.

  Attributes:
    contexts: committed tokens, of random latents.
    budgets: of trees; plain decoding comes with them.
    rounds: per call of the compiled loop.
    base: seed and implementation.
    dtype: of all but the routed experts.
    experts: see `kimi_slice.random_target`.
    parts: also time each part of a round.
    max_seconds: begin nothing new after so long, or None.
    effort: how much to measure.
  """

  contexts: Sequence[int] = CONTEXTS
  budgets: Sequence[int] = BUDGETS
  rounds: int = 32
  base: DecodeConfig = DecodeConfig()
  dtype: str = "bfloat16"
  experts: str = "int4"
  parts: bool = True
  max_seconds: float | None = None
  effort: Effort = EFFORT


def run(
  experiment: Experiment,
  settings: Settings,
  ceilings: Ceilings,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Makes the pair, and times rounds of it; one sequence.

  Args:
    experiment: the model and its drafter.
    settings: what to measure.
    ceilings: of this device, measured in this process.
    log: gets progress.

  Returns:
    The report; `measurements` has one entry per context and method.

  Raises:
    ValueError: no drafter, contexts or budgets; a pair that does not fit the device.
    NotImplementedError: an implementation that cannot run here.
  """
  began = time.perf_counter()
  check_settings(experiment, settings)
  dtype, seed = jnp.dtype(settings.dtype), settings.base.seed
  config = experiment.model
  assert experiment.drafter is not None  # checked
  target = kimi_slice.random_target(config, dtype, seed, settings.experts)
  drafter = kimi_slice.random_drafter(
    experiment.drafter, config.num_hidden_layers, dtype, seed
  )
  memory = {
    "target_bytes": kimi_slice.bytes_of(target),
    "drafter_bytes": kimi_slice.bytes_of(drafter),
    "peak_bytes_after_making": peak_bytes(),
  }
  log(f"made {(memory['target_bytes'] + memory['drafter_bytes']) / 1e9:.1f} GB")
  ways = [("plain", 0)] + [("ddtree", b) for b in sorted(set(settings.budgets)) if b]
  measurements, left_out, captured = [], [], True
  for context in sorted(set(settings.contexts)):
    start = None
    for method, budget in ways:
      late = time.perf_counter() - began
      if settings.max_seconds is not None and late > settings.max_seconds:
        left_out.append({"context": context, "name": method, "budget": budget})
        continue
      if start is None:
        start = kimi_slice.random_start(target, drafter, context, settings.rounds, seed)
      measured = _measure(start, method, budget, context, settings, ceilings)
      captured &= measured.pop("captured")
      measurements.append(measured)
      log(
        f"context {context}, {method} {budget}: round {measured['round_us']:.0f} us, "
        f"{measured['ratio']:.2f} x the floors"
      )
  memory["peak_bytes"] = peak = peak_bytes()
  contexts = [m["cache_bytes"] + m["drafter_context_bytes"] for m in measurements]
  kept = memory["target_bytes"] + memory["drafter_bytes"] + 2 * max(contexts, default=0)
  memory["peak_besides_bytes"] = None if peak is None else peak - kept
  return {
    "suite": "slice",
    "environment": reports.environment(),
    "settings": {
      "layers": config.num_hidden_layers,
      "width": config.hidden_size,
      "V": config.vocab_size,
      "dtype": settings.dtype,
      "experts": f"{config.n_routed_experts} {settings.experts}",
      "rounds": settings.rounds,
      "ops": settings.base.implementation,
      "captured": captured,
    },
    "ceilings": dataclasses.asdict(ceilings),
    "memory": memory,
    "measurements": measurements,
    "left_out": left_out,
    "assumptions": slice_work.ASSUMPTIONS,
  }


def check_settings(experiment: Experiment, settings: Settings) -> None:
  """Raises as `run` does, before anything is made."""
  check_implementation(settings.base.implementation)
  if experiment.drafter is None or not settings.contexts:
    raise ValueError("the slice needs a configuration with a drafter, and a context")
  check_fits(experiment, jnp.dtype(settings.dtype), max(settings.contexts))


def _measure(
  start: Start,
  method: str,
  budget: int,
  context: int,
  settings: Settings,
  ceilings: Ceilings,
) -> dict[str, Any]:
  target, drafter = start.target, start.drafter
  plain = method == "plain"
  implementation = settings.base.implementation
  config = dataclasses.replace(
    settings.base,
    method=method,
    budget=None if plain else budget,
    rows=None,
    temperature=0.0,
  )
  timed = Rounds(start, config, settings.effort)
  layers = LayerParts(
    start, budget, timed.program.rows, implementation, settings.effort
  )
  distinct = layers.distinct()
  round_ = slice_work.Round(layers.depths, context, distinct, plain)
  measured = timed.loop()
  parts = None
  if settings.parts:
    parts = layers.measure(ceilings.link_us)
    whole = timed.parts()
    parts["others"] = whole.pop("verify") - sum(parts.values())
    parts |= whole
    parts["loop"] = measured["round_us"] - sum(parts.values())
  work = slice_work.round_work(target, drafter, round_)
  floors = {p: ceilings.floor_us(w.bytes_moved, w.flops) for p, w in work.items()}
  floor = sum(floors.values())
  ratio = measured["round_us"] / floor
  asked = context <= BAR_CONTEXT and budget in BAR_BUDGETS
  estimate = None
  if parts is not None:
    rate = ceilings.bytes_per_second
    estimate = slice_work.estimate_us(
      target, drafter, round_, parts, rate, WHOLE_LAYERS
    )
  workspace = measured["workspace_bytes"]
  return {
    "context": context,
    "name": method,
    "budget": budget,
    "rows": timed.program.rows,
    "captured": timed.captured,
    **measured,
    "floor_us": floor,
    "ratio": ratio,
    "bar": BAR if asked else None,
    "reached": ratio <= BAR if asked else None,
    "parts": parts,
    "floors": floors,
    "work": {part: dataclasses.asdict(w) for part, w in work.items()},
    "calls": _calls(target),
    "distinct": distinct,
    "distinct_with_padding": layers.distinct(live=False),
    "distinct_if_uniform": slice_work.expected_distinct(target.config, layers.nodes),
    "finite": layers.finite(),
    "cache_bytes": start.state.cache.data.nbytes,
    "drafter_context_bytes": kimi_slice.bytes_of(start.state.drafter),
    "workspace_in_bounds": None if workspace is None else workspace < WORKSPACE_BAR,
    "estimate": estimate,
  }


def _calls(target: Any) -> dict[str, int]:
  """Layers that have each part of a layer."""
  config, layers = target.config, len(target.layers)
  sparse = sum(config.is_moe_layer(i) for i in range(layers))
  calls = {"projections": layers, "attention": layers, "others": layers}
  calls |= dict.fromkeys(("router", "experts", "shared"), sparse)
  return calls | {"dense": layers - sparse}


def peak_bytes() -> int | None:
  """Most device memory in use so far in this process; None where JAX does not say."""
  stats = jax.devices()[0].memory_stats()
  return None if stats is None else stats.get("peak_bytes_in_use")


def check_fits(
  experiment: Experiment, dtype: jnp.dtype, context: int, without_gpu: int = 8 << 30
) -> None:
  """Raises where the pair and two copies of a context do not fit the device.

  Args:
    experiment: the pair.
    dtype: of all but the routed experts.
    context: tokens.
    without_gpu: bytes allowed where the device does not tell how many it has.

  Raises:
    ValueError: says how many bytes are needed, and how many there are.
  """
  config, drafter = experiment.model, experiment.drafter
  row = config.cache_width * config.num_hidden_layers
  if drafter is not None:
    heads = drafter.num_key_value_heads * drafter.head_dim
    row += 2 * heads * drafter.num_hidden_layers
  needed = kimi_slice.weight_bytes(experiment, dtype)
  needed += 2 * context * row * dtype.itemsize
  stats = jax.devices()[0].memory_stats() or {}
  limit = stats.get("bytes_limit", without_gpu)
  if needed + WORKSPACE_BAR > limit:
    raise ValueError(
      f"num_hidden_layers = {config.num_hidden_layers} and a context of {context} need "
      f"{needed / 1e9:.1f} GB and a workspace; the device "
      f"({jax.devices()[0].device_kind}) gives {limit / 1e9:.1f} GB: take a GPU with "
      "more memory, fewer layers (--config.model.num_hidden_layers) or less context"
    )


def failed(report: dict[str, Any]) -> bool:
  """Were hidden states not finite, or did a loop talk to the host?"""
  return any(not m["finite"] or m["host_transfers"] for m in report["measurements"])


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  limits = Ceilings(**report["ceilings"])
  parts = [
    reports.heading(report),
    f"Ceilings measured in this run: {limits.bytes_per_second / 1e9:.0f} GB/s, "
    f"{limits.flops_per_second / 1e12:.0f} TFLOP/s (bf16); a call that does nothing "
    f"takes {limits.link_us:.2f} us.",
    reports.table(COLUMNS, [_row(m) for m in report["measurements"]]),
    "round: us, the compiled loop as a whole, median over its calls. floors: their "
    "sum.\nexperts: that a sparse layer reads for the live nodes of a random tree, "
    "mean over layers;\nuniform: expected of uniform, independent routing. workspace: "
    "MiB of the compiled loop\nbesides arguments and results; below 1,024 is asked. "
    f"x {WHOLE_LAYERS} layers: ESTIMATE, see below.",
  ]
  if any(m["parts"] for m in report["measurements"]):
    parts += [
      reports.table(PART_COLUMNS, part_rows(report)),
      "us of each part alone, as a chain of calls in one program, less the link where "
      "it is a layer's.\nprojections: attention with its projections and RoPE, less "
      "attention. others: the whole verify step\nless the parts above it: norms, "
      "residual sums. loop: the round less all parts.",
      report["assumptions"],
    ]
  parts += [memory_text(report), verdict(report)]
  return "\n\n".join(parts)


COLUMNS = (
  "context",
  "method",
  "budget",
  "rows",
  "round",
  "floors",
  "x floors",
  "bar",
  "reached",
  "experts",
  "uniform",
  "workspace",
  "tokens/round",
  f"x {WHOLE_LAYERS} layers",
)
PART_COLUMNS = (
  "context",
  "method",
  "budget",
  "part",
  "us",
  "us a layer",
  "floor",
  "x floor",
  f"estimate, {WHOLE_LAYERS} layers",
)


def _row(m: dict[str, Any]) -> list[Any]:
  """A measurement in the order of `COLUMNS`."""
  mean = sum(m["distinct"]) / max(len(m["distinct"]), 1)
  workspace, estimate = m["workspace_bytes"], m["estimate"]
  return [
    m["context"],
    m["name"],
    m["budget"],
    m["rows"],
    f"{m['round_us']:.0f}",
    f"{m['floor_us']:.0f}",
    f"{m['ratio']:.2f}",
    None if m["bar"] is None else f"{m['bar']:g}",
    {None: "-", True: "yes", False: "NO"}[m["reached"]],
    f"{mean:.1f}",
    f"{m['distinct_if_uniform']:.1f}",
    None if workspace is None else f"{workspace / 2**20:.0f}",
    f"{m['tokens_per_round']:.2f}",
    None if estimate is None else f"{estimate['round']:.0f}",
  ]


def part_rows(report: dict[str, Any]) -> list[list[Any]]:
  """Rows of the table of parts, in the order of `PART_COLUMNS`."""
  rows = []
  for m in report["measurements"]:
    if m["parts"] is None:
      continue
    estimate = m["estimate"] or {}
    for part in (*PARTS, "all_reduce", "gather"):
      us, floor = m["parts"].get(part), m["floors"].get(part, 0.0)
      if not us and not floor and not estimate.get(part):
        continue
      calls = m["calls"].get(part) if part in TARGET_PARTS else None
      rows.append(
        [
          m["context"],
          m["name"],
          m["budget"],
          part,
          None if us is None else f"{us:.1f}",
          f"{us / calls:.1f}" if us is not None and calls else None,
          f"{floor:.1f}",
          f"{us / floor:.2f}" if us is not None and floor > 0.05 else None,
          f"{estimate[part]:.1f}" if part in estimate else None,
        ]
      )
  return rows


def memory_text(report: dict[str, Any]) -> str:
  """What lies in device memory, in one paragraph."""
  memory = report["memory"]

  def gb(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.2f} GB"

  lines = [
    f"Memory: target {gb(memory['target_bytes'])}, drafter "
    f"{gb(memory['drafter_bytes'])}; peak while they were made "
    f"{gb(memory['peak_bytes_after_making'])}, of the process "
    f"{gb(memory['peak_bytes'])}: {gb(memory['peak_besides_bytes'])} besides the pair "
    "and two copies of a context, which timing keeps, its inputs and results included.",
  ]
  for context in dict.fromkeys(m["context"] for m in report["measurements"]):
    m = next(m for m in report["measurements"] if m["context"] == context)
    lines.append(
      f"Context {context}: latent cache {gb(m['cache_bytes'])}, the drafter's "
      f"{gb(m['drafter_context_bytes'])}."
    )
  return "\n".join(lines)


def verdict(report: dict[str, Any]) -> str:
  """What the bars say, and what is missing."""
  sentences = [
    f"{m['name']} at budget {m['budget']}, context {m['context']}: {m['ratio']:.2f} x "
    f"the sum of floors; the bar of {m['bar']:g} is "
    f"{'reached' if m['reached'] else 'NOT reached'}."
    for m in report["measurements"]
    if m["bar"] is not None
  ]
  for m in report["measurements"]:
    where = f"{m['name']} at budget {m['budget']}, context {m['context']}"
    if m["workspace_in_bounds"] is False:
      sentences.append(f"{where}: the WORKSPACE is above 1 GiB.")
    if not m["finite"]:
      sentences.append(f"{where}: hidden states are NOT FINITE.")
    if m["host_transfers"]:
      sentences.append(f"{where}: {m['host_transfers']} HOST TRANSFERS.")
  sentences += [
    f"{m['name']} at budget {m['budget']}, context {m['context']}: left out, no time."
    for m in report["left_out"]
  ]
  return "\n".join(sentences)


def markdown(report: dict[str, Any]) -> str:
  """The report as Markdown tables, with where it was made."""
  limits = Ceilings(**report["ceilings"])
  settings = ", ".join(f"{k} {v}" for k, v in report["settings"].items())
  lines = [
    *reports.markdown_origin(report),
    f"- settings: {settings}",
    f"- ceilings: {limits.bytes_per_second / 1e9:.0f} GB/s, "
    f"{limits.flops_per_second / 1e12:.0f} TFLOP/s; a call that does nothing: "
    f"{limits.link_us:.2f} us",
    *(f"- {line}" for line in memory_text(report).splitlines()),
    "",
    *reports.markdown_table(COLUMNS, [_row(m) for m in report["measurements"]]),
  ]
  rows = part_rows(report)
  if rows:
    lines += ["", *reports.markdown_table(PART_COLUMNS, rows)]
    lines += ["", report["assumptions"]]
  return "\n".join(lines)
