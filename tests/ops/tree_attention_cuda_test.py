"""Tree attention's custom call against float64, and the bits of its rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.ops import _tree_attention_cuda
from tests.ops.custom_calls import assert_same_bits, replayed
from tests.ops.tree_attention_cases import (
  B,
  Case,
  S,
  as_dtype,
  assert_within_bound,
  committed,
  exact_and_bound,
  kernel_for,
  launched,
  lowered,
  make_case,
  small,
)

# H, N, W, R: rows of one node in many tiles, many nodes in one tile, tiles that end
# inside of a node; the widths of the demo and of Kimi, and odd ones.
DEMO = [
  (8, 1, 80, 64),
  (8, 33, 80, 64),
  (8, 64, 80, 64),
  (8, 65, 80, 64),
  (8, 128, 80, 64),
  (1, 128, 80, 64),
  (5, 33, 80, 64),
  (16, 17, 80, 64),
  (24, 7, 80, 64),
]
KIMI = [
  (8, 17, 576, 512),
  (64, 2, 576, 512),
  (64, 7, 576, 512),
  (128, 2, 576, 512),
  (8, 128, 576, 512),
  (5, 7, 576, 512),
  (16, 65, 576, 512),
  (1, 1, 576, 512),
]
ODD = [
  (3, 7, 19, 13),
  (1, 2, 1, 1),
  (2, 2, 30, 18),
  (24, 7, 84, 84),
  (4, 17, 200, 192),
  (8, 7, 320, 256),
  (8, 7, 400, 384),
  (16, 2, 576, 576),
]
PROPERTIES = [(8, 33, 80, 64), (5, 33, 80, 64), (8, 17, 576, 512), (64, 7, 576, 512)]
# "hopper": bfloat16 in the kernel for Hopper, where it takes the shape.
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "hopper"])


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", DEMO + KIMI + ODD, ids=str)
def test_equals_softmax_attention(shape, dtype):
  case = make_case(shape, dtype)
  assert_within_bound(case, case.run())


@pytest.mark.gpu
@DTYPES
def test_the_bound_would_see_one_key_lost(dtype):
  case = make_case((8, 33, 80, 64), dtype)
  got = case.run(lengths=np.maximum(case.lengths - 1, 0))
  for b in range(1, B):
    exact, bound = exact_and_bound(case, b)
    error = np.abs(got[b].astype(np.float64) - exact)
    seen = np.any(error > 2 * bound, axis=(1, 2))
    assert np.all(seen) if dtype == "float32" else np.any(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [1, 100, 250])
def test_any_capacity_and_chunk(capacity):
  """Neither need be a multiple of anything but 16; a tree may lie behind the cache."""
  base = make_case((5, 33, 80, 64), "float32")
  case = dataclasses.replace(
    base,
    cache=np.nan_to_num(base.cache[:, :capacity]),
    lengths=np.minimum(base.lengths, capacity),
    chunk=48,
  )
  assert_within_bound(case, case.run())


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", PROPERTIES, ids=str)
def test_order_of_slots_does_not_matter(shape, dtype):
  case = make_case(shape, dtype)
  before = case.run()
  rng = np.random.default_rng(1)
  orders = np.stack([rng.permutation(shape[1]) for _ in range(B)])
  places = np.argsort(orders, axis=1)
  rows = np.arange(B)[:, None]
  ancestors = case.ancestors[rows, orders]
  moved = np.take_along_axis(places[:, None], np.maximum(ancestors, 0), 2)
  after = case.run(
    q=case.q[rows, orders],
    tree_keys=case.tree_keys[rows, orders],
    depths=case.depths[rows, orders],
    ancestors=np.where(ancestors < 0, -1, moved).astype(np.int32),
  )
  assert_same_bits(before[rows, orders], after)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", PROPERTIES, ids=str)
def test_other_nodes_do_not_matter(shape, dtype):
  """Their queries, and the keys of those that are not ancestors, were they NaN."""
  case = make_case(shape, dtype)
  before = case.run()
  rng = np.random.default_rng(2)
  slots = np.arange(shape[1])
  for node in range(0, shape[1], 3):
    q, keys = case.q.copy(), case.tree_keys.copy()
    others = slots != node
    q[:, others] = rng.choice([np.nan, np.inf, 3.0, -np.inf], q[:, others].shape)
    strangers = ~np.any(case.ancestors[:, node, :, None] == slots, axis=1)
    keys[strangers] = rng.choice([np.nan, -np.inf, 1e30], keys[strangers].shape)
    after = case.run(q=q, tree_keys=keys)
    assert_same_bits(before[:, node], after[:, node], f"node {node}")


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", PROPERTIES, ids=str)
def test_what_lies_beyond_the_length_does_not_matter(shape, dtype):
  case = make_case(shape, dtype)  # NaN there
  for garbage in (0.0, np.inf, -np.inf, 3e38):
    cache = case.cache.copy()
    cache[np.arange(S) >= case.lengths[:, None]] = garbage
    assert_same_bits(case.run(), case.run(cache=cache), str(garbage))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", PROPERTIES, ids=str)
def test_neighbours_in_the_batch_do_not_matter(shape, dtype):
  case, other = make_case(shape, dtype), make_case(shape, dtype, seed=9)
  before = case.run()
  for b in range(B):
    for length in (0, 130, S):
      place = (b + length) % B
      changes = {k: v.copy() for k, v in other.arrays().items()}
      changes["lengths"][:] = length
      for name, value in changes.items():
        value[place] = getattr(case, name)[b]
      assert_same_bits(before[b], case.run(**changes)[place])


@pytest.mark.gpu
def test_not_a_number_in_a_key_reaches_all_who_see_it():
  case = make_case((8, 33, 80, 64), "float32")
  before = case.run()
  cache = case.cache.copy()
  cache[2, 100, 5] = np.nan
  after = case.run(cache=cache)
  assert np.isnan(after[2]).any(axis=(1, 2)).all()
  assert_same_bits(np.delete(before, 2, 0), np.delete(after, 2, 0))
  keys = case.tree_keys.copy()
  keys[:, 1, 70] = np.nan  # in the roped part: only the weights see it
  after = case.run(tree_keys=keys)
  sees = np.any(case.ancestors == 1, axis=2)
  assert np.isnan(after[sees]).all() and sees.any()
  assert_same_bits(before[~sees], after[~sees])


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", PROPERTIES, ids=str)
def test_committed_keys_and_tree_keys_give_the_same_bits(shape, dtype):
  base = make_case(shape, dtype)
  rng = np.random.default_rng(3)
  compared = 0
  for length in (0, 15, 31, 100, 120, 127, 128, 250, 255):
    lengths = np.full(B, length, np.int32)
    cache = np.where(np.isnan(base.cache), base.cache.dtype.type(0.5), base.cache)
    case = dataclasses.replace(base, lengths=lengths, cache=cache)
    before = case.run()
    for _ in range(3):
      parts = []
      for b in range(B):
        node = rng.choice(np.flatnonzero(case.depths[b] == case.depths[b].max()))
        count = rng.integers(1, max(1, case.depths[b, node]) + 1)
        parts.append(committed(case, b, node, count))
      below = np.stack([part.pop("below") for part in parts])
      after = case.run(**{k: np.stack([p[k] for p in parts]) for k in parts[0]})
      assert_same_bits(before[below], after[below], f"length {length}")
      compared += below.sum()
  assert compared > 27 * B


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", [(8, 80, 64), (8, 576, 512), (64, 576, 512)], ids=str)
def test_the_number_of_nodes_and_of_sequences_does_not_matter(shape, dtype):
  """A node among 128, among fewer, and alone with its ancestors committed."""
  H, W, R = shape
  case = make_case((H, 128, W, R), dtype)
  cache = np.where(np.isnan(case.cache), case.cache.dtype.type(0.5), case.cache)
  lengths = np.array([0, 100, 255, 250], np.int32)
  case = dataclasses.replace(case, cache=cache, lengths=lengths)
  many = case.run()
  # Parents come before their children, so the first slots are a tree.
  for count in (1, 8, 17, 33, 64, 65):
    names = ("q", "tree_keys", "ancestors", "depths")
    few = case.run(**{name: getattr(case, name)[:, :count] for name in names})
    assert_same_bits(many[:, :count], few, f"{count} nodes")
  rows = [(b, n) for b in range(B) for n in range(0, 128, 9)]
  parts = []
  for b, n in rows:
    depth = case.depths[b, n]
    part = committed(case, b, n, depth)
    ancestors = np.full((1, case.ancestors.shape[2]), -1, np.int32)
    ancestors[0, 0] = 0
    parts.append(
      {
        "q": case.q[b, n : n + 1],
        "cache": part["cache"],
        "tree_keys": case.tree_keys[b, n : n + 1],
        "ancestors": ancestors,
        "depths": np.zeros(1, np.int32),
        "lengths": part["lengths"],
      }
    )
  alone = case.run(**{k: np.stack([p[k] for p in parts]) for k in parts[0]})
  for i, (b, n) in enumerate(rows):
    assert_same_bits(many[b, n], alone[i, 0], f"sequence {b}, node {n}")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 7, 576, 512), (16, 17, 80, 64)], ids=str)
def test_the_rows_of_a_block_do_not_matter(shape):
  """Of the form on tensor cores, which is for bf16."""
  case = make_case(shape, "bfloat16")
  before = case.run()
  for rows in (16, 32, 64):
    assert_same_bits(before, launched(case, rows_per_block=rows), f"{rows} rows")


@pytest.mark.gpu
@DTYPES
def test_values_out_of_range_stay_inside(dtype):
  """They mean nothing, but nothing breaks, and other sequences do not notice."""
  case = make_case((8, 33, 80, 64), dtype)
  before = case.run()
  rng = np.random.default_rng(4)
  changes = {k: v.copy() for k, v in case.arrays().items()}
  huge = np.array([-(2**31), -1, 10**6, 2**31 - 1])
  changes["lengths"][:3] = huge[1:]
  changes["depths"][:3] = rng.choice(huge, changes["depths"][:3].shape)
  changes["ancestors"][:3] = rng.choice(huge, changes["ancestors"][:3].shape)
  assert_same_bits(before[3], case.run(**changes)[3])


@functools.cache
def long_cache(W: int, keys: int) -> np.ndarray:
  rng = np.random.default_rng(5)
  return rng.standard_normal((keys, W), np.float32)


LONG = {
  "random": lambda rng, keys: np.zeros(keys),
  "huge": lambda rng, keys: 40 * rng.normal(size=keys),
  "one key": lambda rng, keys: 200.0 * (np.arange(keys) == keys // 3),
  "alternating": lambda rng, keys: 60.0 * (-1) ** np.arange(keys),
  "rising": lambda rng, keys: np.linspace(-150, 150, keys),
}


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", LONG)
@pytest.mark.parametrize(
  ("shape", "dtype"),
  [
    ((8, 80, 64), "float32"),
    ((8, 576, 512), "bfloat16"),
    ((8, 576, 512), "hopper"),
  ],
  ids=str,
)
def test_200_000_keys(shape, dtype, pattern):
  """Logits of a given pattern: along one direction of the keys, plus noise."""
  H, W, R = shape
  keys, scale = 200_000, 1.3 * W**-0.5
  rng = np.random.default_rng([6, W])
  direction = rng.normal(size=W)
  direction = (direction / np.linalg.norm(direction)).astype(np.float32)
  logits = LONG[pattern](rng, keys).astype(np.float32)
  cache = long_cache(W, keys) + logits[:, None] * direction
  q = direction / scale + rng.normal(size=(1, 2, H, W))
  case = Case(
    q=as_dtype(q, dtype),
    cache=as_dtype(cache, dtype)[None],
    tree_keys=as_dtype(rng.normal(size=(1, 2, W)), dtype),
    ancestors=np.array([[[0, -1], [0, 1]]], np.int32),
    depths=np.array([[0, 1]], np.int32),
    lengths=np.array([keys - 2], np.int32),
    value_dim=R,
    scale=scale,
    chunk=1024,
    kernel=kernel_for(dtype, W, R),
  )
  assert_within_bound(case, case.run())


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", [(8, 33, 80, 64), (64, 7, 576, 512)], ids=str)
def test_replayed_as_a_graph(shape, dtype):
  case = make_case(shape, dtype)

  def run(arrays):
    return ops.tree_attention(**arrays, **case.settings(), implementation="cuda")

  assert_same_bits(case.run(), replayed(run)(case.arrays()))


@pytest.mark.gpu
def test_inside_a_loop_over_layers_and_lengths():
  case = make_case((8, 33, 80, 64), "float32")
  cache = np.stack([np.nan_to_num(case.cache, nan=x) for x in (0.5, 0.7)])
  settings = {"value_dim": case.value_dim, "scale": case.scale}
  arrays = case.arrays(cache=cache)

  @jax.jit
  def loop(arrays):
    def body(carry):
      i, outs = carry
      changed = arrays | {"lengths": arrays["lengths"] + i}
      for layer in range(2):
        out = ops.tree_attention(
          **changed, **settings, layer=layer, implementation="cuda"
        )
        outs = outs.at[i, layer].set(out)
      return i + 1, outs

    shape = (5, 2, *case.q.shape[:3], case.value_dim)
    start = (jnp.int32(0), jnp.zeros(shape))
    return jax.lax.while_loop(lambda carry: carry[0] < 5, body, start)[1]

  for _ in range(3):
    outs = np.asarray(loop(arrays))
    for i in range(5):
      for layer in range(2):
        one = case.run(cache=cache[layer], lengths=case.lengths + np.int32(i))
        assert_same_bits(one, outs[i, layer])


def test_the_program_for_cuda_holds_the_call():
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
    text = lowered(small(), implementation=implementation)
    assert text.count("@kdtree_jax.tree_attention") == expected
    if expected:
      assert "layer = 2 : i64" in text and "scale = 2.500000e-01 : f64" in text
      assert "chunk = 128 : i64" in text
      assert "chunk_on_hopper = 576 : i64" in text and "kernel = 0 : i64" in text
      # The cache as a whole, and ceil((256 + 6) / 128) chunks of 2 x 40 rows.
      assert "tensor<3x2x256x80xf32>" in text and "tensor<2x40x3x16xf32>" in text


def test_the_chunk_depends_on_the_longest_context_alone():
  for N in (1, 128):
    text = lowered(small(N=N, positions=16384), implementation="cuda")
    assert "chunk = 256 : i64" in text and "chunk_on_hopper = 2112 : i64" in text
  sizes = [_tree_attention_cuda.default_chunk(s) for s in (1, 16383, 32896, 10**6)]
  assert sizes == [128, 128, 512, 1024]
  sizes = [
    _tree_attention_cuda.default_chunk_on_hopper(s)
    for s in (1, 8191, 8192, 32768, 131072, 10**6, 2**31 - 1)
  ]
  assert sizes == [576, 576, 1088, 2112, 2112, 2112, 2112]
  for positions in (1, 100, 4096, 10**5, 10**7):
    larger = _tree_attention_cuda.default_chunk_on_hopper(positions)
    assert larger >= _tree_attention_cuda.default_chunk(positions)
  text = lowered(small(positions=250), implementation="cuda", chunk=48)
  assert "chunk_on_hopper = 48 : i64" in text
  assert "chunk = 48 : i64" in text and "tensor<2x40x6x16xf32>" in text
  for positions in (256, 16384):
    text = lowered(
      small(positions=positions), implementation="cuda", max_positions=32768
    )
    assert "chunk = 512 : i64" in text


@pytest.mark.gpu
@DTYPES
def test_the_size_of_the_cache_does_not_matter(dtype):
  """A model's limit decides on the chunk, not the cache made for these prompts."""
  case = make_case((8, 17, 80, 64), dtype)

  def run(cache):
    arrays = {k: jnp.asarray(v) for k, v in case.arrays(cache=cache).items()}
    settings = {"value_dim": case.value_dim, "scale": case.scale}
    return jax.jit(
      functools.partial(
        ops.tree_attention, **settings, max_positions=32768, implementation="cuda"
      )
    )(**arrays)

  larger = np.concatenate([case.cache] * 128, axis=1)  # 32,768 positions
  assert_same_bits(run(case.cache), run(larger))


