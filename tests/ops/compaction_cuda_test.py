"""compact's custom call against the XLA form, in place and inside a loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.compaction_test import LAYERS, A, B, N, S, garbage, random_paths, rounds
from tests.ops.custom_calls import assert_same_bits, cuda_text, replayed

compact = functools.partial(ops.compact, implementation="cuda")
compact_xla = jax.jit(functools.partial(ops.compact, implementation="xla"))

# Rows of whole 16-byte vectors, of whole words, and of halves and bytes alone.
WIDTHS = [
  ("float32", 576),
  ("bfloat16", 576),
  ("float32", 5),
  ("bfloat16", 6),
  ("bfloat16", 7),
  ("int8", 3),
]


def random_case(rng: np.random.Generator, dtype: str, width: int):
  shapes = (LAYERS, B, S, width), (LAYERS, B, N, width)
  return tuple(jnp.asarray(20 * rng.normal(size=s), dtype) for s in shapes)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_bits_of_the_xla_form(dtype, width):
  rng = np.random.default_rng(width)
  cache, keys = random_case(rng, dtype, width)
  run = jax.jit(compact)
  for case in range(100):
    if case % 2:
      path, length = random_paths(rng)
      start = rng.integers(0, S + 4, B).astype(np.int32)
    else:
      path, length, start = garbage(rng)
    want = compact_xla(cache, keys, path, length, start)
    assert_same_bits(want, run(cache, keys, path, length, start))


@pytest.mark.gpu
def test_every_bit_pattern_is_copied():
  """NaN payloads, infinities, subnormals and signed zeros."""
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, (LAYERS, B, N, 64), dtype=np.uint32)
  keys = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)
  path = jnp.tile(jnp.arange(A), (B, 1))
  full, zero = jnp.full((B,), A), jnp.zeros((B,), jnp.int32)
  got = replayed(compact)(jnp.zeros((LAYERS, B, S, 64)), keys, path, full, zero)
  assert np.asarray(got)[:, :, :A].tobytes() == bits[:, :, :A].tobytes()
  assert not np.asarray(got)[:, :, A:].any()


@pytest.mark.gpu
def test_replay_keeps_the_argument():
  """Without donation the caller's cache is left alone, call after call."""
  rng = np.random.default_rng(1)
  cache, keys = random_case(rng, "bfloat16", 576)
  path, length = random_paths(rng)
  before = np.asarray(cache).tobytes()
  args = (cache, keys, path, length, np.arange(B, dtype=np.int32))
  assert_same_bits(compact_xla(*args), replayed(compact)(*args))
  assert np.asarray(cache).tobytes() == before


@pytest.mark.gpu
def test_donated_it_is_in_place():
  rng = np.random.default_rng(2)
  cache, keys = random_case(rng, "float32", 64)
  path, length = random_paths(rng)
  start = jnp.zeros((B,), jnp.int32)
  run = jax.jit(compact, donate_argnums=0)
  pointer = cache.unsafe_buffer_pointer()
  for _ in range(5):  # two plain calls, then maybe captured ones
    expected = compact_xla(cache, keys, path, length, start)
    cache = run(cache, keys, path, length, start)
    assert cache.unsafe_buffer_pointer() == pointer
    assert_same_bits(expected, cache)
    start = start + jnp.asarray(length)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4])
def test_a_loop_carries_one_cache(batch):
  """No copy of the cache, neither before nor in the loop, nor as a temporary."""
  cache = jnp.zeros((6, batch, 4096, 48))
  keys = jnp.ones((6, batch, N, 48))
  path = jnp.tile(jnp.arange(A), (batch, 1))
  length, start = jnp.full((batch,), 5), jnp.zeros((batch,), jnp.int32)
  program = jax.jit(rounds, donate_argnums=0)
  compiled = program.lower(cache, keys, path, length, start, 10).compile()
  text = compiled.as_text()
  assert 'custom_call_target="kdtree_jax.compact"' in text
  assert f"f32[6,{batch},4096,48]{{3,2,1,0}} copy(" not in text
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= cache.nbytes
  assert memory.temp_size_in_bytes < cache.nbytes // 4
  pointer = cache.unsafe_buffer_pointer()
  for _ in range(3):
    start = jnp.zeros((batch,), jnp.int32)
    _, cache, end = compiled(cache, keys, path, length, start, 10)
    assert cache.unsafe_buffer_pointer() == pointer
  assert (np.asarray(end) == 50).all()
  assert (np.asarray(cache)[:, :, :50] == 1).all()
  assert not np.asarray(cache)[:, :, 50:].any()


@pytest.mark.gpu
def test_a_sequence_does_not_depend_on_its_neighbours():
  rng = np.random.default_rng(3)
  cache, keys = random_case(rng, "float32", 64)
  path, length = random_paths(rng)
  start = np.array([0, 7, 5, 38], np.int32)
  order = np.array([2, 0, 3, 1])
  run = jax.jit(compact)
  straight = np.asarray(run(cache, keys, path, length, start))
  permuted = run(
    cache[:, order], keys[:, order], path[order], length[order], start[order]
  )
  assert_same_bits(straight[:, order], permuted)


def test_the_program_for_cuda_aliases_the_cache():
  cache, keys = jnp.zeros((2, 3, 8, 4)), jnp.zeros((2, 3, 5, 4))
  path, ones = jnp.zeros((3, 6), jnp.int32), jnp.ones((3,), jnp.int32)
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
    text = cuda_text(
      lambda *x, i=implementation: ops.compact(*x, implementation=i),
      *(cache, keys, path, ones, ones),
    )
    assert text.count("@kdtree_jax.compact") == expected
    assert text.count("output_operand_alias<output_tuple_indices = []") == expected
    assert ("stablehlo.scatter" in text) != bool(expected)
