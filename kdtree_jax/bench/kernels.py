"""How fast are the CUDA kernels, beside XLA's form and beside what is possible?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.bench import report as reports
from kdtree_jax.bench.kernel_cases import Case
from kdtree_jax.bench.timing import HOST_BOUND, Ceilings, Chain, Timing, measure
from kdtree_jax.ops import _implementation

FORMS = ("cuda", "xla")

# NVIDIA's published figures of a card that the estimates are for: memory bandwidth,
# dense bf16 rate with fp32 accumulation.
ESTIMATED_DEVICE = "RTX PRO 6000 Blackwell (sm_120)"
ESTIMATED_CEILINGS = Ceilings(
  bytes_per_second=1792e9, flops_per_second=503.8e12, link_us=0.0
)
# Below this share of the floor, neither bytes nor operations set the time.
LATENCY_BOUND = 0.2


def run(
  cases: Sequence[Case],
  ceilings: Ceilings,
  *,
  runs: int = 9,
  seconds: float = 0.02,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Times both forms of each case in turn.

  Args:
    cases: what to measure.
    ceilings: of this device, measured in the same process.
    runs: measurements per form, alternating between the forms.
    seconds: length of one measurement.
    log: gets progress.

  Returns:
    The report; `measurements` has one entry per case. A form that is not built
    has an entry that says why instead of times.
  """
  measurements = []
  for case in cases:
    measured = _measure(case, ceilings, runs, seconds)
    measurements.append(measured)
    times = ", ".join(f"{form} {measured[form].get('us', 'missing')}" for form in FORMS)
    log(f"{case.op}, {case.shape}: {times}")
  return {
    "suite": "kernels",
    "environment": reports.environment(),
    "settings": {"runs": runs},
    "ceilings": dataclasses.asdict(ceilings),
    "estimated_device": ESTIMATED_DEVICE,
    "measurements": measurements,
  }


def why_missing(op: str, form: str) -> str | None:
  """Why a form of an op cannot run here, or None."""
  if form == "cuda" and jax.default_backend() != "gpu":
    return "no CUDA GPU"
  try:
    _implementation.resolve(op, form)
  except NotImplementedError as error:
    return f"not built: {error}"
  return None


def _measure(
  case: Case, ceilings: Ceilings, runs: int, seconds: float
) -> dict[str, Any]:
  forms: dict[str, Any] = {}
  chains: dict[str, Chain] = {}
  sets = [
    jax.jit(case.inputs)(key) for key in jax.random.split(jax.random.key(0), case.sets)
  ]
  shared = () if case.shared is None else case.shared(jax.random.key(1))
  for form in FORMS:
    missing = why_missing(case.op, form)
    if form == "xla" and case.no_xla is not None:
      missing = f"not timed: {case.no_xla}"
    if missing is not None:
      forms[form] = {"missing": missing}
      continue
    calls = case.calls if form == "cuda" else case.xla_calls
    try:
      chains[form] = _chain(case, form, sets, calls, shared)
      chains[form].run(1)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
      chains.pop(form, None)
      message = " ".join(str(error).split())
      forms[form] = {"missing": f"failed: {type(error).__name__}: {message[:300]}"}
  times = measure(chains, runs=runs, seconds=seconds)
  forms |= {form: dataclasses.asdict(timing) for form, timing in times.items()}
  difference = None
  if len(chains) == len(FORMS):
    difference = largest_difference(*(chain.first() for chain in chains.values()))
  return {
    "op": case.op,
    "shape": case.shape,
    "bytes": case.bytes_moved,
    "flops": case.flops,
    "floor_us": ceilings.floor_us(case.bytes_moved, case.flops),
    "bar_us": case.bar_us,
    "hopper_bar_us": case.hopper_bar_us,
    **forms,
    "difference": difference,
    **figures(case, ceilings, times),
  }


def _chain(
  case: Case, form: str, sets: Sequence[Any], calls: int, shared: tuple[Any, ...]
) -> Chain:
  carried = None if case.carried is None else case.carried()
  return Chain(
    lambda *arguments: case.call(*arguments, form),
    sets,
    calls=calls,
    link=case.link,
    carried=carried,
    shared=shared,
    repeats=case.repeats,
  )


def figures(case: Case, ceilings: Ceilings, times: dict[str, Timing]) -> dict[str, Any]:
  """What follows from the CUDA form's time, or from XLA's where there is none.

  Returns:
    `ratio`: XLA's time over CUDA's, None where one is missing. `of`: the form that
    the rest is about. `reached`: no longer than the bar; None for XLA or without
    bar. `bytes_per_second`, `flops_per_second`: achieved. `share_of_floor`: the
    floor over the time. `estimate_us` on the estimated device, and `estimate_from`,
    how.
  """
  if not times:
    return {"of": None}
  of = "cuda" if "cuda" in times else "xla"
  us = times[of].us
  floor = ceilings.floor_us(case.bytes_moved, case.flops)
  there = ESTIMATED_CEILINGS.floor_us(case.bytes_moved, case.flops)
  latency_bound = floor < LATENCY_BOUND * us
  ratio = times["xla"].us / times["cuda"].us if len(times) == len(FORMS) else None
  reached = None
  if of == "cuda" and case.bar_us is not None:
    reached = us <= case.bar_us
  return {
    "of": of,
    "ratio": ratio,
    "reached": reached,
    "bytes_per_second": 1e6 * case.bytes_moved / us,
    "flops_per_second": 1e6 * case.flops / us,
    "share_of_floor": floor / us,
    "estimate_us": us - floor + there if latency_bound else us * there / floor,
    "estimate_from": "same latency" if latency_bound else "same share of the floor",
  }


