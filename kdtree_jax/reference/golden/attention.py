"""Golden cases of `tree_attention`, with the error that each element may have."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.reference.attention import tree_attention
from kdtree_jax.reference.golden.case import GoldenCase, rounded_up
from kdtree_jax.reference.golden.random_trees import random_tree
from kdtree_jax.reference.tree import ancestors

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
CHUNK = 128

# Unit roundoff of float32, and of bfloat16.
U32 = 2.0**-24
UBF16 = 2.0**-9


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Ragged lengths, trees of several shapes, and scores from flat to one-sided.

  Args:
    rng: source of randomness.
    small: fewer and smaller cases.
  """
  demo, kimi = (64, 16), (512, 64)
  # Empty, begun, full and begun again; a full cache.
  ragged = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)
  # name, lengths, N, H, (R, W - R), and what else differs.
  shapes: list[tuple[str, tuple[int, ...], int, int, tuple[int, int], dict]] = [
    ("demo", (0, 130), 5, 2, demo, {}),
    ("512 + 64", (30, 0), 2, 1, kimi, {}),
    ("one node", (0, 77), 1, 1, demo, {}),
    ("odd widths", (40,), 4, 3, (11, 6), {}),
    ("steep scores", (100, 3), 4, 2, demo, {"steepness": 40.0}),
    ("equal scores", (100,), 4, 2, demo, {"steepness": 0.0}),
  ]
  if not small:
    shapes += [
      ("ragged lengths", ragged, 5, 2, demo, {}),
      ("8 heads", (129,), 16, 8, demo, {}),
      ("128 nodes", (100,), 128, 1, demo, {}),
      ("chain", (250,), 33, 2, demo, {"reach": 1}),
      ("chunk 64", ragged, 3, 2, demo, {"chunk": 64}),
      ("512 + 64, ragged", (1, 128), 3, 2, kimi, {}),
    ]
  made = []
  for dtype in (BF16, F32):
    for name, lengths, nodes, heads, wide, rest in shapes:
      name = f"{dtype.name}, {name}"
      made.append(_case(name, rng, dtype, lengths, nodes, heads, wide, **rest))
  if not small:
    made.append(_case("bfloat16, 64 heads", rng, BF16, (200,), 1, 64, kimi))
    made.append(_case("bfloat16, 4 heads", rng, BF16, (129,), 9, 4, kimi))
  return made


