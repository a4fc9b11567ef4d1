"""Cases for tree attention's custom call, and how exact its results must be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.ops import _tree_attention_cuda
from tests.ops.custom_calls import cuda_text, need_library
from tests.tree.random_trees import random_tree

S = 384
B = 4
CHUNK = 128
U = 2.0**-24

attend = jax.jit(
  functools.partial(ops.tree_attention, implementation="cuda"),
  static_argnames=("scale", "value_dim", "chunk", "layer", "kernel"),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """Arguments of one call, as numpy arrays with a leading batch axis."""

  q: np.ndarray  # [B, N, H, W]
  cache: np.ndarray  # [B, S, W]
  tree_keys: np.ndarray  # [B, N, W]
  ancestors: np.ndarray  # [B, N, A]
  depths: np.ndarray  # [B, N]
  lengths: np.ndarray  # [B]
  value_dim: int
  scale: float
  chunk: int = CHUNK
  kernel: str = "portable"

  def arrays(self, **changes: np.ndarray) -> dict[str, np.ndarray]:
    names = [f.name for f in dataclasses.fields(self)][:6]
    return {name: getattr(self, name) for name in names} | changes

  def run(self, **changes: np.ndarray) -> np.ndarray:
    return np.asarray(attend(**self.arrays(**changes), **self.settings()))

  def settings(self) -> dict[str, Any]:
    return {
      "value_dim": self.value_dim,
      "scale": self.scale,
      "chunk": self.chunk,
      "kernel": self.kernel,
    }


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
  return x.astype(jnp.dtype("bfloat16" if dtype == "hopper" else dtype))


def kernel_for(dtype: str, width: int, value_dim: int) -> str:
  """Of a test's dtype: "hopper" is bfloat16 in the kernel for Hopper."""
  if dtype != "hopper":
    return "portable"
  if (width, value_dim) != (576, 512):
    pytest.skip("no shape of the kernel for Hopper")
  if not _tree_attention_cuda.runs_hopper(jax.devices()[0]):
    pytest.skip("no Hopper GPU, or no code for it")
  return "hopper"


def tree_arrays(trees: list[reference.Tree]) -> dict[str, np.ndarray]:
  N = len(trees[0].depths)
  return {
    "ancestors": np.stack([reference.ancestors(t, N - 1) for t in trees]),
    "depths": np.stack([t.depths for t in trees]),
  }


