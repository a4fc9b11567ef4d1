"""The attention kernel for Hopper: what is its own, and where it is chosen.

`tree_attention_cuda_test.py` runs the tests of the op against it too.
"""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.ops import _tree_attention_cuda
from tests.ops.custom_calls import assert_same_bits
from tests.ops.tree_attention_cases import (
  B,
  as_dtype,
  assert_within_bound,
  launched,
  lowered,
  make_case,
  small,
)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [48, 128, 1024, 4096])
@pytest.mark.parametrize(
  "shape", [(64, 1), (64, 5), (64, 6), (64, 10), (128, 3), (24, 2)], ids=str
)
def test_the_blocks_that_share_a_chunk_do_not_matter(shape, chunk):
  """Of the kernel for Hopper: many rounds, odd numbers of tiles, of pairs of blocks.

  With 5, 6 and 10 nodes and chunks of 128 there are more chunks than an H200 has
  multiprocessors, and some are left over, which clusters of 8, 2 and 4 share.
  """
  H, N = shape
  base = make_case((H, N, 576, 512), "hopper")
  keys = 5000
  rng = np.random.default_rng([7, H, N])
  cache = as_dtype(rng.normal(size=(B, keys, 576)), "hopper")
  lengths = np.array([0, 33, 4090, keys - N], np.int32)
  case = dataclasses.replace(base, cache=cache, lengths=lengths, chunk=chunk)
  whole = launched(case, blocks_per_item=1)
  assert_within_bound(case, whole)
  assert_same_bits(whole, case.run())
  for blocks in (2, 4, 8):
    for _ in range(3):
      after = launched(case, blocks_per_item=blocks)
      assert_same_bits(whole, after, f"{blocks} blocks")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [8, 1032, 1544, 2056, 2100, 2560])
def test_one_sequence_whose_last_chunk_is_hardly_begun(length):
  """More items than multiprocessors; that chunk's come last, or in turn (1,544)."""
  base = make_case((64, 40, 576, 512), "hopper")
  cache = np.random.default_rng(length).normal(size=(1, 2600, 576))
  cache[:, length:] = np.nan
  one = {k: v[:1] for k, v in base.arrays().items()}
  one |= {"cache": as_dtype(cache, "hopper"), "lengths": np.array([length], np.int32)}
  case = dataclasses.replace(base, **one, chunk=512)
  whole = launched(case, blocks_per_item=1)
  assert_within_bound(case, whole)
  assert_same_bits(whole, launched(case, blocks_per_item=2))
  assert_same_bits(whole, case.run())


@pytest.mark.gpu
def test_the_kernel_for_hopper_is_chosen_where_its_blocks_are_full():
  """Then "auto" has its bits, and where heads are few the portable kernel's."""
  for heads, kernel in ((64, "hopper"), (8, "portable")):
    case = make_case((heads, 7, 576, 512), "hopper")
    assert kernel == _tree_attention_cuda.kernel_on(jax.devices()[0], heads=heads)
    auto = launched(dataclasses.replace(case, kernel="auto"))
    named = dataclasses.replace(case, kernel=kernel).run()
    assert_same_bits(named, auto)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 6])
def test_rows_of_infinite_and_huge_scores_on_hopper(N):
  """As the portable kernel: what is not finite is so in the same elements."""
  base = make_case((64, N, 576, 512), "hopper")
  q, cache = base.q.copy(), base.cache.copy()
  q[:, :, 3] = -np.inf
  q[:, :, 5, 2] = np.nan
  q[:, :, 9] *= 1e3
  cache[2, 100, 5] = np.nan
  cache[3, 17, 7] = np.inf
  outs = {
    kernel: dataclasses.replace(base, kernel=kernel).run(q=q, cache=cache)
    for kernel in ("portable", "hopper")
  }
  finite = np.isfinite(outs["portable"].astype(np.float32))
  np.testing.assert_array_equal(finite, np.isfinite(outs["hopper"].astype(np.float32)))
  assert finite.any() and not finite.all()


def test_a_kernel_can_be_named():
  kimi = small(W=576, dtype="bfloat16")
  assert "kernel = 0 : i64" in lowered(kimi, implementation="cuda", value_dim=512)
  for i, kernel in enumerate(("auto", "portable", "hopper")):
    text = lowered(kimi, implementation="cuda", kernel=kernel, value_dim=512)
    assert f"kernel = {i} : i64" in text
  for arrays, settings, says in (
    (kimi, {"value_dim": 64}, "W = 576 and value_dim = 512; they are 576 and 64"),
    (kimi, {"value_dim": 512, "scale": -1.0}, "scales above 0, .* scale = -1.0"),
    (small(W=576), {"value_dim": 512}, "bfloat16; .* are float32"),
  ):
    with pytest.raises(ValueError, match=f"kernel = 'hopper' cannot run: it .*{says}"):
      lowered(arrays, kernel="hopper", **settings)
  with pytest.raises(ValueError, match="kernel = 'best' must be one of auto, portable"):
    lowered(kimi, kernel="best")


def test_which_kernel_a_gpu_gets(monkeypatch):
  info = types.SimpleNamespace(architectures=("sm_90a", "sm_120"))
  monkeypatch.setattr(_tree_attention_cuda._library, "build_info", lambda: info)
  h200, rtx = (types.SimpleNamespace(compute_capability=c) for c in ("9.0", "12.0"))
  on = _tree_attention_cuda.kernel_on
  assert _tree_attention_cuda.runs_hopper(h200)
  assert on(h200) == on(h200, heads=128) == "hopper"
  assert on(rtx) == "portable"
  for other in ({"heads": 8}, {"dtype": jnp.float32}, {"width": 80}, {"scale": 0.0}):
    assert on(h200, **other) == "portable"
  assert "hopper for bfloat16" in _tree_attention_cuda.describe_kernel(h200)
  info.architectures = ("sm_90",)
  assert on(h200) == _tree_attention_cuda.describe_kernel(h200) == "portable"
