from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.drafter.attention import (
  cached_attention,
  chunked_attention,
  dense_attention,
  whole_cache_attention,
)

BATCH, ROWS, HEADS, KV_HEADS, DIM, SIZE = 3, 6, 4, 2, 8, 70
LENGTHS = np.array([0, 33, SIZE])

# f32 against f64: outputs are averages of values below 4, over at most SIZE + ROWS
# products of rounding 2**-24 each, which enter once as scores (through exp, scores
# below 8) and once as sums: 80 * 2**-24 * 4 * 2 < 4e-5, and far less when the
# roundings do not conspire.
TOLERANCE = 4e-5


def _inputs(seed: int = 0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  q = normal(BATCH, ROWS, HEADS, DIM)
  own_keys = normal(BATCH, ROWS, KV_HEADS, DIM)
  own_values = normal(BATCH, ROWS, KV_HEADS, DIM)
  cache_keys = normal(2, BATCH, SIZE, KV_HEADS, DIM)
  cache_values = normal(2, BATCH, SIZE, KV_HEADS, DIM)
  return q, own_keys, own_values, cache_keys, cache_values


def _naive(
  q, own_keys, own_values, context_keys, context_values, start, window, causal
):
  """One sequence in float64: concatenated keys, one softmax per row and head."""
  keys = np.concatenate([context_keys[:start], own_keys]).astype(np.float64)
  values = np.concatenate([context_values[:start], own_values]).astype(np.float64)
  out = np.zeros(q.shape)
  for row in range(len(q)):
    distance = start + row - np.arange(len(keys))
    seen = np.abs(distance) < (np.inf if window is None else window)
    seen &= (distance >= 0) | (not causal)
    for head in range(HEADS):
      kv = head // (HEADS // KV_HEADS)
      scores = keys[seen, kv] @ q[row, head].astype(np.float64) * DIM**-0.5
      weights = np.exp(scores - scores.max())
      out[row, head] = weights / weights.sum() @ values[seen, kv]
  return out


@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@pytest.mark.parametrize("window", [None, 1, 3, 20, 71, 200])
@pytest.mark.parametrize(
  "form",
  [
    cached_attention,
    whole_cache_attention,
    lambda *args, **kwargs: chunked_attention(*args, chunk=16, **kwargs),
    lambda *args, **kwargs: chunked_attention(*args, chunk=128, **kwargs),
  ],
  ids=["cached", "whole", "chunks of 16", "one chunk"],
)
def test_every_form_agrees_with_concatenated_keys(form, window, causal):
  q, own_keys, own_values, cache_keys, cache_values = _inputs()
  out = jax.jit(lambda *args: form(*args, 1, LENGTHS, window=window, causal=causal))(
    q, own_keys, own_values, cache_keys, cache_values
  )
  for b, start in enumerate(LENGTHS):
    expected = _naive(
      q[b],
      own_keys[b],
      own_values[b],
      cache_keys[1, b],
      cache_values[1, b],
      start,
      window,
      causal,
    )
    np.testing.assert_allclose(out[b], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("form", [chunked_attention, whole_cache_attention])
def test_rows_beyond_the_length_are_never_read(form, window):
  q, own_keys, own_values, cache_keys, cache_values = _inputs()
  call = jax.jit(
    lambda keys, values: form(
      q, own_keys, own_values, keys, values, 1, jnp.asarray(LENGTHS), window=window
    )
  )
  stale = np.arange(SIZE)[None, :, None, None] >= LENGTHS[:, None, None, None]
  garbage = [np.where(stale, np.nan, x) for x in (cache_keys, cache_values)]
  clean = [np.where(stale, 0, x) for x in (cache_keys, cache_values)]
  np.testing.assert_array_equal(call(*garbage), call(*clean))


@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@pytest.mark.parametrize("window", [None, 4, 25])
def test_many_blocks_in_one_pass(window, causal):
  q, own_keys, own_values, cache_keys, cache_values = _inputs()
  anchors = np.array([[0, 3, 60], [5, 5, 6], [1, 2, SIZE - 1]])
  rng = np.random.default_rng(1)
  q, own_keys, own_values = (
    rng.normal(size=(BATCH, 3, *x.shape[1:])).astype(np.float32)
    for x in (q, own_keys, own_values)
  )
  out = jax.jit(
    lambda *args: dense_attention(*args, anchors, window=window, causal=causal)
  )(q, own_keys, own_values, cache_keys[0], cache_values[0])
  for b in range(BATCH):
    for a, start in enumerate(anchors[b]):
      expected = _naive(
        q[b, a],
        own_keys[b, a],
        own_values[b, a],
        cache_keys[0, b],
        cache_values[0, b],
        start,
        window,
        causal,
      )
      np.testing.assert_allclose(out[b, a], expected, rtol=0, atol=TOLERANCE)


def test_bf16_accumulates_in_f32():
  inputs = [jnp.asarray(x, jnp.bfloat16) for x in _inputs()]
  call = jax.jit(lambda *args: cached_attention(*args, 0, jnp.asarray(LENGTHS)))
  out = call(*inputs)
  assert out.dtype == jnp.bfloat16
  exact = call(*(x.astype(jnp.float32) for x in inputs))
  # Weights and result are rounded to bf16 (2**-9 each, of values below 4); sums
  # accumulated in bf16 would lose some 2**-9 per term instead.
  np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0, atol=2 * 4 * 2**-9)