def _case(
  name: str,
  rng: np.random.Generator,
  dtype: np.dtype,
  lengths: Sequence[int],
  nodes: int,
  heads: int,
  wide: tuple[int, int],
  *,
  steepness: float = 1.0,
  reach: int | None = None,
  chunk: int = CHUNK,
) -> GoldenCase:
  batch, value_dim, width = len(lengths), wide[0], sum(wide)
  capacity = -(-max(lengths) // chunk) * chunk
  scale = 1.3 * width**-0.5
  q = _values(rng, (batch, nodes, heads, width), dtype, steepness)
  cache = _values(rng, (batch, capacity, width), dtype)
  for b, length in enumerate(lengths):
    cache[b, length:] = np.nan  # Not read: 0 times NaN would show.
  tree_keys = _values(rng, (batch, nodes, width), dtype)
  trees = [
    random_tree(rng, nodes, int(rng.integers((nodes + 1) // 2, nodes + 1)), r, 50)
    for r in [reach or nodes] * batch
  ]
  deepest = max(int(tree.depths.max()) for tree in trees)
  table = np.stack([ancestors(tree, deepest) for tree in trees])
  depths = np.stack([tree.depths for tree in trees])
  exact = np.empty((batch, nodes, heads, value_dim))
  bound = np.empty_like(exact)
  for b in range(batch):
    arguments = (q[b], cache[b], tree_keys[b], table[b], depths[b], lengths[b])
    exact[b], bound[b] = exact_and_bound(*arguments, scale, value_dim)
  golden = exact.astype(np.float32)
  return GoldenCase(
    op="tree_attention",
    name=name,
    attributes={"value_dim": value_dim, "chunk": chunk, "scale": scale},
    inputs={
      "q": q,
      "cache": cache,
      "tree_keys": tree_keys,
      "ancestors": table,
      "depths": depths,
      "lengths": np.array(lengths, np.int32),
    },
    outputs={"out": golden},
    compare={"out": "bound"},
    bounds={"out": rounded_up(bound + np.abs(golden - exact))},
  )


def exact_and_bound(
  q: np.ndarray,
  cache: np.ndarray,
  tree_keys: np.ndarray,
  table: np.ndarray,
  depths: np.ndarray,
  length: int,
  scale: float,
  value_dim: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Attention in float64, and how far from it a kernel may be.

  The inputs are exact, so what counts is the kernel's own rounding. To first order,
  with u = 2^-24, n keys, s_i the logits, p_i the weights that add up to 1, and
  A = sum p_i |v_i|:

  - A sum of n terms is off by g(n) u times the sum of their magnitudes. In bf16, g(n)
    = n: that covers sums rounded one by one, and tensor cores, which add 16 products
    to the sum at a time, align them to the largest and cut them off (Fasi et al. 2021,
    PeerJ CS 7:e330): 17 terms by 2^-25 and the result by 2^-23 of it, 0.7 u a term.
    In fp32 sums are rounded to nearest; then g(n) = 7 sqrt(n), but for a chance of
    2 exp(-7^2 / 2) in each (Higham & Mary 2019, SIAM J. Sci. Comput. 41(5)).
  - A logit is thus off by e_i = g(W) u scale sum |q k_i| + 4 u |s_i|: its product, the
    two factors of scale and log2(e), their product, the difference from the maximum.
  - Each exponential adds 4 u. A step or a chunk that raises the maximum, and the merge
    of chunks, multiply what was summed by the exponential of a difference of maxima.
    Those are the kernel's own, so that only the difference's rounding counts: 4 u +
    2 u max |s_i| each, of which 8 in a row are allowed for.
  - Numerator and denominator are sums of n + 16 terms, those of merged chunks
    included, and the quotient rounds once.
  - In bf16 the weights are rounded to bf16 before they meet the values: 2^-9 A; the
    denominator may be of the rounded or of the unrounded ones: 2^-9 |out|; and the
    output is rounded: 2^-9 |out|.

  Second-order terms are covered by 5 %. Weights below the smallest normal number are
  lost, which is less than 1e-30 of the largest value.

  Args:
    q: [N, H, W] bf16 or f32.
    cache: [S, W].
    tree_keys: [N, W].
    table: i32[N, A], `ancestors` of the tree.
    depths: i32[N].
    length: committed keys.
    scale: of the logits.
    value_dim: R.

  Returns:
    exact and bound, f64[N, H, R].
  """
  bf16 = q.dtype == BF16
  wide_q, wide_cache, wide_keys = (x.astype(np.float64) for x in (q, cache, tree_keys))
  scale = float(np.float32(scale))  # as the kernel gets it
  exact = tree_attention(
    wide_q, wide_cache, wide_keys, table, depths, length, scale, value_dim
  )

  def growth(terms: int) -> float:
    return terms * U32 if bf16 else 7 * np.sqrt(terms) * U32

  bound = np.empty_like(exact)
  for node, depth in enumerate(depths):
    keys = np.concatenate([wide_cache[:length], wide_keys[table[node, : depth + 1]]])
    values = np.abs(keys[:, :value_dim])
    logits = scale * wide_q[node] @ keys.T  # [H, n]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    off = growth(q.shape[-1]) * scale * np.abs(wide_q[node]) @ np.abs(keys).T
    off += 4 * U32 * np.abs(logits)
    rescaling = 8 * (4 * U32 + 2 * U32 * np.abs(logits).max(axis=-1, keepdims=True))
    common = growth(len(keys) + 16) + rescaling + U32
    term = off + 4 * U32 + common
    magnitude = np.abs(exact[node])
    numerator = (weights * (term + (UBF16 if bf16 else 0))) @ values
    denominator = np.sum(weights * term, axis=-1, keepdims=True) * magnitude
    rounding = (2 * UBF16 if bf16 else U32) * magnitude
    bound[node] = 1.05 * (numerator + denominator + rounding) + 1e-30
  return exact, bound


def _values(
  rng: np.random.Generator,
  shape: tuple[int, ...],
  dtype: DTypeLike,
  factor: float = 1.0,
) -> np.ndarray:
  return (factor * rng.standard_normal(shape)).astype(dtype)