@pytest.mark.parametrize(
  ("arrays", "chunk", "says"),
  [
    (small(N=129), None, r"q \(2, 129, 8, 80\) has 129 nodes; 1 .. 128"),
    (small(W=580), None, "580 wide; at most 576"),
    (small(dtype="float16"), None, "float32 or bfloat16; they are float16"),
    (small(), 32 + 8, "chunk = 40 must be a multiple of 16"),
    (
      small() | {"ancestors": jnp.zeros((2, 5, 130), jnp.int32)},
      None,
      r"ancestors \(2, 5, 130\) covers 130 depths; 1 .. 129",
    ),
  ],
)
def test_what_the_cuda_form_cannot_do(arrays, chunk, says):
  with pytest.raises(ValueError, match=f"implementation='cuda' of tree_att.*{says}"):
    lowered(arrays, implementation="cuda", chunk=chunk)
  if chunk is not None:
    arrays = arrays | {"cache": arrays["cache"][:, :, : 6 * chunk]}
  text = lowered(arrays, chunk=chunk)  # "auto": the XLA form in all programs
  assert "kdtree_jax.tree_attention" not in text


@pytest.mark.parametrize(
  ("batch", "positions", "chunk", "says"),
  [
    (65536, 256, None, "has 65536 sequences; at most 65535"),
    (65535, 256, None, None),
    (2, 2**20 + 16, 2**20 + 16, "chunk = 1048592 is too large; at most 1048576"),
    (2, 2**20, 2**20, None),
    (2, 2**20, 16, "makes 65537 chunks of 16; at most 65535 chunks"),
    (2, 65534 * 16, 16, None),
    (2, 2047 * 2**20, 2**20, "makes 2048 chunks of 1048576; .* 2147483647 positions"),
    (2, 2046 * 2**20, 2**20, None),
  ],
)
def test_the_grid_and_ints_of_the_cuda_form_are_limited(batch, positions, chunk, says):
  def shaped(x):
    shape = [{2: batch, 256: positions}.get(size, size) for size in x.shape]
    return jax.ShapeDtypeStruct(shape, x.dtype)

  arrays = {name: shaped(x) for name, x in small().items()}
  if says is None:
    text = lowered(arrays, implementation="cuda", chunk=chunk)
    assert "@kdtree_jax.tree_attention" in text
    return
  with pytest.raises(ValueError, match=f"implementation='cuda' of tree_att.*{says}"):
    lowered(arrays, implementation="cuda", chunk=chunk)
  text = lowered(arrays, chunk=chunk)
  assert "kdtree_jax.tree_attention" not in text


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"layer": 3}, "layer = 3 must lie in 0 .. 2"),
    ({"layer": -1}, "layer = -1 must"),
    ({"chunk": 0}, "chunk = 0 must be at least 1"),
    ({"value_dim": 81}, "value_dim = 81 must lie in 1 .. 80"),
  ],
)
def test_errors_name_the_argument(changes, says):
  with pytest.raises(ValueError, match=says):
    lowered(small(), implementation="cuda", **changes)
