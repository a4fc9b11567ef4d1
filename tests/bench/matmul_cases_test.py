"""Cases of the kernels suite that multiply by weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.bench import kernels, matmul_cases
from kdtree_jax.bench.timing import Ceilings
from kdtree_jax.ops.int4_weight import Int4Weight
from tests.bench.kernels_test import lowered
from tests.ops.custom_calls import need_library

SMALL = {"sets": 2, "calls": 2, "xla_calls": 2}
LIMITS = Ceilings(bytes_per_second=1e9, flops_per_second=1e12, link_us=0.5)
GROUPED = matmul_cases.grouped(5, groups=4, depth=64, features=16, **SMALL)
ROUTED = matmul_cases.routed_experts(3, 24, 2, 64, 32, **SMALL)


def test_the_rows_bars_and_floors_of_the_document():
  cases = matmul_cases.standard()
  assert [(c.op, c.bar_us) for c in cases] == [
    *[("matmul", 50)] * 5,
    ("grouped_matmul", 20),
    ("grouped_matmul", 65),
    ("grouped_matmul", 290),
    ("routed_experts", 65),
    ("routed_experts", 220),
    ("routed_experts", 735),
    ("routed_experts", 1910),
  ]
  assert len({c.shape for c in cases}) == len(cases)
  hopper = Ceilings(4.3e12, 760e12, 0)
  floors = [hopper.floor_us(c.bytes_moved, c.flops) for c in cases]
  # The document's, whose routing was one draw, not the expectation.
  want = [41, 41, 41, 41, 41, 7, 48, 232, 46, 184, 622, 1625]
  np.testing.assert_allclose(floors, want, rtol=0.06)


def test_bytes_of_weights_are_those_that_are_reached():
  one = 24 * (4 * 1 + 4 * 1) * 576 / 24  # tiles of gate and up, and of down
  reached = matmul_cases.expected_groups(24, 3, 2)
  assert ROUTED.bytes_moved == round(reached * one + 4 * 3 * 64)
  assert ROUTED.flops == 2 * 3 * 2 * 3 * 64 * 32
  assert matmul_cases.expected_groups(384, 1, 8) == pytest.approx(8)
  assert matmul_cases.expected_groups(48, 1) == pytest.approx(1)


def test_rows_are_spread_over_groups_and_differ_by_set():
  sets = [GROUPED.inputs(jax.random.key(seed)) for seed in range(8)]
  assert {int(sizes.sum()) for _, sizes in sets} == {5}
  assert len({tuple(sizes.tolist()) for _, sizes in sets}) > 1
  _, _, ids = ROUTED.inputs(jax.random.key(0))
  assert ids.shape == (3, 2)
  assert all(len(set(row)) == 2 and 0 <= min(row) for row in ids.tolist())
  assert int(ids.max()) < 24


def test_weights_are_made_once_and_keep_the_scale():
  gate_up, down = ROUTED.shared(jax.random.key(0))
  assert isinstance(gate_up, Int4Weight) and gate_up.shape == (24, 64, 64)
  assert gate_up.gated and not down.gated and down.shape == (24, 32, 64)
  x, weights, ids = ROUTED.inputs(jax.random.key(0))
  out = ROUTED.call(gate_up, down, (x, weights, ids), "xla")
  assert out.shape == (3, 64) and bool(jnp.isfinite(out).all())
  assert 0.05 < float(out.astype(jnp.float32).std()) < 2


def test_what_xla_cannot_hold_is_not_timed():
  case = matmul_cases.routed_experts(2, 24, 2, 64, 32, no_xla="too large", **SMALL)
  report = kernels.run([GROUPED, ROUTED, case], LIMITS, runs=1, seconds=1e-4)
  first, second, third = report["measurements"]
  assert first["xla"]["us"] > 0 and second["xla"]["us"] > 0
  assert third["xla"] == {"missing": "not timed: too large"}
  assert not kernels.failed(report)
  assert "not timed: too large" in kernels.render(report)


def test_dense_products():
  case = matmul_cases.dense(3, 64, 32, **SMALL)
  (m,) = kernels.run([case], LIMITS, runs=1, seconds=1e-4)["measurements"]
  assert m["xla"]["us"] > 0
  assert m["bytes"] == 2 * (64 * 32 + 3 * (64 + 32))


def test_every_row_can_be_lowered_for_cuda():
  need_library()
  for case in matmul_cases.standard():
    if (missing := built(case.op)) is not None:
      pytest.skip(missing)
    assert "@kdtree_jax." in lowered(case), case.shape


def built(op: str) -> str | None:
  """Why an op has no CUDA form here, GPU or not."""
  from kdtree_jax.ops import _implementation

  try:
    _implementation.resolve(op, "cuda")
  except NotImplementedError as error:
    return str(error)
  return None