def largest_difference(a: Any, b: Any) -> float:
  """Largest absolute difference of two pytrees; equal infinities differ by 0."""

  def one(x: jax.Array, y: jax.Array) -> jax.Array:
    wide = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))
    return jnp.max(jnp.where(x == y, 0.0, wide), initial=0.0)

  differences = jax.jit(lambda a, b: jax.tree.leaves(jax.tree.map(one, a, b)))(a, b)
  return max(map(float, differences), default=0.0)


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  limits = Ceilings(**report["ceilings"])
  rows = [_row(m) for m in report["measurements"]]
  parts = [
    reports.heading(report),
    f"Ceilings measured in this run: {limits.bytes_per_second / 1e9:.0f} GB/s "
    f"(elementwise, read + written), {limits.flops_per_second / 1e12:.0f} TFLOP/s "
    f"(bf16 product of 8192^3).\nA call that does nothing takes {limits.link_us:.2f} "
    "us: it is part of each figure, and not subtracted.",
    reports.table(COLUMNS, rows),
    "us: median over runs of the time per call, in a chain of calls in one program "
    "(fastest-slowest).\nfloor: the counted bytes and operations at the measured "
    "ceilings. % floor: floor / us.\nchunk: positions that attention's CUDA form "
    "reduces at once, a function of the model's longest context.\nbar: what "
    "docs/kernels.md asks of the portable kernel; in brackets of one for Hopper "
    "alone.\nmax diff: between the outputs of the two "
    f"forms.\nestimate: not measured; on an {report['estimated_device']}, from its "
    "published ceilings\nand the same share of the floor; ~ marks calls whose time is "
    "latency, which is taken over as it is.",
  ]
  notes = [
    f"{m['op']}, {m['shape']}, {form}: {m[form]['missing']}"
    for m in report["measurements"]
    for form in FORMS
    if "missing" in m[form]
  ]
  notes += [
    f"{m['op']}, {m['shape']}, {form}: the host set the pace; the device is faster"
    for m in report["measurements"]
    for form in FORMS
    if m[form].get("host_share", 0) > HOST_BOUND
  ]
  return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


COLUMNS = (
  "op",
  "shape",
  "xla us",
  "cuda us",
  "spread",
  "x xla",
  "bar us",
  "reached",
  "floor us",
  "% floor",
  "GB/s",
  "TFLOP/s",
  "max diff",
  "estimate us",
)


def _row(m: dict[str, Any]) -> list[str]:
  """A measurement in the order of `COLUMNS`."""
  cuda, none = m["cuda"], m["of"] is None
  bar = "-" if m["bar_us"] is None else f"{m['bar_us']:g}"
  if m["hopper_bar_us"] is not None:
    bar += f" ({m['hopper_bar_us']:g})"
  reached = None if none else m["reached"]
  missing = cuda.get("missing", "")
  estimate = "-"
  if m["of"] == "cuda":
    sign = "~" if m["estimate_from"] == "same latency" else ""
    estimate = sign + short(m["estimate_us"])
  return [
    m["op"],
    m["shape"],
    short(m["xla"].get("us")),
    short(cuda["us"]) if "us" in cuda else missing.split(":")[0],
    f"{short(cuda['low'])}-{short(cuda['high'])}" if "us" in cuda else "-",
    "-" if none or m["ratio"] is None else f"{m['ratio']:.2f}",
    bar,
    {None: "-", True: "yes", False: "NO"}[reached],
    short(m["floor_us"]),
    "-" if none else f"{100 * m['share_of_floor']:.0f}",
    "-" if none else f"{m['bytes_per_second'] / 1e9:.0f}",
    "-" if none or not m["flops"] else f"{m['flops_per_second'] / 1e12:.1f}",
    "-" if m["difference"] is None else f"{m['difference']:.1e}",
    estimate,
  ]


def short(us: float | None) -> str:
  """Microseconds with three digits or more."""
  if us is None:
    return "-"
  return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def markdown(report: dict[str, Any]) -> str:
  """The report as a Markdown table, with where it was made."""
  limits = Ceilings(**report["ceilings"])
  lines = [
    *reports.markdown_origin(report),
    f"- ceilings: {limits.bytes_per_second / 1e9:.0f} GB/s, "
    f"{limits.flops_per_second / 1e12:.0f} TFLOP/s; a call that does nothing: "
    f"{limits.link_us:.2f} us",
    "",
    *reports.markdown_table(COLUMNS, [_row(m) for m in report["measurements"]]),
  ]
  return "\n".join(lines)


def failed(report: dict[str, Any]) -> bool:
  """Did a form fail that should run?"""
  return any(
    m[form].get("missing", "").startswith("failed")
    for m in report["measurements"]
    for form in FORMS
  )
