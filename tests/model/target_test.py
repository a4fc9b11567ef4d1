from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.model import LatentCache
from tests.model.families import (
  FAMILIES,
  family_config,
  family_target,
  family_weights,
  random_tokens,
  sequence_logits,
  step,
)
from tests.ops.custom_calls import cuda_text
from tests.tree.random_trees import random_tree

B, N, S = 2, 8, 256
# The last steps of the text cross the end of attention's first chunk, 128.
T = 136
# Largest difference of logits between two float32 programs, on logits of up to 3.
# Rounding alone puts the float32 reference up to 4.6e-6 off its float64 form here;
# a wrong formula puts anything off by 1e-3 and more.
LOGITS = 8e-6
# Cache rows reach 4 in size. The float32 reference is off by up to 2.3e-6 per layer
# that a row is behind; streams, up to 8 in size, add the layers up.
ROWS_PER_LAYER = 4e-6
STREAMS = 2e-5

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
CHAIN = np.where(np.tri(N, dtype=bool), np.arange(N), -1).astype(np.int32)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# One with all experts on every row, one with rows grouped by expert.
MODELS = pytest.mark.parametrize("family", ["kimi", "deepseek_v3"])


@functools.cache
def texts() -> np.ndarray:
  return random_tokens((B, T), 2)


@functools.cache
def expected(family: str, dtype: str, b: int) -> reference.ForwardOutput:
  return reference.forward(
    family_config(family),
    family_weights(family),
    texts()[b],
    taps=(1, 0),
    dtype=np.dtype(dtype),
  )


def empty_cache(family: str, dtype: str = "float32") -> np.ndarray:
  config = family_config(family)
  return np.array(LatentCache.empty(config, B, S, jnp.dtype(dtype)).data)


@functools.cache
def prefilled(family: str, dtype: str = "float32"):
  """The texts in chunks of N rows: (logits, features, cache)."""
  target, cache = family_target(family, dtype), empty_cache(family, dtype)
  logits, features = [], []
  for start in range(0, T, N):
    chunk = slice(start, start + N)
    out = step(
      target,
      texts()[:, chunk],
      np.broadcast_to(CHAIN, (B, N, N)),
      np.broadcast_to(np.arange(N, dtype=np.int32), (B, N)),
      cache,
      np.full(B, start, np.int32),
    )
    cache[:, :, chunk] = out[2]
    logits.append(out[0])
    features.append(out[1])
  return np.concatenate(logits, 1), np.concatenate(features, 1), cache


def rows_at_depth_zero(tokens: np.ndarray) -> tuple[np.ndarray, ...]:
  """A tree of only the root, as plain decoding has it: (tokens, ancestors, depths)."""
  padded = np.zeros((B, N), np.int32)
  padded[:, 0] = tokens
  alone = np.full((B, N, N), -1, np.int32)
  alone[:, :, 0] = np.arange(N)
  return padded, alone, np.zeros((B, N), np.int32)


def assert_same_bits(got, want) -> None:
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype and got.shape == want.shape
  np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def assert_close_to_reference(logits: np.ndarray, family: str, rows=slice(None)):
  for b in range(B):
    for dtype in ("float64", "float32"):
      want = expected(family, dtype, b).logits[rows]
      assert np.abs(want).max() > 1.5
      np.testing.assert_allclose(logits[b], want, rtol=0, atol=LOGITS)


@EACH_FAMILY
def test_sequence_form_equals_the_reference(family):
  logits = sequence_logits(family_target(family), texts())
  assert logits.dtype == np.float32
  assert_close_to_reference(np.asarray(logits), family)


@EACH_FAMILY
def test_chunked_prefill_equals_the_reference(family):
  logits, features, cache = prefilled(family)
  assert_close_to_reference(logits, family)
  for b in range(B):
    want = expected(family, "float64", b)
    for layer, rows in enumerate(want.cache):
      atol = (layer + 1) * ROWS_PER_LAYER
      np.testing.assert_allclose(cache[layer, b, :T], rows, rtol=0, atol=atol)
    np.testing.assert_allclose(features[b], want.features, rtol=0, atol=STREAMS)


@EACH_FAMILY
def test_steps_equal_the_prefill_to_the_bit(family):
  """One token at a time over the cache, at the width of the prefill's chunks."""
  target = family_target(family)
  logits, features, full = prefilled(family)
  start = T - 2 * N
  cache = empty_cache(family)
  cache[:, :, :start] = full[:, :, :start]
  for position in range(start, T):
    inputs = rows_at_depth_zero(texts()[:, position])
    out = step(target, *inputs, cache, np.full(B, position, np.int32))
    cache[:, :, position] = out[2][:, :, 0]
    assert_same_bits(out[0][:, 0], logits[:, position])
    assert_same_bits(out[1][:, 0], features[:, position])
  assert_same_bits(cache, full)


