"""Is speculative decoding plain decoding, bit for bit? The whole product."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.bench import prompts as prompt_sets
from kdtree_jax.bench import report as reports
from kdtree_jax.bench.journal import Journal, digest, model_digest, source_digest
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import DecodeResult, decode
from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.drafter import NGram, Scripted
from kdtree_jax.model.target import Target
from kdtree_jax.ops.tree_attention import CHUNK

DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.0, 0.7, 1.0)
BUDGETS = (0, 1, 7, 16, 32, 60)
SLOTS = (1, 3, 8)
DRAFTERS = ("dflash", "ngram", "scripted_0", "scripted_50", "scripted_100")
ROWS = 64
# Prompts that end shortly before, at, and far from the ends of attention's chunks
# (positions 128 and 256), so that trees lie across them at every offset.
LENGTHS = (126, 113, 250, 40, 98, 127, 121, 64)
# Fewer positions than the longest prompt could use: it ends by a full cache.
SHORT_OF = 4

Load = Callable[[str], tuple[Target, Any]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """One member of the product."""

  dtype: str
  slots: int
  temperature: float
  drafter: str
  budget: int

  @property
  def program(self) -> tuple[str, int, bool, str]:
    """Cells with equal values share their compiled programs."""
    kind = self.drafter.split("_")[0]
    return self.dtype, self.slots, self.temperature > 0, kind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _AnyAccuracy(Scripted):
  """`Scripted` with the accuracy as a run-time value: one program for all."""

  accuracy: jax.Array = dataclasses.field()  # f32 []

  def __post_init__(self) -> None:
    """Does not check: a traced accuracy has no value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """What is run.

  Attributes:
    dtypes, temperatures, budgets, slots, drafters: the factors.
    lengths: of the prompts, in tokens.
    rows: of every verify step, plain decoding's too.
    scale: share of the compiled programs that is run, spread over the factors.
    min_tokens: committed tokens to compare in all, of the whole product;
      `scale` applies. The product is run again with other prompts and seeds
      until they are reached.
    base: max_new_tokens, chunk_rounds, seed and all else.
  """

  dtypes: Sequence[str] = DTYPES
  temperatures: Sequence[float] = TEMPERATURES
  budgets: Sequence[int] = BUDGETS
  slots: Sequence[int] = SLOTS
  drafters: Sequence[str] = DRAFTERS
  lengths: Sequence[int] = LENGTHS
  rows: int = ROWS
  scale: float = 1.0
  min_tokens: int = 200_000
  base: DecodeConfig = DecodeConfig(max_new_tokens=64, chunk_rounds=5)

  def __post_init__(self) -> None:
    if not 0 < self.scale <= 1:
      raise ValueError(f"scale = {self.scale} is not allowed: it is a share in (0, 1]")
    if self.min_tokens < 0:
      raise ValueError(f"min_tokens = {self.min_tokens} must be 0 or more")
    for name in self.drafters:
      if name not in DRAFTERS:
        raise ValueError(f"drafter {name!r} is not one of {DRAFTERS}")
    if max(self.budgets) >= self.rows:
      raise ValueError(
        f"budgets hold {max(self.budgets)}, which needs more than rows = {self.rows}"
      )

  @property
  def cache_len(self) -> int:
    return max(self.lengths) + self.base.max_new_tokens - SHORT_OF

  def cells(self) -> list[Cell]:
    """The cells to run, in an order that shares plain results and programs."""
    cells = [
      Cell(*values)
      for values in itertools.product(
        self.dtypes, self.slots, self.temperatures, self.drafters, self.budgets
      )
    ]
    left = list(dict.fromkeys(c.program for c in cells))
    count = max(1, math.ceil(self.scale * len(left) - 1e-9))
    chosen: list[tuple[Any, ...]] = []
    used: collections.Counter[tuple[int, Any]] = collections.Counter()
    while len(chosen) < count:
      # The one whose factors have been chosen least often, the first of equals.
      best = min(left, key=lambda p: sum(used[item] for item in enumerate(p)))
      left.remove(best)
      chosen.append(best)
      used.update(enumerate(best))
    return [c for c in cells if c.program in chosen]


