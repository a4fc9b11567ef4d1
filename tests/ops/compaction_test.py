from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference

LAYERS, B, S, W, N, A = 3, 4, 40, 6, 17, 8

compact = jax.jit(ops.compact)


def random_paths(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
  """Ascending slots that skip levels' neighbours, -1 padded, and their number."""
  lengths = rng.integers(0, A + 1, size=B)
  path = np.full((B, A), -1, np.int32)
  for b, length in enumerate(lengths):
    rest = 1 + np.sort(rng.choice(N - 1, size=max(length - 1, 0), replace=False))
    path[b, :length] = np.concatenate([[0], rest])[:length]
  return path, lengths.astype(np.int32)


def by_reference(cache, tree_keys, path, length, start):
  out = cache.copy()
  for layer in range(cache.shape[0]):
    for b in range(cache.shape[1]):
      out[layer, b] = reference.compact(
        cache[layer, b], tree_keys[layer, b], path[b], length[b], start[b]
      )
  return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_reference_over_many_rounds(dtype):
  rng = np.random.default_rng(0)
  cache = np.asarray(jnp.asarray(rng.normal(size=(LAYERS, B, S, W)), dtype))
  start = np.array([0, 1, 5, 20], np.int32)
  expected, got = cache, jnp.asarray(cache)
  # Rounds that follow each other, up to and beyond the end of the cache.
  for _ in range(12):
    keys = np.asarray(jnp.asarray(rng.normal(size=(LAYERS, B, N, W)), dtype))
    path, length = random_paths(rng)
    expected = by_reference(expected, keys, path, length, start)
    got = compact(got, keys, path, length, start)
    assert np.asarray(got).tobytes() == expected.tobytes()
    start = start + length
  assert (start > S).any()


def test_rejected_rows_leave_no_trace():
  cache = jnp.ones((1, 1, S, W))
  keys = jnp.full((1, 1, N, W), jnp.nan).at[0, 0, :2].set(2.0)
  # Garbage behind `length`, as a caller may leave it.
  path = jnp.array([[0, 1, 5, 9, 2, 3, 4, 99]])
  out = np.asarray(compact(cache, keys, path, jnp.array([2]), jnp.array([3])))[0, 0]
  assert (out[3:5] == 2).all() and (np.delete(out, [3, 4], 0) == 1).all()
  nothing = compact(cache, keys, path, jnp.array([0]), jnp.array([3]))
  np.testing.assert_array_equal(nothing, cache)


def test_rows_beyond_the_end_are_dropped():
  cache = jnp.zeros((1, 1, S, W))
  keys = jnp.broadcast_to(jnp.arange(1.0, N + 1)[:, None], (1, 1, N, W))
  path = jnp.arange(A)[None]
  out = np.asarray(compact(cache, keys, path, jnp.array([A]), jnp.array([S - 2])))
  assert out[0, 0, -3:, 0].tolist() == [0, 1, 2] and not out[0, 0, :-2].any()
  out = compact(cache, keys, path, jnp.array([A]), jnp.array([S + 3]))
  assert not np.asarray(out).any()


def garbage(rng: np.random.Generator):
  """(path, length, start) in and out of range."""
  extreme = np.iinfo(np.int32)
  path = rng.integers(-3, N + 3, (B, A)).astype(np.int32)
  path[rng.random((B, A)) < 0.1] = extreme.max
  length = rng.choice([-1, 0, 3, A, A + 2, extreme.min, extreme.max], B)
  start = rng.choice([-4, -1, 0, 5, S - 3, S, extreme.min, extreme.max - 2], B)
  return path, length.astype(np.int32), start.astype(np.int32)


def test_garbage_is_clamped_or_dropped():
  rng = np.random.default_rng(4)
  cache = rng.normal(size=(LAYERS, B, S, W)).astype(np.float32)
  keys = rng.normal(size=(LAYERS, B, N, W)).astype(np.float32)
  for _ in range(200):
    path, length, start = garbage(rng)
    slots, count = np.clip(path, 0, N - 1), np.clip(length, 0, A)
    expected = by_reference(cache, keys, slots, count, start.astype(np.int64))
    got = compact(cache, keys, path, length, start)
    assert np.asarray(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
  "reshape", [lambda x: x[None], lambda x: x.reshape(LAYERS, -1), lambda x: x]
)
def test_sources_in_the_cache_itself_then_a_reshape(reshape):
  """The shape of openxla/xla#49176, which gives wrong values on the CPU.

  Rows gathered from an array, written back to it further down, and reshaped in
  the same program.
  """
  rng = np.random.default_rng(1)
  cache = rng.normal(size=(LAYERS, B, S, W)).astype(np.float32)
  path, length = random_paths(rng)
  start = np.array([0, 1, 2, 3], np.int32)

  @jax.jit
  def commit(cache, path, length, start):
    return reshape(ops.compact(cache, cache[:, :, :N], path, length, start))

  got = commit(cache, path, length, start)
  expected = by_reference(cache, cache[:, :, :N].copy(), path, length, start)
  np.testing.assert_array_equal(got, reshape(expected))


@pytest.mark.xfail(strict=False, reason="openxla/xla#49176 on CPU; passes once fixed")
def test_why_not_a_slice_update():
  """The form that `compact` avoids: take, dynamic_update_slice, reshape."""

  @jax.jit
  def shift(x):
    return jax.lax.dynamic_update_slice(x, x[:-1], (1, 0))[None]

  x = np.arange(128, dtype=np.float32).reshape(16, 8)
  np.testing.assert_array_equal(shift(x)[0], np.concatenate([x[:1], x[:-1]]))


def rounds(cache, tree_keys, path, length, start, count):
  """The decode loop's use: a round's keys come from reading the carried cache."""

  def body(state):
    i, cache, start = state
    keys = tree_keys + 0 * jnp.mean(cache, axis=2, keepdims=True)
    return i + 1, ops.compact(cache, keys, path, length, start), start + length

  state = (jnp.int32(0), cache, start)
  return jax.lax.while_loop(lambda s: s[0] < count, body, state)


@pytest.mark.parametrize("batch", [1, 4])
def test_donated_in_a_loop_does_not_copy_the_cache(batch):
  cache = jnp.zeros((6, batch, 512, 48))
  keys = jnp.ones((6, batch, N, 48))
  path = jnp.tile(jnp.arange(A), (batch, 1))
  length, start = jnp.full((batch,), 5), jnp.zeros((batch,), jnp.int32)
  program = jax.jit(rounds, donate_argnums=0).lower(
    cache, keys, path, length, start, 10
  )
  memory = program.compile().memory_analysis()
  assert memory.alias_size_in_bytes >= cache.nbytes
  # Room for the gathered rows, not for a cache.
  assert memory.temp_size_in_bytes < cache.nbytes // 4
  _, out, end = jax.jit(rounds, donate_argnums=0)(cache, keys, path, length, start, 10)
  assert cache.is_deleted()
  assert (np.asarray(end) == 50).all()
  assert (np.asarray(out)[:, :, :50] == 1).all()
  assert not np.asarray(out)[:, :, 50:].any()


def test_permuting_the_batch_permutes_the_caches():
  rng = np.random.default_rng(2)
  cache = rng.normal(size=(LAYERS, B, S, W)).astype(np.float32)
  keys = rng.normal(size=(LAYERS, B, N, W)).astype(np.float32)
  path, length = random_paths(rng)
  start = np.array([0, 7, 5, 38], np.int32)
  order = np.array([2, 0, 3, 1])
  straight = np.asarray(compact(cache, keys, path, length, start))
  permuted = compact(
    cache[:, order], keys[:, order], path[order], length[order], start[order]
  )
  np.testing.assert_array_equal(straight[:, order], permuted)


def test_vmap():
  rng = np.random.default_rng(5)
  cache = rng.normal(size=(2, LAYERS, B, S, W)).astype(np.float32)
  keys = rng.normal(size=(2, LAYERS, B, N, W)).astype(np.float32)
  paths = [random_paths(rng) for _ in range(2)]
  path, length = (np.stack(x) for x in zip(*paths, strict=True))
  start = np.array([[0, 1, 5, 20], [3, 38, 0, 7]], np.int32)
  mapped = jax.vmap(ops.compact)(cache, keys, path, length, start)
  for i in range(2):
    alone = compact(cache[i], keys[i], path[i], length[i], start[i])
    np.testing.assert_array_equal(mapped[i], alone)


def test_errors_name_the_argument():
  cache, keys = jnp.zeros((2, 1, 8, 3)), jnp.zeros((2, 1, 5, 3))
  path, one = jnp.zeros((1, 4), jnp.int32), jnp.ones((1,), jnp.int32)
  with pytest.raises(ValueError, match=r"tree_keys \(2, 1, 5, 2\) must be"):
    ops.compact(cache, keys[..., :2], path, one, one)
  with pytest.raises(ValueError, match="bfloat16"):
    ops.compact(cache, keys.astype(jnp.bfloat16), path, one, one)
  with pytest.raises(ValueError, match=r"path \(2, 4\)"):
    ops.compact(cache, keys, jnp.zeros((2, 4), jnp.int32), one, one)
  with pytest.raises(ValueError, match=r"length \(2,\)"):
    ops.compact(cache, keys, path, jnp.ones((2,), jnp.int32), one)