def test_steps_of_one_row_equal_the_reference():
  """The width at which only the chosen experts' weights are read."""
  family = "kimi"
  target, cache = family_target(family), empty_cache(family)[:, :1]
  root = np.zeros((1, 1), np.int32)
  logits = []
  for position in range(T):
    tokens = texts()[:1, position, None]
    lengths = np.array([position], np.int32)
    out = step(target, tokens, root[..., None], root, cache, lengths)
    cache[:, :, position] = out[2][:, :, 0]
    logits.append(np.asarray(out[0][0, 0]))
  for dtype in ("float64", "float32"):
    want = expected(family, dtype, 0).logits
    np.testing.assert_allclose(np.stack(logits), want, rtol=0, atol=LOGITS)


@functools.cache
def trees() -> list[reference.Tree]:
  rng = np.random.default_rng(3)
  found = []
  while len(found) < B:
    tree = random_tree(rng, N, 61)
    # Branches, and room for commits.
    if tree.size == N and 3 <= tree.depths.max() <= 5:
      found.append(tree)
  return found


def tree_inputs() -> tuple[np.ndarray, ...]:
  """(tokens, ancestors, depths) of `trees`."""
  return (
    np.stack([t.token_ids for t in trees()]),
    np.stack([reference.ancestors(t, N - 1) for t in trees()]),
    np.stack([t.depths for t in trees()]),
  )


@EACH_FAMILY
def test_tree_nodes_equal_the_reference(family):
  lengths = np.array([126, 5], np.int32)
  cache = prefilled(family)[2]
  logits, _, keys = step(family_target(family), *tree_inputs(), cache, lengths)
  for b, tree in enumerate(trees()):
    want = reference.verify(
      family_config(family),
      family_weights(family),
      expected(family, "float64", b).cache,
      lengths[b],
      tree,
      dtype=np.float64,
    )
    np.testing.assert_allclose(logits[b], want.logits, rtol=0, atol=LOGITS)
    for layer, rows in enumerate(want.tree_keys):
      atol = (layer + 1) * ROWS_PER_LAYER
      np.testing.assert_allclose(keys[layer, b], rows, rtol=0, atol=atol)


def outputs_by_row(out) -> list[np.ndarray]:
  """Logits, features and keys with [B, N] leading."""
  logits, features, keys = map(np.asarray, out)
  return [logits, features, np.moveaxis(keys, 0, 2)]


@MODELS
@DTYPES
def test_permuted_nodes_have_permuted_bits(family, dtype):
  target = family_target(family, dtype)
  cache = prefilled(family, dtype)[2]
  tokens, ancestors, depths = tree_inputs()
  lengths = np.array([126, 5], np.int32)
  before = outputs_by_row(step(target, tokens, ancestors, depths, cache, lengths))
  rng = np.random.default_rng(4)
  for _ in range(4):
    orders = [rng.permutation(N) for _ in range(B)]
    moved = []
    for b, order in enumerate(orders):
      place = np.argsort(order)
      paths = np.where(ancestors[b] < 0, -1, place[ancestors[b]])
      moved.append((tokens[b, order], paths[order], depths[b, order]))
    inputs = [np.stack(x) for x in zip(*moved, strict=True)]
    after = outputs_by_row(step(target, *inputs, cache, lengths))
    for got, want in zip(after, before, strict=True):
      for b, order in enumerate(orders):
        assert_same_bits(got[b], want[b, order])


@MODELS
@DTYPES
def test_other_rows_and_neighbours_do_not_matter(family, dtype):
  """A row's bits depend on its path and its text alone; slots may be swapped."""
  target = family_target(family, dtype)
  cache = prefilled(family, dtype)[2]
  tokens, ancestors, depths = tree_inputs()
  lengths = np.array([126, 5], np.int32)
  before = outputs_by_row(step(target, tokens, ancestors, depths, cache, lengths))
  deepest = int(depths[0].argmax())
  path = ancestors[0, deepest, : depths[0, deepest] + 1]
  others = np.setdiff1d(np.arange(N), path)
  assert len(others) >= 2
  changed = [x.copy() for x in (tokens, ancestors, depths)]
  changed[0][0, others] = random_tokens(len(others), 5)
  # The neighbour is another text of another length.
  changed[0][1] = random_tokens(N, 6)
  cache = cache.copy()
  cache[:, 1] = cache[:, 1, ::-1]
  arguments = [*changed, cache, np.array([126, 200], np.int32)]
  after = outputs_by_row(step(target, *arguments))
  for got, want in zip(after, before, strict=True):
    assert_same_bits(got[0, path], want[0, path])
  axis = [0, 0, 0, 1, 0]
  swapped = [np.flip(x, a) for x, a in zip(arguments, axis, strict=True)]
  for got, want in zip(outputs_by_row(step(target, *swapped)), before, strict=True):
    assert_same_bits(got[1, path], want[0, path])


