"""Int4 tiles: the documented layout, round trips, exact values, bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.checkpoint import Int4Tensor, dequantize, quantize
from kdtree_jax.checkpoint.int4 import pack_int4, unpack_int4
from kdtree_jax.ops import int4_weight

BF16 = ml_dtypes.bfloat16

# G, N, K, gated: whole tiles, then ends inside of a tile both ways.
SHAPES = [
  (2, 32, 128, False),
  (2, 32, 128, True),
  (3, 21, 96, False),
  (2, 26, 32, True),
  (1, 2, 32, True),
  (1, 1, 160, False),
]
shapes = pytest.mark.parametrize(("G", "N", "K", "gated"), SHAPES)


def random_tensor(G: int, N: int, K: int, seed: int = 0) -> Int4Tensor:
  """All 16 values and scales of many sizes and both signs."""
  rng = np.random.default_rng(seed)
  packed = rng.integers(0, 256, (G, N, K // 2), dtype=np.uint8)
  scales = rng.normal(size=(G, N, K // 32)) * 2.0 ** rng.integers(
    -9, 9, (G, N, K // 32)
  )
  return Int4Tensor(packed, scales.astype(BF16))


def tiles_by_hand(tensor: Int4Tensor, group: int, gated: bool) -> np.ndarray:
  """One group's tiles by the words of matmul.h, a nibble at a time."""
  _, N, K = tensor.shape
  values = unpack_int4(tensor.packed[group]).tolist()
  bits = tensor.scales[group].view(np.uint16).tolist()

  def feature(R: int, row: int) -> int | None:
    if not gated:
      return 16 * R + row if 16 * R + row < N else None
    n = 8 * R + row % 8
    return (row // 8) * (N // 2) + n if n < N // 2 else None

  tiles = np.zeros((-(-N // 16), -(-K // 64), 576), np.uint8)
  for R in range(tiles.shape[0]):
    for C in range(tiles.shape[1]):
      tile = tiles[R, C]
      for lane in range(32):
        g, t = lane // 4, lane % 4
        for j in range(4):
          word = 0
          order = [
            (row, k + parity)
            for parity in (0, 1)
            for row, k in (
              (g, 2 * t),
              (g + 8, 2 * t),
              (g, 2 * t + 8),
              (g + 8, 2 * t + 8),
            )
          ]
          for position, (row, k) in enumerate(order):
            n, at = feature(R, row), 64 * C + 16 * j + k
            value = values[n][at] if n is not None and at < K else 0
            word |= (value + 8) << (4 * position)
          start = 16 * lane + 4 * j
          tile[start : start + 4] = np.frombuffer(word.to_bytes(4, "little"), np.uint8)
      for g in range(8):
        for s in range(2):
          for h in range(2):
            n, at = feature(R, g + 8 * h), 2 * C + s
            scale = bits[n][at] if n is not None and at < K // 32 else 0
            start = 512 + 8 * g + 4 * s + 2 * h
            tile[start : start + 2] = np.frombuffer(
              scale.to_bytes(2, "little"), np.uint8
            )
  return tiles


@shapes
def test_the_layout_is_the_documented_one(G, N, K, gated):
  tensor = random_tensor(G, N, K)
  weight = int4_weight.pack(tensor, gated)
  assert weight.shape == (G, K, N) and weight.gated is gated
  assert weight.tiles.dtype == np.uint8
  for group in range(G):
    np.testing.assert_array_equal(
      weight.tiles[group], tiles_by_hand(tensor, group, gated)
    )


@shapes
def test_tiles_packed_on_the_device_are_the_same(G, N, K, gated):
  tensor = random_tensor(G, N, K, 1)
  pack = jax.jit(int4_weight.pack_tiles, static_argnums=2)
  for group in range(G):
    got = pack(jnp.asarray(tensor.packed[group]), tensor.scales[group], gated)
    want = int4_weight.pack_tiles(tensor.packed[group], tensor.scales[group], gated)
    np.testing.assert_array_equal(got, want)


@shapes
def test_unpack_is_the_inverse(G, N, K, gated):
  tensor = random_tensor(G, N, K, 2)
  values, scales = int4_weight.unpack(int4_weight.pack(tensor, gated))
  np.testing.assert_array_equal(pack_int4(values), tensor.packed)
  np.testing.assert_array_equal(scales.view(np.uint16), tensor.scales.view(np.uint16))


@shapes
def test_the_reference_reads_the_same_values(G, N, K, gated):
  tensor = random_tensor(G, N, K, 3)
  weight = int4_weight.pack(tensor, gated)
  for group in range(G):
    values, scales = reference.unpack_int4(weight.tiles[group], K, N, gated)
    np.testing.assert_array_equal(pack_int4(values), tensor.packed[group])
    np.testing.assert_array_equal(scales, tensor.scales[group].astype(np.float32))


@shapes
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_floats_are_exact_or_rounded_once(G, N, K, gated, dtype):
  tensor = random_tensor(G, N, K, 4)
  weight = int4_weight.pack(tensor, gated)
  want = dequantize(tensor, dtype).swapaxes(1, 2)
  got = jax.jit(lambda w: int4_weight.dequantize(w, dtype))(weight)
  assert got.dtype == dtype
  bits = np.uint32 if dtype == np.float32 else np.uint16
  np.testing.assert_array_equal(np.asarray(got).view(bits), want.view(bits))
  for group in range(G):
    got = reference.dequantize_int4(weight.tiles[group], K, N, gated, dtype)
    np.testing.assert_array_equal(got, want[group])


def test_bf16_is_rounded_also_where_it_is_widened_again():
  """A compiler that drops the casts there and back would leave float32 values."""
  tensor = random_tensor(2, 32, 64, 5)

  @jax.jit
  def widened(weight):
    return int4_weight.dequantize(weight, jnp.bfloat16).astype(jnp.float32)

  weight = int4_weight.pack(tensor)
  # Not every compiler drops them, so the program has to say it.
  assert "reduce_precision" in widened.lower(weight).as_text()
  got = widened(weight)
  want = dequantize(tensor, BF16).astype(np.float32).swapaxes(1, 2)
  np.testing.assert_array_equal(got, want)
  assert (want != dequantize(tensor).swapaxes(1, 2)).any()


def test_groups_can_be_taken():
  tensor = random_tensor(4, 16, 64, 6)
  weight = int4_weight.pack(tensor)
  some = int4_weight.take(jax.tree.map(jnp.asarray, weight), jnp.array([2, 0, 2]))
  want = dequantize(tensor).swapaxes(1, 2)[[2, 0, 2]]
  np.testing.assert_array_equal(int4_weight.dequantize(some, np.float32), want)


@pytest.mark.parametrize(("G", "N", "K", "gated"), [(3, 512, 256, True), *SHAPES[2:5]])
def test_random_weights_are_valid_and_of_the_asked_size(G, N, K, gated):
  key = jax.random.key(7)
  make = jax.jit(int4_weight.random_int4, static_argnums=(1, 2, 3, 4, 5))
  weight = make(key, G, K, N, gated, 0.25)
  int4_weight.check("weight", weight)
  values, scales = int4_weight.unpack(weight)
  # What the tiles hold besides is what packing puts there.
  again = int4_weight.pack(Int4Tensor(pack_int4(values), scales), gated)
  np.testing.assert_array_equal(again.tiles, weight.tiles)
  assert values.min() >= -7 and (scales > 0).all()
  floats = np.asarray(int4_weight.dequantize(weight, np.float32))
  if floats.size > 100_000:
    # The standard errors of mean and deviation are 0.25 / sqrt(size): 0.0004.
    assert abs(floats.mean()) < 0.002 and floats.std() == pytest.approx(0.25, rel=0.05)
    assert set(np.unique(values)) == set(range(-7, 8))
    assert (floats[0] != floats[1]).mean() > 0.8


def test_a_quantised_weight_survives():
  weight = np.random.default_rng(8).normal(size=(2, 48, 96)).astype(np.float32)
  tensor = quantize(weight)
  got = int4_weight.dequantize(int4_weight.pack(tensor, gated=True), np.float32)
  np.testing.assert_array_equal(got, dequantize(tensor).swapaxes(1, 2))
  # Half a step of amax / 7.
  assert np.abs(np.asarray(got).swapaxes(1, 2) - weight).max() < 0.51 * 4.5 / 7


def tensor_of(packed_shape, scales_shape) -> Int4Tensor:
  return Int4Tensor(np.zeros(packed_shape, np.uint8), np.ones(scales_shape, BF16))


@pytest.mark.parametrize(
  ("tensor", "gated", "message"),
  [
    (tensor_of((4, 32), (4, 2)), False, r"must be \[G, N, K\]"),
    (tensor_of((1, 4, 20), (1, 4, 1)), False, "depth = 40 .* multiple of 32"),
    (tensor_of((1, 4, 32), (1, 4, 4)), False, r"scales must be \[4, 2\]"),
    (tensor_of((1, 4, 64), (1, 4, 2)), False, r"scales must be \[4, 4\]"),
    (tensor_of((1, 5, 32), (1, 5, 2)), True, "features = 5 .* even"),
  ],
)
def test_bad_tensors(tensor, gated, message):
  with pytest.raises(ValueError, match=message):
    int4_weight.pack(tensor, gated)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 2.0**43, 2.0**-79])
def test_scales_must_be_of_a_size(bad):
  tensor = random_tensor(2, 4, 64)
  tensor.scales[1, 3, 1] = bad
  with pytest.raises(ValueError, match=r"scales hold .* 0 or between 2\^-78 and 2\^42"):
    int4_weight.pack(tensor)


@pytest.mark.parametrize("good", [0.0, 2.0**42, -(2.0**-78)])
def test_scales_at_the_limits(good):
  tensor = random_tensor(2, 4, 64)
  tensor.scales[1, 3, 1] = good
  _, scales = int4_weight.unpack(int4_weight.pack(tensor))
  assert scales[1, 3, 1] == good


def test_bad_arrays_of_one_group():
  packed, scales = np.zeros((4, 32), np.uint8), np.ones((4, 2), BF16)
  with pytest.raises(ValueError, match="packed must be uint8"):
    int4_weight.pack_tiles(packed.astype(np.int8), scales)
  with pytest.raises(ValueError, match="packed must be uint8"):
    int4_weight.pack_tiles(packed[None], scales)
  with pytest.raises(ValueError, match="scales must be bfloat16"):
    int4_weight.pack_tiles(packed, scales.astype(np.float32))


def test_bad_weights():
  good = int4_weight.pack(random_tensor(2, 16, 64))
  with pytest.raises(ValueError, match=r"weight.tiles is uint8 \[2, 1, 1, 576\]"):
    int4_weight.dequantize(int4_weight.Int4Weight(good.tiles, 128, 16), np.float32)
  with pytest.raises(ValueError, match=r"gate_up.tiles is int32"):
    tiles = good.tiles.astype(np.int32)
    int4_weight.check("gate_up", int4_weight.Int4Weight(tiles, 64, 16))
  with pytest.raises(ValueError, match="weight: depth = 48 .* multiple of 32"):
    int4_weight.unpack(int4_weight.Int4Weight(good.tiles, 48, 16))
  with pytest.raises(ValueError, match="dtype = float16 is not allowed"):
    int4_weight.dequantize(good, np.float16)
  with pytest.raises(ValueError, match="depth = 40 .* multiple of 32"):
    int4_weight.random_int4(jax.random.key(0), 1, 40, 16)