def run(
  load: Load,
  pool: Sequence[Sequence[int]],
  product: Product,
  *,
  journal: Journal,
  max_seconds: float | None = None,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Decodes each cell and compares it with plain decoding.

  Tokens, finish reasons and every bit of the logits must agree with plain
  decoding at the same rows and slots. It stops at the first difference.

  Args:
    load: gives (target, drafter) of a dtype.
    pool: held-out prompts.
    product: what is run.
    journal: finished cells; those that it holds are not run again.
    max_seconds: no cell is begun after so many; None means no limit.
    log: gets progress.

  Returns:
    The report. `difference` is None or the first difference; `complete` tells
    whether all cells are finished.
  """
  runner = _Runner(load, pool, product, journal, log)
  deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
  cells, wanted = product.cells(), product.min_tokens * product.scale
  difference, repeat, complete = None, 0, False
  while difference is None and not complete:
    for cell in cells:
      if repeat and runner.tokens >= wanted:
        break
      if runner.finished(cell, repeat):
        continue
      if time.monotonic() > deadline:
        log(f"stopped after {max_seconds} s; the same command goes on from here")
        return runner.report(cells, difference, complete)
      difference = runner.compare(cell, repeat)
      if difference is not None:
        break
    repeat += 1
    complete = difference is None and runner.tokens >= wanted
  return runner.report(cells, difference, complete)


class _Runner:
  """Runs cells; keeps the models of one dtype and one plain result."""

  def __init__(
    self,
    load: Load,
    pool: Sequence[Sequence[int]],
    product: Product,
    journal: Journal,
    log: reports.Log,
  ):
    self._load, self._pool, self._product = load, pool, product
    self._journal, self._log = journal, log
    self._models: tuple[str, Target, Any] | None = None
    self._setups: dict[tuple[str, int], str] = {}
    self._plain: tuple[Any, DecodeResult] | None = None
    self._counted: set[tuple[str, Cell]] = set()
    self.records: list[dict[str, Any]] = []
    self.tokens = 0

  def finished(self, cell: Cell, repeat: int) -> bool:
    """Whether the journal has the cell; if so, it is counted."""
    setup = self._setup(cell.dtype, repeat)
    values = dataclasses.asdict(cell)
    for record in self._journal.records:
      if (record["setup"], record["cell"]) == (setup, values):
        if record["difference"] is None:
          self._count(setup, cell, record)
          return True
    return False

  def compare(self, cell: Cell, repeat: int) -> str | None:
    """Decodes a cell, notes the result, and returns the first difference."""
    start = time.perf_counter()
    prompts = self._prompts(repeat)
    plain = self._plain_result(cell, repeat)
    target, drafter = self._target_and_drafter(cell.dtype)
    drafter = self._drafter(cell.drafter, target, drafter, prompts, plain)
    result = self._decode(target, drafter, cell, repeat)
    difference = first_difference(plain, result)
    if difference is not None:
      plain_again = self._decode(target, None, cell, repeat)
      again = self._decode(target, drafter, cell, repeat)
      difference += (
        f" (once more: plain decoding {_repeats(plain, plain_again)}, "
        f"this cell {_repeats(result, again)})"
      )
    record = {
      "setup": self._setup(cell.dtype, repeat),
      "repeat": repeat,
      "cell": dataclasses.asdict(cell),
      "difference": difference,
      "tokens": sum(len(s.tokens) for s in result),
      "rounds": sum(s.stats.rounds for s in result),
      "committed": sum(sum(s.stats.accepted_lengths) for s in result),
      **_crossings(prompts, result, min(cell.budget, drafter.max_depth)),
      "finish_reasons": [s.finish_reason for s in result],
      "seconds": time.perf_counter() - start,
    }
    self._journal.append(record)
    if difference is None:
      self._count(record["setup"], cell, record)
    self._log(
      f"{'identical' if difference is None else 'DIFFERENT'}: {cell}: "
      f"{record['tokens']} tokens, {record['rounds']} rounds, "
      f"{record['seconds']:.1f} s, {self.tokens} tokens so far"
    )
    return None if difference is None else f"{cell}: {difference}"

  def report(
    self, cells: Sequence[Cell], difference: str | None, complete: bool
  ) -> dict[str, Any]:
    product = self._product
    return {
      "suite": "exactness",
      "environment": reports.environment(),
      "settings": {
        "rows": product.rows,
        "max_new": product.base.max_new_tokens,
        "chunk": f"attention {CHUNK} positions, {product.base.chunk_rounds} rounds",
        "lengths": list(product.lengths),
        "scale": product.scale,
        "wanted": round(product.min_tokens * product.scale),
        "cells": len(cells),
        "seed": product.base.seed,
      },
      "difference": difference,
      "complete": complete,
      "finished_cells": len(self.records),
      "tokens": self.tokens,
      "records": self.records,
    }

  def _count(self, setup: str, cell: Cell, record: dict[str, Any]) -> None:
    if (setup, cell) not in self._counted:
      self._counted.add((setup, cell))
      self.records.append(record)
      self.tokens += record["tokens"]

  def _target_and_drafter(self, dtype: str) -> tuple[Target, Any]:
    if self._models is None or self._models[0] != dtype:
      self._models = (dtype, *self._load(dtype))
    return self._models[1], self._models[2]

  def _prompts(self, repeat: int) -> list[list[int]]:
    lengths = self._product.lengths
    return prompt_sets.of_lengths(self._pool, lengths, repeat * len(lengths))

  def _config(self, slots: int, temperature: float, repeat: int) -> DecodeConfig:
    product = self._product
    return dataclasses.replace(
      product.base,
      rows=product.rows,
      slots=slots,
      temperature=temperature,
      seed=(product.base.seed + repeat) % 2**32,
      cache_len=product.cache_len,
      return_logits=True,
    )

  def _setup(self, dtype: str, repeat: int) -> str:
    """Stands for all that decides a cell's outcome beside the cell."""
    key = (dtype, repeat)
    if key not in self._setups:
      target, drafter = self._target_and_drafter(dtype)
      self._setups[key] = digest(
        [
          model_digest(target),
          model_digest(drafter),
          source_digest(),
          self._prompts(repeat),
          self._config(1, 0.0, repeat),
          jax.__version__,
          jax.devices()[0].device_kind,
        ]
      )
    return self._setups[key]

  def _plain_result(self, cell: Cell, repeat: int) -> DecodeResult:
    key = (cell.dtype, cell.slots, cell.temperature, repeat)
    if self._plain is None or self._plain[0] != key:
      target, _ = self._target_and_drafter(cell.dtype)
      self._plain = None  # Two sets of logits need not be held at once.
      self._plain = (key, self._decode(target, None, cell, repeat))
    return self._plain[1]

  def _decode(
    self, target: Target, drafter: Any, cell: Cell, repeat: int
  ) -> DecodeResult:
    config = dataclasses.replace(
      self._config(cell.slots, cell.temperature, repeat),
      method="plain" if drafter is None else "ddtree",
      budget=None if drafter is None else cell.budget,
    )
    return decode(
      target,
      drafter,
      self._prompts(repeat),
      config,
      on_compile=reports.compile_log(self._log),
    )

  def _drafter(
    self,
    name: str,
    target: Target,
    trained: Any,
    prompts: Sequence[Sequence[int]],
    plain: DecodeResult,
  ) -> Any:
    vocab_size = target.config.vocab_size
    if name == "dflash":
      return trained
    if name == "ngram":
      return NGram(vocab_size)
    script = np.zeros((len(prompts), self._product.cache_len), np.int32)
    for row, prompt, sequence in zip(script, prompts, plain, strict=True):
      text = [*prompt, *sequence.tokens][: len(row)]
      row[: len(text)] = text
    accuracy = int(name.removeprefix("scripted_")) / 100
    return _AnyAccuracy(
      continuations=jnp.asarray(script),
      accuracy=jnp.asarray(accuracy, jnp.float32),  # type: ignore[arg-type]
      vocab_size=vocab_size,
    )


def _repeats(first: DecodeResult, second: DecodeResult) -> str:
  """Tells two programs that differ from one whose bits change by themselves."""
  same = first_difference(first, second) is None
  return "gives the same bits" if same else "gives OTHER BITS"


def _crossings(
  prompts: Sequence[Sequence[int]], result: DecodeResult, reach: int
) -> dict[str, int]:
  """Counts over all texts; see `crossings`."""
  counts = [
    crossings(len(prompt), sequence.stats.accepted_lengths, reach)
    for prompt, sequence in zip(prompts, result, strict=True)
  ]
  trees, paths = np.sum(counts, axis=0).tolist()
  return {"trees_at_chunk_end": trees, "paths_across_chunks": paths}


def crossings(
  prompt_length: int, accepted_lengths: Sequence[int], reach: int
) -> tuple[int, int]:
  """How often the end of a chunk of attention lay among a round's rows.

  Args:
    prompt_length: tokens of the prompt; the first round's root, which the
      prefill chose, sits at this position.
    accepted_lengths: tokens that each round committed.
    reach: deepest node that a tree may have.

  Returns:
    (rounds whose tree could reach across the end of the root's chunk, rounds
    whose committed path, root and accepted drafts, did).
  """
  trees = paths = 0
  root = prompt_length
  for committed in accepted_lengths:
    chunk = root // CHUNK
    trees += chunk != (root + reach) // CHUNK
    paths += chunk != (root + committed - 1) // CHUNK
    root += committed
  return trees, paths


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  rows = list(_table_rows(report["records"]))
  columns = (
    "dtype",
    "drafter",
    "cells",
    "tokens",
    "tokens/round",
    "trees at a chunk's end",
    "paths across",
    "stop/length/cache",
  )
  total = f"{report['tokens']} tokens in {report['finished_cells']} cells"
  if report["difference"] is not None:
    verdict = f"DIFFERENT from plain decoding: {report['difference']}"
  else:
    verdict = "nothing was compared"
    if report["finished_cells"]:
      verdict = f"identical to plain decoding: {total}, and the bits of their logits"
    if not report["complete"]:
      verdict += f"\nNOT COMPLETE: {report['settings']['cells']} cells are to be run"
  notes = (
    "tokens/round: smallest and largest of the cells, pooled over a cell's rounds.\n"
    f"trees at a chunk's end: rounds whose tree may reach across a multiple of {CHUNK} "
    "positions;\npaths across: those whose accepted path does.\nEach cell is compared "
    "with plain decoding at its dtype, temperature, rows and slots."
  )
  return "\n\n".join(
    [reports.heading(report), reports.table(columns, rows), notes, verdict]
  )


def _table_rows(records: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
  groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for record in records:
    key = (record["cell"]["dtype"], record["cell"]["drafter"])
    groups.setdefault(key, []).append(record)
  for (dtype, drafter), group in sorted(groups.items()):
    speeds = [r["committed"] / r["rounds"] for r in group if r["rounds"]]
    reasons = [reason for r in group for reason in r["finish_reasons"]]
    yield (
      dtype,
      drafter,
      len(group),
      sum(r["tokens"] for r in group),
      f"{min(speeds):.2f}-{max(speeds):.2f}" if speeds else "-",
      sum(r["trees_at_chunk_end"] for r in group),
      sum(r["paths_across_chunks"] for r in group),
      "/".join(str(reasons.count(r)) for r in ("stop", "length", "cache")),
    )