@MODELS
@DTYPES
def test_committed_ancestors_change_no_bit(family, dtype):
  """After its path is committed, a node is a root with the same logits."""
  target = family_target(family, dtype)
  tokens, ancestors, depths = tree_inputs()
  lengths = np.array([126, 125], np.int32)
  cache = prefilled(family, dtype)[2]
  before = step(target, tokens, ancestors, depths, cache, lengths)
  keys = np.asarray(before[2])
  for count in range(1, 1 + int(depths.max(1).min())):
    nodes, longer = [], cache.copy()
    for b in range(B):
      node = int(depths[b].argmax())
      path = ancestors[b, node, : count + 1]
      longer[:, b, lengths[b] : lengths[b] + count] = keys[:, b, path[:count]]
      nodes.append(path[count])
    rows = np.arange(B), np.array(nodes)
    inputs = rows_at_depth_zero(tokens[rows])
    after = step(target, *inputs, longer, lengths + np.int32(count))
    for got, want in zip(outputs_by_row(after), outputs_by_row(before), strict=True):
      assert_same_bits(got[:, 0], want[rows])


def test_bf16_logits_are_near_float32_ones():
  """Sane rounding: bf16 is off by some 2^-8 per layer, not by a wrong formula."""
  narrow, wide = prefilled("kimi", "bfloat16")[0], prefilled("kimi")[0]
  assert narrow.dtype == np.float32  # logits are never rounded to bf16
  assert np.any(narrow != np.asarray(jnp.asarray(narrow, jnp.bfloat16)))
  error = np.abs(narrow - wide)
  # A few tokens go to other experts; most do not.
  assert 1e-4 < np.median(error) < 0.03


def test_taps_do_not_change_the_logits():
  target, cache = family_target("kimi"), prefilled("kimi")[2]
  lengths = np.array([126, 5], np.int32)

  @jax.jit
  def without_taps(target, *arguments):
    hidden, features, keys = target.step(*arguments)
    return target.head(hidden), features, keys

  plain = without_taps(target, *tree_inputs(), cache, lengths)
  tapped = step(target, *tree_inputs(), cache, lengths)
  assert plain[1].shape == (B, N, 0)
  assert_same_bits(plain[0], tapped[0])
  assert_same_bits(plain[2], tapped[2])


def test_shapes_and_dtypes():
  target = family_target("v2_lite", "bfloat16")
  config = target.config
  assert target.embed(np.zeros((2, 3), np.int32)).shape == (2, 3, config.hidden_size)
  assert target.embed(np.zeros((), np.int32)).dtype == jnp.bfloat16
  logits = target.head(jnp.zeros((2, 3, config.hidden_size), jnp.bfloat16))
  assert logits.shape == (2, 3, config.vocab_size) and logits.dtype == np.float32


@EACH_FAMILY
def test_rope_tables_are_those_of_the_config(family):
  target, config = family_target(family), family_config(family)
  tables = {}
  for angle_dtype in ("float64", "float32"):
    tables[angle_dtype] = reference.rope_table(
      config.qk_rope_head_dim,
      config.max_position_embeddings,
      config.rope_theta,
      config.rope_scaling,
      angle_dtype,
      config.rope_amplitude,
    )
  assert np.any(tables["float64"][0] != tables["float32"][0])
  cos, sin = tables[config.rope_angle_dtype]
  assert_same_bits(target.cos[...], cos)
  assert_same_bits(target.sin[...], sin)


def test_attention_for_cuda_has_one_chunk_whatever_the_cache():
  """Else a text's bits would depend on the longest prompt beside it."""
  model = family_target("kimi", "float32")
  tokens = jnp.zeros((1, N), jnp.int32)
  chunks = set()
  for positions in (256, 65536):
    shape = (model.config.num_hidden_layers, 1, positions, model.config.cache_width)
    text = cuda_text(
      functools.partial(model.step, implementation="cuda"),
      tokens,
      jnp.asarray(CHAIN)[None],
      jnp.arange(N)[None],
      jax.ShapeDtypeStruct(shape, model.dtype),
      jnp.zeros((1,), jnp.int32),
    )
    found = re.findall(r"tree_attention\(.*chunk = (\d+) : i64", text)
    assert len(found) == model.config.num_hidden_layers
    chunks.update(found)
  assert len(chunks) == 1
