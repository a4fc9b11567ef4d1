from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import ops, reference
from tests.tree.random_trees import random_tree

CHUNK = 128
S = 3 * CHUNK
# Nothing committed, chunks begun, full and begun again, and a full cache but one row.
LENGTHS = np.array([0, 1, 127, 128, 129, S - 1], np.int32)
B = len(LENGTHS)
# H, N, W, R. Heads and rows of one are products of another shape for a compiler.
SHAPES = [
  (1, 1, 80, 64),
  (8, 1, 80, 64),
  (1, 5, 80, 64),
  (8, 16, 80, 64),
  (8, 2, 576, 512),
]
MANY = [(1, 5, 80, 64), (8, 16, 80, 64)]
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

attend = jax.jit(ops.tree_attention, static_argnames=("scale", "value_dim"))


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

  def run(self, **changes) -> np.ndarray:
    arrays = dataclasses.asdict(self) | changes
    value_dim = arrays.pop("value_dim")
    return np.asarray(attend(**arrays, scale=self.scale, value_dim=value_dim))

  @property
  def scale(self) -> float:
    return 1.3 * self.q.shape[-1] ** -0.5


@functools.cache
def make_case(
  shape: tuple[int, ...], dtype: str, seed: int = 0, same: bool = False
) -> Case:
  """Random trees, keys and queries; with `same`, one sequence B times."""
  H, N, W, R = shape
  rng = np.random.default_rng([seed, *shape])
  trees = [random_tree(rng, N, 50) for _ in range(B)]
  # The longest of the paths that 16 rows can hold, too.
  chain = np.arange(N, dtype=np.int32)
  trees[-2] = dataclasses.replace(trees[-2], parents=chain - 1, depths=chain, size=N)
  arrays = {
    "q": rng.normal(size=(B, N, H, W)),
    "cache": rng.normal(size=(B, S, W)),
    "tree_keys": rng.normal(size=(B, N, W)),
  }
  case = {name: np.asarray(jnp.asarray(x, dtype)) for name, x in arrays.items()}
  case["ancestors"] = np.stack([reference.ancestors(t, N - 1) for t in trees])
  case["depths"] = np.stack([t.depths for t in trees])
  if same:
    case = {name: np.repeat(x[-2:-1], B, axis=0) for name, x in case.items()}
  return Case(**case, lengths=LENGTHS, value_dim=R)


