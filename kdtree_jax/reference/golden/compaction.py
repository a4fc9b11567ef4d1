"""Golden cases of `compact`."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.reference.golden.case import GoldenCase, bits
from kdtree_jax.reference.tree import compact

BF16 = ml_dtypes.bfloat16


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Caches of several layers, compared as a whole.

  Args:
    rng: source of randomness.
    small: fewer and smaller caches.
  """
  # Rows whose bytes are a multiple of 16, 8, 4 and 2 only.
  widths: list[tuple[DTypeLike, int]] = [
    (np.float32, 80),
    (np.float32, 6),
    (np.float32, 5),
    (BF16, 80),
    (BF16, 3),
    (BF16, 1),
  ]
  made = [
    _random(f"{np.dtype(dtype).name}, width {width}", rng, dtype, width)
    for dtype, width in widths
  ]
  # Lengths of 0, of all, beyond the path; starts at the end, across it, beyond it.
  made.append(
    _case("the cache ends", rng, BF16, 16, [5, 5, 5, 2, 3], [20, 22, 23, 24, 400])
  )
  made.append(_case("nothing accepted", rng, BF16, 16, [0, 0, 0], [0, 5, 30]))
  made.append(
    _case("lengths out of range", rng, BF16, 16, [-3, 6, 2**31 - 1], [0, 3, 9])
  )
  made.append(
    _case("starts before the cache", rng, BF16, 16, [5, 5, 5], [-2, -5, -(2**31)])
  )
  made.append(_case("path out of range", rng, np.float32, 4, [5, 5], [3, 4], wild=True))
  if not small:
    made += [
      _random(f"random {i}", rng, BF16, int(rng.integers(1, 100))) for i in range(20)
    ]
    made.append(_random("cache of 576", rng, BF16, 576, capacity=32, batch=2))
  return made


def _random(
  name: str,
  rng: np.random.Generator,
  dtype: DTypeLike,
  width: int,
  capacity: int = 24,
  batch: int = 4,
) -> GoldenCase:
  lengths = rng.integers(0, 6, size=batch)
  starts = rng.integers(0, capacity, size=batch)
  return _case(name, rng, dtype, width, lengths.tolist(), starts.tolist(), capacity)


def _case(
  name: str,
  rng: np.random.Generator,
  dtype: DTypeLike,
  width: int,
  lengths: Sequence[int],
  starts: Sequence[int],
  capacity: int = 24,
  wild: bool = False,
) -> GoldenCase:
  """A cache of 3 layers, trees of 9 slots, paths of 5.

  What the reference leaves open is fixed as the kernel's header says: lengths are
  cut to the path, slots to the tree, and positions before the cache are dropped.
  """
  layers, batch, nodes, longest = 3, len(lengths), 9, 5
  cache = _values(rng, (layers, batch, capacity, width), dtype)
  keys = _values(rng, (layers, batch, nodes, width), dtype)
  path = np.full((batch, longest), -1, np.int32)
  for b, length in enumerate(lengths):
    count = min(max(length, 0), longest)
    path[b, :count] = np.sort(rng.permutation(nodes)[:count])
  if wild:
    path[:] = rng.choice([-(2**31), -1, 0, nodes - 1, nodes, 2**31 - 1], path.shape)
  updated = cache.copy()
  for b, (length, start) in enumerate(zip(lengths, starts, strict=True)):
    # Rows in front of the cache take what is written before it.
    before = min(max(-start, 0), longest)
    slots = np.clip(path[b], 0, nodes - 1)
    for layer in range(layers):
      longer = np.concatenate([cache[layer, b, :before], cache[layer, b]])
      found = compact(
        longer,
        keys[layer, b],
        slots,
        min(max(length, 0), longest),
        max(start, -longest) + before,
      )
      updated[layer, b] = found[before:]
  outputs = {"cache": updated}
  return GoldenCase(
    op="compact",
    name=name,
    attributes={},
    inputs={
      "cache": cache,
      "tree_keys": keys,
      "path": path,
      "length": np.array(lengths, np.int32),
      "start": np.array(starts, np.int32),
    },
    outputs=outputs,
    compare=bits(outputs),
  )


def _values(
  rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
  """Any bits, those of NaN among them: rows are copied as bytes."""
  size = np.dtype(dtype).itemsize
  raw = rng.integers(256, size=(*shape[:-1], shape[-1] * size), dtype=np.uint8)
  return raw.view(dtype)