@functools.cache
def make_case(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Case:
  """Random trees, the second a chain; nothing committed up to a cache just full."""
  H, N, W, R = shape
  kernel = kernel_for(dtype, W, R)
  rng = np.random.default_rng([seed, *shape])
  trees = [random_tree(rng, N, 50) for _ in range(B)]
  chain = np.arange(N, dtype=np.int32)
  trees[1] = dataclasses.replace(trees[1], parents=chain - 1, depths=chain, size=N)
  tree = tree_arrays(trees)
  lengths = np.array([0, 127, 250, S - tree["depths"][3].max()], np.int32)
  cache = rng.normal(size=(B, S, W))
  cache[np.arange(S) >= lengths[:, None]] = np.nan
  return Case(
    q=as_dtype(rng.normal(size=(B, N, H, W)), dtype),
    cache=as_dtype(cache, dtype),
    tree_keys=as_dtype(rng.normal(size=(B, N, W)), dtype),
    lengths=lengths,
    value_dim=R,
    scale=1.3 * W**-0.5,
    kernel=kernel,
    **tree,
  )


def path_keys(case: Case, b: int, n: int) -> np.ndarray:
  """The tree's part of a node's keys, in float64: the root first, itself last."""
  path = case.ancestors[b, n, : case.depths[b, n] + 1]
  return case.tree_keys[b, path].astype(np.float64)


def exact_and_bound(case: Case, b: int) -> tuple[np.ndarray, np.ndarray]:
  """Attention in float64, and how far off the op may be, both [N, H, R].

  With u = 2^-24, a sum of n terms rounded one by one is off by sqrt(n) lambda u
  times the sum of its terms' magnitudes, but for a chance of 2 exp(-lambda^2 / 2)
  (Higham & Mary 2019, SIAM J. Sci. Comput. 41(5)): lambda = 7 here. To first order,
  with s the logits and A = sum(p |v|) / sum(p):

  - a logit is off by sqrt(W) lambda u scale sum |q k|. Its scale was rounded twice,
    the product once; the maximum is subtracted twice, in the chunk and at the merge,
    and once per rescaling, where the differences add up to a range of 2 |s| at most:
    8 u |s| in all, with another 2 u |s| for the merge;
  - exp2 is off by 4 u: once for a weight, once at the merge, and once, with a
    product, for each step of at least 16 positions in which the maximum rose;
  - the sums over the keys of a chunk and over the chunks are off by lambda u times
    the roots of their lengths, the division by u.

  Numerator and denominator each carry the sum of these, relative to A. In bf16,
  inputs are exact, the weights may be rounded to bf16 before the values (2^-8 A at
  most), and the output once more.
  """
  scale, R, many = case.scale, case.value_dim, 7
  q = case.q[b].astype(np.float64)
  N, H, W = q.shape
  length = int(case.lengths[b])
  rows = q.reshape(N * H, W) * scale
  # In blocks: a long cache in float64 would not fit.
  starts = range(0, length, 8192)
  blocks = [(i, min(i + 8192, length)) for i in starts]
  logits, magnitude = np.empty((N * H, length)), np.zeros(N * H)
  for i, j in blocks:
    keys = case.cache[b, i:j].astype(np.float64)
    logits[:, i:j] = rows @ keys.T
    magnitude = np.maximum(magnitude, (np.abs(rows) @ np.abs(keys).T).max(1))
  logits, magnitude = logits.reshape(N, H, -1), magnitude.reshape(N, H)
  top = np.abs(logits).max(-1, initial=0)  # [N, H]
  last = []
  for n in range(N):
    keys = path_keys(case, b, n)
    last.append(scale * q[n] @ keys.T)
    top[n] = np.maximum(top[n], np.abs(last[n]).max(-1))
    own = scale * (np.abs(q[n]) @ np.abs(keys).T).max(-1)
    magnitude[n] = np.maximum(magnitude[n], own)
  highest = np.maximum(
    logits.max(-1, initial=-np.inf), np.stack([x.max(-1) for x in last])
  )
  p = np.exp(logits - highest[..., None]).reshape(N * H, -1)
  total = p.sum(-1).reshape(N, H)
  exact, mean = np.zeros((2, N * H, R))
  for i, j in blocks:
    values = case.cache[b, i:j, :R].astype(np.float64)
    exact += p[:, i:j] @ values
    mean += p[:, i:j] @ np.abs(values)
  exact, mean = exact.reshape(N, H, R), mean.reshape(N, H, R)
  for n in range(N):
    own = np.exp(last[n] - highest[n, :, None])
    values = path_keys(case, b, n)[:, :R]
    total[n] += own.sum(-1)
    exact[n] += own @ values
    mean[n] += own @ np.abs(values)
  exact, mean = exact / total[..., None], mean / total[..., None]
  chunks = -(-(length + N) // case.chunk)
  relative = many * W**0.5 * magnitude + 10 * top + 5 * case.chunk / 16 + 12
  relative = relative + many * (case.chunk**0.5 + chunks**0.5)
  bound = (2 * relative[..., None] + 1) * U * mean
  if case.q.dtype == jnp.bfloat16:
    bound += 2.0**-8 * (mean + np.abs(exact))
  return exact, bound


def assert_within_bound(case: Case, got: np.ndarray) -> None:
  assert got.dtype == case.q.dtype
  assert got.shape == (*case.q.shape[:3], case.value_dim)
  for b in range(len(got)):
    exact, bound = exact_and_bound(case, b)
    error = np.abs(got[b].astype(np.float64) - exact)
    assert np.all(error <= bound), f"sequence {b}: {(error / bound).max()} of the bound"


def committed(case: Case, b: int, node: int, count: int) -> dict[str, Any]:
  """Sequence b after the first `count` slots of the node's path were committed.

  The slots below them keep their places; the others become roots of their own.
  """
  path, length = case.ancestors[b, node, :count], case.lengths[b]
  cache = case.cache[b].copy()
  cache[length : length + count] = case.tree_keys[b, path]
  ancestors, depths = case.ancestors[b], case.depths[b]
  below = (depths >= count) & np.all(ancestors[:, :count] == path, axis=1)
  shifted = np.full_like(ancestors, -1)
  shifted[:, : ancestors.shape[1] - count] = ancestors[:, count:]
  alone = np.full_like(ancestors, -1)
  alone[:, 0] = np.arange(len(ancestors))
  return {
    "cache": cache,
    "ancestors": np.where(below[:, None], shifted, alone),
    "depths": np.where(below, depths - count, 0).astype(np.int32),
    "lengths": np.int32(length + count),
    "below": below,
  }


def launched(case: Case, **how: int) -> np.ndarray:
  """[B, N, H, R] of the case with settings of the launcher that change no bit."""
  need_library()  # And so its handlers are registered.
  run = functools.partial(
    _tree_attention_cuda.attend,
    **case.settings(),
    chunk_on_hopper=case.chunk,
    layer=0,
    **how,
  )
  return np.asarray(jax.jit(run)(**case.arrays(cache=case.cache[None])))


def small(N: int = 5, W: int = 80, dtype: str = "float32", positions: int = 256):
  """Zeros to lower a program with: two sequences, 8 heads, three layers."""
  return {
    "q": jnp.zeros((2, N, 8, W), dtype),
    "cache": jnp.zeros((3, 2, positions, W), dtype),
    "tree_keys": jnp.zeros((2, N, W), dtype),
    "ancestors": jnp.zeros((2, N, 6), jnp.int32),
    "depths": jnp.zeros((2, N), jnp.int32),
    "lengths": jnp.zeros(2, jnp.int32),
  }


def lowered(arrays: dict[str, jax.Array], **settings: Any) -> str:
  """StableHLO of the op for CUDA."""
  settings = {"scale": 0.25, "value_dim": 16, "layer": 2} | settings
  return cuda_text(lambda x: ops.tree_attention(**x, **settings), arrays)
