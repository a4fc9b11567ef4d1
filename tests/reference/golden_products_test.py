"""The bounds of the golden cases of norms, routers and products find mistakes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdtree_jax.reference.golden import GoldenCase
from tests.reference.golden_test import RUN, of_op, share_of_bound


def without_last_features(case: GoldenCase) -> GoldenCase:
  """The case with rows in which the last 32 values, or a 16th, are 0."""
  x = case.inputs["x"].copy()
  last = case.inputs["w"].shape[1] if case.op == "head_matmul" else x.shape[-1]
  x[..., max(last - max(32, last // 16), 0) : last] = 0
  return dataclasses.replace(case, inputs={**case.inputs, "x": x})


@pytest.mark.parametrize(
  "op", ["matmul", "head_matmul", "grouped_matmul", "routed_experts"]
)
def test_terms_that_are_missing(op: str):
  seen = 0
  for case in of_op(op)[::2]:
    want, rule = case.outputs["out"], case.compare["out"]
    if len(want) < 4 or not want.any():
      continue
    # A share of 2: each form may use up the bound.
    got = RUN[op](without_last_features(case))["out"]
    wrong = rule == "bits" and not np.array_equal(got, want)
    assert wrong or share_of_bound(case, "out", got) > 2, case.name
    seen += 1
  assert seen > 3


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_squares_that_are_missing(op: str):
  seen = 0
  for case in of_op(op):
    x, weight = case.outputs.get("sum", case.inputs["x"]), case.inputs["weight"]
    if x.size == 0 or x.shape[1] < 9 or "not finite" in case.name:
      continue
    wide = x.astype(np.float64)
    mean_square = np.sum(wide[:, 8:] ** 2, axis=-1, keepdims=True) / x.shape[1]
    normed = (wide / np.sqrt(mean_square + case.attributes["eps"])).astype(x.dtype)
    got = (normed * weight).astype(x.dtype)
    assert share_of_bound(case, "out", got) > 2, case.name
    seen += 1
  assert seen > 8


def test_scores_and_weights_of_a_neighbour():
  """The bounds are far below the differences between experts."""
  for case in of_op("route"):
    if len(case.inputs["logits"]) == 0 or case.inputs["logits"].shape[1] == 1:
      continue
    for name in ("weights", "scores"):
      got = np.roll(case.outputs[name], 1, axis=-1)
      assert share_of_bound(case, name, got) > 100, case.name


def test_every_number_of_rows_occurs():
  for op, name in (("matmul", "out"), ("routed_experts", "out")):
    rows = {len(case.outputs[name]) for case in of_op(op)}
    assert rows >= {0, 1, 8, 9, 17, 33, 64, 65}
  grouped = of_op("grouped_matmul")
  sizes = np.concatenate([case.inputs["group_sizes"] for case in grouped])
  assert set(sizes.tolist()) >= {0, 1, 8, 9, 17, 33, 64, 65}