def on_path(case: Case, b: int) -> np.ndarray:
  """bool [N, N]: row n has the ancestors-or-self of node n."""
  slots = np.arange(case.depths.shape[1])
  return np.any(case.ancestors[b][..., None] == slots, axis=1)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
  np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def exact_and_bound(case: Case, b: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
  """Attention in float64, and how far off the op may be, both [N, H, R].

  With u = 2^-24, a sum of n terms rounded one by one is off by sqrt(n) lambda u
  times the sum of its terms' magnitudes, but for a chance of 2 exp(-lambda^2 / 2)
  (Higham & Mary 2019, SIAM J. Sci. Comput. 41(5)): lambda = 7 here. To first order,
  with s the logits and A = sum(p |v|) / sum(p):

  - a logit is off by sqrt(W) lambda u scale sum |q k|, then by 3 u |s| for the
    scale, its own rounding and the subtraction of the maximum;
  - exp adds 4 u, a few ulp; each new chunk rescales sums by one more such exp of a
    difference of logits;
  - the two sums over n keys are off by sqrt(n) lambda u each, the division by u.

  Numerator and denominator each carry the sum of these, relative to A. In bf16,
  inputs are exact, the weights are rounded to bf16 before the values (2^-8 A at
  most), and the output once more.
  """
  arrays = (case.q[b], case.cache[b], case.tree_keys[b])
  q, cache, tree_keys = (x.astype(np.float64) for x in arrays)
  ancestors, depths, length = case.ancestors[b], case.depths[b], case.lengths[b]
  scale, value_dim = case.scale, case.value_dim
  exact = reference.tree_attention(
    q, cache, tree_keys, ancestors, depths, length, scale, value_dim
  )
  u, many = 2.0**-24, 7
  W = q.shape[-1]
  bound = np.empty_like(exact)
  for n, depth in enumerate(depths):
    keys = np.concatenate([cache[:length], tree_keys[ancestors[n, : depth + 1]]])
    s = scale * q[n] @ keys.T  # [H, keys]
    magnitude = scale * (np.abs(q[n]) @ np.abs(keys).T).max(-1, keepdims=True)
    top = np.abs(s).max(-1, keepdims=True)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    mean = p @ np.abs(keys[:, :value_dim])  # A
    chunks = -(-len(keys) // CHUNK)
    relative = many * W**0.5 * magnitude + 3 * top + 4
    relative = relative + chunks * (2 * top + 6) + many * len(keys) ** 0.5
    bound[n] = (2 * relative + 1) * u * mean
    if dtype == "bfloat16":
      bound[n] += 2.0**-8 * (mean + np.abs(exact[n]))
  return exact, bound


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_softmax_attention(shape, dtype):
  case = make_case(shape, dtype)
  got = case.run()
  assert got.dtype == jnp.dtype(dtype)
  assert got.shape == (B, *shape[1::-1], shape[3])
  for b in range(B):
    exact, bound = exact_and_bound(case, b, dtype)
    error = np.abs(got[b].astype(np.float64) - exact)
    assert np.all(error <= bound), f"sequence {b}: {(error / bound).max()} of the bound"


@DTYPES
def test_the_bound_would_see_one_key_lost(dtype):
  case = make_case((8, 16, 80, 64), dtype)
  got = case.run(lengths=np.maximum(LENGTHS - 1, 0))
  for b in range(1, B):
    exact, bound = exact_and_bound(case, b, dtype)
    error = np.abs(got[b].astype(np.float64) - exact)
    seen = np.any(error > 2 * bound, axis=(1, 2))
    assert np.all(seen) if dtype == "float32" else np.any(seen)


def test_first_token_of_a_text_returns_its_own_values():
  """One key has weight 1 whatever the query, so the bits are those of the key."""
  case = make_case((8, 16, 80, 64), "float32")
  roots = case.depths[0] == 0
  assert case.lengths[0] == 0 and roots.any()
  values = np.broadcast_to(case.tree_keys[0, roots, None, :64], (roots.sum(), 8, 64))
  assert_same_bits(case.run()[0, roots], values)


def commit(case: Case, b: int, path: np.ndarray) -> dict[str, np.ndarray]:
  """Sequence b with the slots of `path` moved from the tree to the cache.

  Slots that do not descend from the path's end become roots of their own: what
  becomes of them does not matter.
  """
  count, length = len(path), case.lengths[b]
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
    "depths": np.where(below, depths - count, 0),
    "lengths": np.int32(length + count),
    "below": below,
  }


@DTYPES
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_committed_ancestors_and_tree_ancestors_give_the_same_bits(shape, dtype):
  """Wherever the path crosses a chunk, and whatever part of it is committed."""
  chain = make_case(shape, dtype, same=True)  # one path through all N slots
  N = shape[1]
  compared = 0
  for length in (0, 3, 120, 126, 127, 128, 250, 255):
    case = dataclasses.replace(chain, lengths=np.full(B, length, np.int32))
    before = case.run()
    for first in range(1, N, B):
      # As many commits as there are sequences, each of another length.
      counts = [min(first + b, N - 1) for b in range(B)]
      parts = [commit(case, b, np.arange(counts[b])) for b in range(B)]
      below = np.stack([part.pop("below") for part in parts])
      after = case.run(**{k: np.stack([p[k] for p in parts]) for k in parts[0]})
      assert below.sum() == sum(N - count for count in counts)
      assert_same_bits(after[below], before[below])
      compared += below.sum()
  assert compared >= 8 * (N - 1)


@DTYPES
def test_commits_of_a_branching_tree_give_the_same_bits(dtype):
  compared = 0
  for seed in range(4):
    case = make_case((8, 16, 80, 64), dtype, seed)
    # Around a chunk's end, with a whole chunk before it.
    case = dataclasses.replace(case, lengths=np.arange(250, 250 + B, dtype=np.int32))
    before = case.run()
    rng = np.random.default_rng(seed)
    parts = []
    for b in range(B):
      node = rng.choice(np.flatnonzero(case.depths[b] == case.depths[b].max()))
      count = rng.integers(1, max(1, case.depths[b, node]) + 1)
      parts.append(commit(case, b, case.ancestors[b, node, :count]))
    below = np.stack([part.pop("below") for part in parts])
    after = case.run(**{k: np.stack([p[k] for p in parts]) for k in parts[0]})
    assert_same_bits(after[below], before[below])
    compared += below.sum()
  assert compared > 50


def permuted(case: Case, b: int, order: np.ndarray) -> dict[str, np.ndarray]:
  """Sequence b with slot order[i] moved to slot i, but for the queries' rows."""
  place = np.argsort(order)
  ancestors = case.ancestors[b]
  return {
    "tree_keys": case.tree_keys[b, order],
    "ancestors": np.where(ancestors < 0, -1, place[ancestors]),
  }


@DTYPES
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_permuted_nodes_have_permuted_outputs(shape, dtype):
  case = make_case(shape, dtype)
  before = case.run()
  rng = np.random.default_rng(1)
  orders = [rng.permutation(shape[1]) for _ in range(B)]
  parts = [permuted(case, b, orders[b]) for b in range(B)]
  for b, part in enumerate(parts):
    part["ancestors"] = part["ancestors"][orders[b]]
    part |= {"q": case.q[b, orders[b]], "depths": case.depths[b, orders[b]]}
  after = case.run(**{k: np.stack([p[k] for p in parts]) for k in parts[0]})
  for b in range(B):
    assert_same_bits(after[b], before[b, orders[b]])


@DTYPES
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_it_does_not_matter_which_slots_hold_the_keys(shape, dtype):
  case = make_case(shape, dtype)
  rng = np.random.default_rng(2)
  parts = [permuted(case, b, rng.permutation(shape[1])) for b in range(B)]
  after = case.run(**{k: np.stack([p[k] for p in parts]) for k in parts[0]})
  assert_same_bits(after, case.run())


@DTYPES
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_other_nodes_do_not_matter(shape, dtype):
  """Other nodes' queries and keys, were they NaN or infinite."""
  case = make_case(shape, dtype)
  before = case.run()
  rng = np.random.default_rng(3)
  for node in range(0, shape[1], 3):
    q, keys = case.q.copy(), case.tree_keys.copy()
    others = np.arange(shape[1]) != node
    q[:, others] = rng.choice([np.nan, np.inf, 3.0, -np.inf], q[:, others].shape)
    for b in range(B):
      strangers = ~on_path(case, b)[node]
      keys[b, strangers] = rng.choice([np.nan, -np.inf, 1e30], keys.shape[-1])
    assert_same_bits(case.run(q=q, tree_keys=keys)[:, node], before[:, node])


@DTYPES
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
def test_cache_rows_that_are_not_committed_do_not_matter(garbage, dtype):
  case = make_case((8, 16, 80, 64), dtype)
  cache = case.cache.copy()
  cache[np.arange(S) >= LENGTHS[:, None]] = garbage
  assert not np.array_equal(cache, case.cache)
  assert_same_bits(case.run(cache=cache), case.run())


def test_not_a_number_in_a_key_reaches_all_who_see_it():
  """What must not be hidden: NaN in a committed row, and in an ancestor's key."""
  case = make_case((8, 16, 80, 64), "float32")
  before = case.run()
  cache = case.cache.copy()
  cache[2, 100, 5] = np.nan
  after = case.run(cache=cache)
  assert np.isnan(after[2]).any(axis=(1, 2)).all()
  assert_same_bits(np.delete(after, 2, 0), np.delete(before, 2, 0))
  keys = case.tree_keys.copy()
  keys[:, 1, 70] = np.nan  # in the roped part: only the weights see it
  after = case.run(tree_keys=keys)
  for b in range(B):
    sees = on_path(case, b)[:, 1]
    assert np.isnan(after[b, sees]).all() and sees.any()
    assert_same_bits(after[b, ~sees], before[b, ~sees])


@DTYPES
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_neighbours_in_the_batch_do_not_matter(shape, dtype):
  """Neither their content nor their lengths, which bound the loops over chunks."""
  case = make_case(shape, dtype)
  before = case.run()
  other = make_case(shape, dtype, seed=9)
  fields = ("q", "cache", "tree_keys", "ancestors", "depths", "lengths")
  for b in range(B):
    for length in (0, 130, S - 1):
      changes = {}
      for name in fields:
        changes[name] = getattr(other, name).copy()
      changes["lengths"][:] = length
      place = (b + 2) % B  # another slot of the batch as well
      for name in fields:
        changes[name][place] = getattr(case, name)[b]
      assert_same_bits(case.run(**changes)[place], before[b])


def test_nodes_beyond_the_end_of_the_cache():
  """A full cache: the tree lies behind its last row, in a chunk of its own."""
  case = make_case((8, 16, 80, 64), "float32")
  case = dataclasses.replace(case, lengths=np.full(B, S, np.int32))
  got = case.run()
  for b in range(B):
    exact, bound = exact_and_bound(case, b, "float32")
    assert np.all(np.abs(got[b] - exact) <= bound)


def test_the_chunk_is_an_argument():
  case = make_case((8, 16, 80, 64), "float32")
  arguments = dataclasses.asdict(case)  # numpy arrays do outside of jit, too
  small = ops.tree_attention(**arguments, scale=case.scale, chunk=32)
  for b in range(B):
    exact, bound = exact_and_bound(case, b, "float32")
    assert np.all(np.abs(small[b] - exact) <= 4 * bound)  # four times the chunks
  # Other partial sums, other bits: what the properties above rest on.
  assert np.any(np.asarray(small) != case.run())


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"q": np.zeros((2, 3, 4), np.float32)}, r"q must be \[B, N, H, W\].*\(2, 3, 4\)"),
    ({"cache": np.zeros((3, 128, 8), np.float32)}, r"cache must.*\[2, \?, 8\]"),
    ({"cache": np.zeros((2, 128, 9), np.float32)}, r"cache must.*\(2, 128, 9\)"),
    ({"cache": np.zeros((2, 130, 8), np.float32)}, "cache holds 130.*chunk = 128"),
    ({"cache": np.zeros((2, 128, 8), ml_dtypes.bfloat16)}, "one dtype.*bfloat16"),
    ({"tree_keys": np.zeros((2, 4, 8), np.float32)}, r"tree_keys must.*\[2, 3, 8\]"),
    ({"ancestors": np.zeros((2, 3), np.int32)}, r"ancestors must.*\[2, 3, \?\]"),
    ({"depths": np.zeros((2, 4), np.int32)}, r"depths must.*\[2, 3\]"),
    ({"lengths": np.zeros((3,), np.int32)}, r"lengths must.*\[2\]"),
    ({"value_dim": 9}, "value_dim = 9 must lie in 1 .. 8"),
    ({"value_dim": 0}, "value_dim = 0"),
    ({"implementation": "torch"}, "implementation = 'torch'"),
  ],
)
def test_errors_name_the_argument(changes, says):
  arguments = {
    "q": np.zeros((2, 3, 1, 8), np.float32),
    "cache": np.zeros((2, 128, 8), np.float32),
    "tree_keys": np.zeros((2, 3, 8), np.float32),
    "ancestors": np.zeros((2, 3, 2), np.int32),
    "depths": np.zeros((2, 3), np.int32),
    "lengths": np.zeros((2,), np.int32),
    "scale": 1.0,
    "value_dim": 6,
  }
  with pytest.raises(ValueError, match=says):
    ops.tree_attention(**(arguments | changes))
