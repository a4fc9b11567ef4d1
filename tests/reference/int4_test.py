from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax import reference
from kdtree_jax.checkpoint import int4
from kdtree_jax.ops import int4_weight


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("N", "K"), [(16, 64), (6, 32), (40, 160), (34, 96)])
def test_tiles_are_put_together_as_they_are_taken_apart(N: int, K: int, gated: bool):
  rng = np.random.default_rng((N, K))
  values = rng.integers(-8, 8, (N, K)).astype(np.int8)
  scales = rng.normal(size=(N, K // 32)).astype(ml_dtypes.bfloat16)
  tiles = reference.pack_int4(values, scales, gated)
  got_values, got_scales = reference.unpack_int4(tiles, K, N, gated)
  np.testing.assert_array_equal(got_values, values)
  np.testing.assert_array_equal(got_scales, scales.astype(np.float32))
  # Filler too is what the other packer makes.
  want = int4_weight.pack_tiles(int4.pack_int4(values), scales, gated)
  np.testing.assert_array_equal(tiles, want)
