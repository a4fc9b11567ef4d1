"""Do the bits depend on how many rows or sequences a step has? On random weights.

Sequences are decoded plainly first, one row and one slot at a time. Then each width and
batch decodes the same texts again, with drafts that are all right: half of a step's
rows are the text that plain decoding wrote, the other half random siblings, which no
row of the text may see. The logits of the text's rows must have the bits of plain
decoding's, and so must the cache rows that a step commits and the next one reads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.bench import report as reports
from kdtree_jax.bench.kimi_slice import random_cache
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.rounds import verify_step
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target
from kdtree_jax.ops.compaction import compact
from kdtree_jax.tree import NO_PARENT, Tree

WIDTHS = (1, 2, 8, 17, 33, 64, 128)
BATCHES = (1, 2, 7, 32)


@dataclasses.dataclass(frozen=True)
class Product:
  """What is compared.

  Attributes:
    widths: rows per sequence of a step.
    batches: sequences at once.
    sequences: texts; a batch that does not divide them repeats some.
    tokens: of each text.
    context: random latents before each text. Attention's chunks end in the texts
      where it lies just below a multiple of their length. By default those of both
      kernels do, at 2,048 and 2,112 positions.
    seed: of contexts, first tokens and siblings.
    implementation: of the ops.
  """

  widths: Sequence[int] = WIDTHS
  batches: Sequence[int] = BATCHES
  sequences: int = 32
  tokens: int = 80
  context: int = 2040
  seed: int = 0
  implementation: str = "auto"

  def programs(self) -> list[tuple[int, int]]:
    """(width, batch): each width and each batch once, then the rest."""
    every = [(w, b) for b in sorted(self.batches) for w in sorted(self.widths)]
    one = min(self.batches)
    return sorted(every, key=lambda p: (p[1] != one and p[0] != 8, every.index(p)))


@dataclasses.dataclass(frozen=True)
class Texts:
  """What plain decoding wrote.

  Attributes:
    tokens: i32 [sequences, T + 1], the first token given.
    logits: f32 [sequences, T, V] that the others were chosen from.
    before: [layers, sequences, S, R + P], the contexts alone.
    after: the same with the texts.
  """

  tokens: jax.Array
  logits: jax.Array
  before: jax.Array
  after: jax.Array


def run(
  target: Target,
  product: Product,
  *,
  max_seconds: float | None = None,
  log: reports.Log = reports.silent,
) -> dict[str, Any]:
  """Compares all widths and batches with plain decoding.

  Args:
    target: the model.
    product: what to compare.
    max_seconds: begin nothing new after so long, or None.
    log: gets progress.

  Returns:
    The report; `measurements` has one entry per width and batch.
  """
  began = time.perf_counter()
  texts = plain(target, product)
  finite = bool(jnp.isfinite(texts.logits).all())
  log(f"plain decoding: {texts.logits.shape[0] * product.tokens} tokens")
  measurements, left_out = [], []
  for width, batch in product.programs():
    late = time.perf_counter() - began
    if max_seconds is not None and late > max_seconds:
      left_out.append({"width": width, "batch": batch})
      continue
    try:
      measured = compare(target, product, texts, width, batch)
    except (ValueError, NotImplementedError, RuntimeError) as error:
      message = " ".join(str(error).split())[:300]
      measured = {"failed": f"{type(error).__name__}: {message}"}
    measurements.append({"width": width, "batch": batch, **measured})
    log(f"width {width}, batch {batch}: {_outcome(measurements[-1])}")
  return {
    "suite": "slice_exact",
    "environment": reports.environment(),
    "settings": {
      "layers": target.config.num_hidden_layers,
      "width": target.config.hidden_size,
      "V": target.config.vocab_size,
      "dtype": str(target.dtype),
      "sequences": product.sequences,
      "tokens": product.tokens,
      "context": product.context,
      "ops": product.implementation,
    },
    "finite": finite,
    "distinct_tokens": len(np.unique(np.asarray(texts.tokens))),
    "measurements": measurements,
    "left_out": left_out,
  }


def plain(target: Target, product: Product) -> Texts:
  """Decodes the texts greedily, one row and one slot at a time."""
  config, T = target.config, product.tokens
  static, arrays = modules.split(target)
  keys = jax.random.split(jax.random.key(product.seed), product.sequences + 1)
  first = jax.random.randint(
    keys[-1], (product.sequences,), 0, config.vocab_size, jnp.int32
  )
  room = T + max(product.widths)
  tokens, logits, before, after = [], [], [], []
  step = None
  for s in range(product.sequences):
    cache = random_cache(target, 1, product.context, room, keys[s])
    before.append(cache.data)
    data, lengths, token = jnp.copy(cache.data), cache.lengths, first[s]
    own_tokens, own_logits = [token], []
    for _ in range(T):
      args = (arrays, data, lengths, token)
      step = step or modules.compiled(
        "plain", _plain_step, (static, product.implementation), args, 1, None
      )
      data, lengths, token, row = step(*args)
      own_tokens.append(token)
      own_logits.append(row)
    tokens.append(jnp.stack(own_tokens))
    logits.append(jnp.stack(own_logits))
    after.append(data)
  return Texts(
    tokens=jnp.stack(tokens),
    logits=jnp.stack(logits),
    before=jnp.concatenate(before, axis=1),
    after=jnp.concatenate(after, axis=1),
  )


def _plain_step(static, implementation, arrays, data, lengths, token):
  target = modules.merge(static, arrays)
  tree = Tree.root_only(token[None], 1)
  cache = LatentCache(data, lengths)
  logits, _, keys = verify_step(target, cache, tree, (), implementation)
  path, one = jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32)
  data = compact(data, keys, path, one, lengths, implementation=implementation)
  row = logits[0, 0]
  return data, lengths + 1, jnp.argmax(row).astype(jnp.int32), row


@dataclasses.dataclass(frozen=True)
class Shape:
  """A tree of `width` slots: the text's, and siblings of theirs.

  Attributes:
    parents, depths: of each slot.
    text: slots of the text, the root first.
    width: slots.
  """

  parents: tuple[int, ...]
  depths: tuple[int, ...]
  text: tuple[int, ...]

  @property
  def width(self) -> int:
    return len(self.parents)

  @classmethod
  def create(cls, width: int) -> Shape:
    """Slots of the text and siblings in turn, so that both lie anywhere."""
    parents, depths, text = [NO_PARENT], [0], [0]
    for slot in range(1, width):
      of_text = slot % 2 == 0
      # A sibling of the next slot of the text; the last one has no such.
      parents.append(text[-1])
      depths.append(depths[text[-1]] + 1)
      if of_text:
        text.append(slot)
    return cls(tuple(parents), tuple(depths), tuple(text))


def compare(
  target: Target, product: Product, texts: Texts, width: int, batch: int
) -> dict[str, Any]:
  """Decodes all texts again at one width and batch.

  Returns:
    `tokens` compared, `rows` of logits that differ, the `first` of them as (sequence,
    token), the largest difference, and `layers` whose committed rows differ.
  """
  T, S = product.tokens, product.sequences
  static, arrays = modules.split(target)
  shape = Shape.create(width)
  rng = np.random.default_rng((product.seed, width, batch))
  wrong = np.zeros((S, T), bool)
  bad_layers: set[int] = set()
  largest = 0.0
  fixed = (static, product.implementation, shape)
  step, layers = None, jax.jit(_differing_layers, static_argnums=(2, 3))
  for begin in range(0, S, batch):
    chosen = np.arange(begin, begin + batch) % S
    data = texts.before[:, chosen]
    tokens, logits = texts.tokens[chosen], texts.logits[chosen]
    found = []
    for at in range(0, T, len(shape.text)):
      siblings = rng.integers(0, target.config.vocab_size, (batch, width), np.int32)
      place = jnp.asarray([product.context, at], jnp.int32)
      args = (arrays, data, tokens, logits, place, jnp.asarray(siblings))
      step = step or modules.compiled(
        f"width {width}, batch {batch}", _text_step, fixed, args, 1, None
      )
      data, differs, difference = step(*args)
      found.append((at, differs, difference))
    for at, differs, difference in found:
      here = np.asarray(differs)[:, : T - at]
      wrong[chosen, at : at + here.shape[1]] |= here
      largest = max(largest, float(difference))
    different = layers(data, texts.after[:, chosen], product.context, T)
    bad_layers |= set(np.flatnonzero(np.asarray(different)).tolist())
  where = np.argwhere(wrong)
  return {
    "tokens": S * T,
    "rows": int(wrong.sum()),
    "first": where[0].tolist() if len(where) else None,
    "largest_difference": largest,
    "layers": sorted(bad_layers),
  }


def _text_step(static, implementation, shape, arrays, data, tokens, logits, place, ids):
  """One step of `compare`: verifies, compares, commits the slots of the text."""
  target = modules.merge(static, arrays)
  B, T = logits.shape[:2]
  context, at = place
  slots = jnp.asarray(shape.text, jnp.int32)
  count = len(shape.text)
  ahead = at + jnp.arange(count)
  ids = ids.at[:, slots].set(tokens[:, jnp.minimum(ahead, T)])
  rows = (B, shape.width)
  tree = Tree(
    token_ids=ids,
    parents=jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), rows),
    depths=jnp.broadcast_to(jnp.asarray(shape.depths, jnp.int32), rows),
    log_probs=jnp.zeros(rows, jnp.float32),
    size=jnp.full((B,), shape.width, jnp.int32),
  )
  lengths = jnp.full((B,), context + at, jnp.int32)
  cache = LatentCache(data, lengths)
  found, _, keys = verify_step(target, cache, tree, (), implementation)
  found = found[:, slots]
  wanted = logits[:, jnp.minimum(ahead, T - 1)]
  live = (ahead < T)[None]
  differs = live & jnp.any(_bits(found) != _bits(wanted), axis=-1)
  apart = jnp.where(found == wanted, 0.0, jnp.abs(found - wanted))
  difference = jnp.max(jnp.where(live[..., None], apart, 0.0))
  path = jnp.broadcast_to(slots, (B, count))
  # Within the text, so that the rows behind it stay as they were.
  written = jnp.broadcast_to(jnp.minimum(count, T - at), (B,)).astype(jnp.int32)
  data = compact(data, keys, path, written, lengths, implementation=implementation)
  return data, differs, difference


def _differing_layers(a: jax.Array, b: jax.Array, begin: int, count: int) -> jax.Array:
  """bool [layers]: where positions begin .. begin + count - 1 differ in a bit."""
  a, b = (x[:, :, begin : begin + count] for x in (a, b))
  return jnp.any(_bits(a) != _bits(b), axis=(1, 2, 3))


def _bits(x: jax.Array) -> jax.Array:
  wide = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
  return jax.lax.bitcast_convert_type(x, wide)


def differs(measured: dict[str, Any]) -> bool:
  """Did a width and batch give other bits, or fail?"""
  return "failed" in measured or bool(measured["rows"] or measured["layers"])


def failed(report: dict[str, Any]) -> bool:
  """Is anything other than equal? What was left out counts as not seen."""
  return not report["finite"] or any(map(differs, report["measurements"]))


def _outcome(m: dict[str, Any]) -> str:
  """A width and batch in a few words."""
  if "failed" in m:
    return m["failed"]
  if not differs(m):
    return "same bits"
  layer = m["layers"][0] if m["layers"] else None
  if layer is None:
    where = "all cache rows are equal: only the last layer, norm or head can differ"
  else:
    # A layer's rows are made of what the layers before it computed.
    where = f"first seen in the cache rows of layer {layer}"
  return (
    f"{m['rows']} of {m['tokens']} rows of logits DIFFER by up to "
    f"{m['largest_difference']:.2e}; {where}"
  )


COLUMNS = ("rows", "slots", "tokens", "logits that differ", "largest", "first layer")


def _row(m: dict[str, Any]) -> list[Any]:
  if "failed" in m:
    return [m["width"], m["batch"], None, "FAILED", None, None]
  largest = f"{m['largest_difference']:.1e}"
  first = m["layers"][0] if m["layers"] else None
  return [m["width"], m["batch"], m["tokens"], m["rows"], largest, first]


def render(report: dict[str, Any]) -> str:
  """The report as text."""
  rows = [_row(m) for m in report["measurements"]]
  return "\n\n".join(
    [reports.heading(report), reports.table(COLUMNS, rows), verdict(report)]
  )


def verdict(report: dict[str, Any]) -> str:
  """What was found, in a few sentences."""
  measured = report["measurements"]
  bad = [m for m in measured if differs(m)]
  compared = sum(m.get("tokens", 0) for m in measured)
  lines = []
  if measured and not bad:
    lines.append(
      f"All {compared} rows of logits, over {len(measured)} widths and batches, have "
      "the bits of plain decoding at one row and one slot."
    )
  lines += [f"{m['width']} rows, {m['batch']} slots: {_outcome(m)}." for m in bad]
  if not report["finite"]:
    lines.append("Plain decoding's logits are NOT FINITE.")
  lines += [
    f"{m['width']} rows, {m['batch']} slots: left out, no time."
    for m in report["left_out"]
  ]
  lines.append(f"The texts have {report['distinct_tokens']} distinct tokens.")
  return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
  """The report as a Markdown table, with where it was made."""
  settings = ", ".join(f"{k} {v}" for k, v in report["settings"].items())
  rows = [_row(m) for m in report["measurements"]]
  return "\n".join(
    [
      *reports.markdown_origin(report),
      f"- settings: {settings}",
      "",
      *reports.markdown_table(COLUMNS, rows),
      "",
      verdict(report),
    ]
  )
