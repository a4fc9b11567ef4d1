"""Golden cases are what the JAX ops compute, and their bounds mean something."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.decoding.emit import Accepted, append
from kdtree_jax.decoding.state import DecodeState, Limits
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.ops import int4_weight
from kdtree_jax.ops.build_tree import tree_from_table
from kdtree_jax.ops.int4_weight import Int4Weight
from kdtree_jax.reference.golden import GoldenCase, golden_cases
from kdtree_jax.reference.golden.token_log_probs import exact_and_bound
from kdtree_jax.tree import Tree, ancestors

CASES = golden_cases(seed=5, small=True)
OPS = (
  "rope",
  "build_tree",
  "tree_ancestors",
  "tree_attention",
  "accept_tree",
  "compact",
  "rope_keys",
  "best_token",
  "token_log_probs",
  "emit",
  "rms_norm",
  "add_rms_norm",
  "route",
  "matmul",
  "head_matmul",
  "grouped_matmul",
  "routed_experts",
)


def of_op(op: str) -> list[GoldenCase]:
  return [case for case in CASES if case.op == op]


Outputs = dict[str, np.ndarray]


def tree_outputs(tree: Tree) -> Outputs:
  names = ("token_ids", "parents", "depths", "log_probs", "size")
  return {name: np.asarray(getattr(tree, name)) for name in names}


def angles_of(case: GoldenCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Positions, cos and sin: the case's tables, or a row for each token."""
  positions = case.inputs["positions"]
  if "cos" in case.inputs:
    return positions, case.inputs["cos"], case.inputs["sin"]
  frequencies = case.inputs["frequencies"]
  if case.attributes["float32_angles"]:
    frequencies = frequencies.astype(np.float32)
  angles = positions.astype(frequencies.dtype)[:, None] * frequencies
  angles, amplitude = angles.astype(np.float64), case.attributes["amplitude"]
  cos = (np.cos(angles) * amplitude).astype(np.float32)
  sin = (np.sin(angles) * amplitude).astype(np.float32)
  return np.arange(len(positions), dtype=np.int32), cos, sin


def run_rope(case: GoldenCase) -> Outputs:
  x = case.inputs["x"]
  positions, cos, sin = angles_of(case)
  rotate = jax.jit(ops.rope, static_argnames="interleave")
  out = rotate(
    x, positions[:, None], cos, sin, interleave=case.attributes["interleave"]
  )
  copied = case.inputs.get("copied")
  return {"out": np.asarray(out if copied is None else jnp.c_[copied, out])}


def run_build_tree(case: GoldenCase) -> Outputs:
  given = dict(case.inputs)
  names = [n for n in ("logits", "log_probs", "candidates") if n in given]
  build = ops.build_tree if names == ["logits"] else tree_from_table
  build = jax.jit(build, static_argnames=("budget", "rows"))
  arrays = [given[n] for n in [*names, "roots"]]
  limits = {n: given[n] for n in ("limit", "max_depth")}
  return tree_outputs(build(*arrays, **case.attributes, **limits))


def run_ancestors(case: GoldenCase) -> Outputs:
  parents, depths = case.inputs["parents"], case.inputs["depths"]
  zeros = jnp.zeros(parents.shape, jnp.int32)
  tree = Tree(zeros, parents, depths, zeros.astype(jnp.float32), zeros[:, 0])
  found = ancestors(tree, case.attributes["max_depth"])
  return {"ancestors": np.asarray(found)}


def run_attention(case: GoldenCase) -> Outputs:
  names = ("scale", "value_dim", "chunk")
  attend = jax.jit(ops.tree_attention, static_argnames=names)
  return {"out": np.asarray(attend(**case.inputs, **case.attributes))}


def run_accept(case: GoldenCase) -> Outputs:
  given = dict(case.inputs)
  targets = given.pop("target_tokens")
  zeros = np.zeros(targets.shape, np.int32)
  tree = Tree(depths=zeros, log_probs=zeros.astype(np.float32), **given)
  accept = jax.jit(ops.accept_tree, static_argnames="max_depth")
  found = accept(tree, targets, **case.attributes)
  return dict(zip(("path", "length", "bonus"), map(np.asarray, found), strict=True))


def run_compact(case: GoldenCase) -> Outputs:
  # As integers: on a CPU, XLA may make a quiet NaN of another one.
  dtype = case.inputs["cache"].dtype
  integers = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
  rows = {name: case.inputs[name].view(integers) for name in ("cache", "tree_keys")}
  cache = jax.jit(ops.compact)(**{**case.inputs, **rows})
  return {"cache": np.asarray(cache).view(dtype)}


def run_rope_keys(case: GoldenCase) -> Outputs:
  positions, cos, sin = angles_of(case)
  kv, weight = case.inputs["kv"], case.inputs["weight"]
  static = {name: case.attributes[name] for name in ("eps", "interleave")}
  keys = jax.jit(ops.rope_keys, static_argnames=("eps", "interleave"))
  return {
    "out": np.asarray(keys(kv[None], weight, positions[None], cos, sin, **static))[0]
  }


def run_best_token(case: GoldenCase) -> Outputs:
  return {"tokens": np.asarray(jax.jit(ops.best_token)(case.inputs["logits"]))}


def run_token_log_probs(case: GoldenCase) -> Outputs:
  found = jax.jit(ops.token_log_probs)(**case.inputs)
  return {"log_probs": np.asarray(found)}


def run_emit(case: GoldenCase) -> Outputs:
  given = dict(case.inputs)
  take = functools.partial(map, given.pop)
  accepted = Accepted(*take(field.name for field in dataclasses.fields(Accepted)))
  limits = Limits(*take(["stop_tokens", "capacity"]), budget=np.int32(0))
  B, M = given["tokens"].shape
  state = DecodeState(
    cache=LatentCache(np.zeros(1), given.pop("lengths")),
    drafter=(),
    sequence_ids=np.arange(B),
    logits=np.zeros((B, M, 0)),
    **given,
  )
  new, commit = jax.jit(append, static_argnums=3)(state, accepted, limits, "xla")
  found = {name: getattr(new, name) for name in given}
  found |= {"new_lengths": new.cache.lengths, "committed": commit.length}
  found |= {"kept": commit.kept, "path_tokens": commit.path_tokens}
  return {name: np.asarray(x) for name, x in found.items()}


def run_norm(case: GoldenCase) -> Outputs:
  x, weight, added = (case.inputs.get(name) for name in ("x", "weight", "added"))
  if added is None:
    norm = jax.jit(ops.rms_norm, static_argnames="eps")
    return {"out": np.asarray(norm(x, weight, **case.attributes))}
  norm = jax.jit(ops.add_rms_norm, static_argnames="eps")
  total, out = norm(x, added, weight, **case.attributes)
  return {"sum": np.asarray(total), "out": np.asarray(out)}


def run_route(case: GoldenCase) -> Outputs:
  given = dict(case.attributes)
  given["scoring"] = "softmax" if given.pop("softmax") else "sigmoid"
  choose = jax.jit(functools.partial(ops.route, **given))
  found = choose(case.inputs["logits"], case.inputs.get("bias"))
  return dict(
    zip(("experts", "weights", "scores"), map(np.asarray, found), strict=True)
  )


def weight_of(tiles: np.ndarray, depth: int, features: int, gated: bool) -> Any:
  """The op's operand: tiles with their sizes, or floats as they are."""
  if tiles.dtype != np.uint8:
    return tiles
  return Int4Weight(jnp.asarray(tiles), depth, features, gated)


def run_matmul(case: GoldenCase) -> Outputs:
  x, w, given = case.inputs["x"], case.inputs["w"], case.attributes
  if w.dtype == np.uint8:  # The op has no int4.
    packed = weight_of(w, x.shape[1], given["features"], given["gated"])
    w = int4_weight.dequantize(packed, x.dtype)[0]
  if given["gated"]:
    return {"out": np.asarray(jax.jit(ops.gated_matmul)(x, w))}
  out_dtype = jnp.float32 if given["out_float32"] else jnp.bfloat16
  product = functools.partial(
    ops.matmul, out_dtype=out_dtype, by_feature=given["by_feature"]
  )
  return {"out": np.asarray(jax.jit(product)(x, w))}


def run_head_matmul(case: GoldenCase) -> Outputs:
  return {"out": np.asarray(jax.jit(ops.head_matmul)(**case.inputs))}


def run_grouped_matmul(case: GoldenCase) -> Outputs:
  x, w, sizes = (case.inputs[name] for name in ("x", "w", "group_sizes"))
  w = weight_of(w, x.shape[1], case.attributes.get("features", 0), False)
  return {"out": np.asarray(jax.jit(ops.grouped_matmul)(x, w, sizes))}


def run_routed_experts(case: GoldenCase) -> Outputs:
  rows = [case.inputs[name] for name in ("x", "experts", "weights")]
  D, F = rows[0].shape[1], case.attributes["inner_width"]
  gate_up = weight_of(case.inputs["gate_up"], D, 2 * F, True)
  down = weight_of(case.inputs["down"], F, D, False)
  run = jax.jit(ops.routed_experts, static_argnames="experts_axis")
  axis = int(case.attributes["beside"])
  return {"out": np.asarray(run(*rows, gate_up, down, experts_axis=axis))}


RUN: dict[str, Callable[[GoldenCase], Outputs]] = {
  "rope": run_rope,
  "build_tree": run_build_tree,
  "tree_ancestors": run_ancestors,
  "tree_attention": run_attention,
  "accept_tree": run_accept,
  "compact": run_compact,
  "rope_keys": run_rope_keys,
  "best_token": run_best_token,
  "token_log_probs": run_token_log_probs,
  "emit": run_emit,
  "rms_norm": run_norm,
  "add_rms_norm": run_norm,
  "route": run_route,
  "matmul": run_matmul,
  "head_matmul": run_head_matmul,
  "grouped_matmul": run_grouped_matmul,
  "routed_experts": run_routed_experts,
}

# What callers may not pass, and only the kernels define.
UNDEFINED = {"starts before the cache", "counts before the text"} | {
  f"{kind}, sizes below 0 and beyond the rows" for kind in ("bf16", "int4", "float32")
}


def share_of_bound(case: GoldenCase, name: str, got: np.ndarray) -> float:
  """Largest error as a share of the bound; infinite where only one is NaN."""
  want, bound = case.outputs[name].astype(np.float64), case.bounds[name]
  got = got.astype(np.float64)
  same = (got == want) | (np.isnan(got) & np.isnan(want))
  with np.errstate(invalid="ignore", divide="ignore"):
    share = np.where(same, 0.0, np.abs(got - want) / bound)
  return float(np.max(np.nan_to_num(share, nan=np.inf), initial=0.0))


@pytest.mark.parametrize("op", OPS)
def test_the_jax_ops_agree(op: str):
  assert of_op(op)
  for case in of_op(op):
    if case.name in UNDEFINED:
      continue
    for name, got in RUN[op](case).items():
      want, rule = case.outputs[name], case.compare[name]
      assert got.shape == want.shape, case.name
      if rule == "bits":
        assert got.dtype == want.dtype, case.name
        assert got.tobytes() == want.tobytes(), (case.name, name)
      else:
        assert rule == "bound"
        assert share_of_bound(case, name, got) <= 1, (case.name, name)


def test_every_case_is_of_a_known_op_and_says_how_to_compare():
  assert {case.op for case in CASES} == set(OPS)
  for case in CASES:
    assert set(case.compare) == set(case.outputs), case.name
    named = {name for name, rule in case.compare.items() if rule == "bound"}
    assert set(case.bounds) == named, case.name


def test_the_same_seed_gives_the_same_bytes():
  again = golden_cases(seed=5, small=True)
  other = golden_cases(seed=6, small=True)

  def contents(cases: list[GoldenCase]) -> list[bytes]:
    return [
      array.tobytes()
      for case in cases
      for part in (case.inputs, case.outputs, case.bounds)
      for array in part.values()
    ]

  assert contents(again) == contents(CASES)
  assert contents(other) != contents(CASES)


@functools.cache
def full_attention() -> list[GoldenCase]:
  return [c for c in golden_cases(seed=5) if c.op == "tree_attention"]


def attention_of(case: GoldenCase, dtype, **changes) -> np.ndarray:
  """The reference in another dtype, or of other inputs."""
  given = {**case.inputs, **changes}
  attributes = (case.attributes["scale"], case.attributes["value_dim"])
  names = ("q", "cache", "tree_keys")
  rows = []
  for b, length in enumerate(case.inputs["lengths"]):
    arrays = [given[n][b].astype(dtype) for n in names]
    place = (case.inputs["ancestors"][b], case.inputs["depths"][b], length)
    rows.append(reference.tree_attention(*arrays, *place, *attributes))
  return np.stack(rows)


def test_the_bound_of_attention_holds_for_float32_and_is_not_idle():
  shares = []
  for case in full_attention():
    got = attention_of(case, np.float32).astype(case.inputs["q"].dtype)
    shares.append(share_of_bound(case, "out", got))
  assert max(shares) <= 1
  # Steep scores have the largest bounds for errors that rarely come together.
  assert np.median(shares) > 0.01
  assert min(shares) > 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bound_of_attention_finds_a_wrong_key(dtype: str):
  found = []
  for case in full_attention():
    # Steep scores leave a key no weight; the keys of "equal scores" count alike.
    if dtype not in case.name or "steep" in case.name:
      continue
    other = np.roll(case.inputs["tree_keys"], 1, axis=-1)
    got = attention_of(case, np.float64, tree_keys=other)
    found.append(share_of_bound(case, "out", got))
  assert len(found) > 5
  assert min(found) > 2


def test_the_bound_of_rope_keys_finds_a_feature_that_is_not_summed():
  found = []
  for case in of_op("rope_keys"):
    kv, weight = case.inputs["kv"], case.inputs["weight"]
    latent = len(weight)
    if latent == 1 or len(kv) == 0 or "not finite" in case.name:
      continue
    x = kv[:, :latent].astype(np.float64)
    mean_square = np.sum(x[:, 1:] ** 2, axis=-1, keepdims=True) / latent
    normed = (x / np.sqrt(mean_square + case.attributes["eps"])).astype(kv.dtype)
    got = case.outputs["out"].copy()
    got[:, :latent] = normed * weight
    found.append(share_of_bound(case, "out", got))
  assert len(found) > 20
  assert min(found) > 2


@pytest.mark.parametrize("vocab", [2, 97, 16384, 40_000])
def test_the_bound_of_log_probs_finds_a_logit_that_is_not_summed(vocab: int):
  rng = np.random.default_rng(vocab)
  for scale in (0.0, 1.0):
    logits = (scale * rng.standard_normal(vocab)).astype(np.float32)
    exact, bound = exact_and_bound(logits, 0)
    total = np.log(np.sum(np.exp(logits[:-1].astype(np.float64))))
    assert abs(logits[0] - total - exact) > 2 * bound


def test_texts_end_in_every_way():
  finish = dict.fromkeys(range(5), 0)
  for case in of_op("emit"):
    was, now = case.inputs["finish"], case.outputs["finish"]
    for reason in now[was == DecodeState.RUNNING].tolist():
      finish[reason] += 1
  assert min(finish.values()) > 5, finish


def test_trees_of_logits_do_not_hang_on_last_bits():
  rng = np.random.default_rng(0)
  seen = 0
  for case in of_op("build_tree"):
    if "logits" not in case.inputs:
      continue
    seen += 1
    budget, rows = case.attributes["budget"], case.attributes["rows"]
    for b, logits in enumerate(case.inputs["logits"]):
      x = logits.astype(np.float64)
      limit = np.clip(case.inputs["limit"][b], 0, budget)
      depth = np.clip(case.inputs["max_depth"][b], 0, len(x))
      k = min(budget, x.shape[1])
      ids = np.argsort(-x, axis=-1, kind="stable")[:, :k]
      with np.errstate(invalid="ignore"):
        top = x.max(-1)
        log_z = top + np.log(np.exp(x - top[:, None]).sum(-1))
        ulp = np.spacing(np.abs(log_z).astype(np.float32))
      for _ in range(20):
        # Any normaliser within 2 ulp.
        near = (log_z + ulp * rng.uniform(-2, 2, log_z.shape)).astype(np.float32)
        ordered = np.take_along_axis(logits.astype(np.float32), ids, axis=-1)
        with np.errstate(invalid="ignore"):
          table = ordered - near[:, None]
        root = int(case.inputs["roots"][b])
        tree = reference.build_tree(table[:depth], ids[:depth], int(limit), root)
        count = 1 + limit
        assert tree.size == case.outputs["size"][b], case.name
        for name in ("token_ids", "parents", "depths"):
          want = case.outputs[name][b]
          assert np.array_equal(getattr(tree, name), want[:count]), case.name
          assert np.all(want[count:rows] == (-1 if name == "parents" else 0))
        got = case.outputs["log_probs"].copy()
        got[b, :count] = tree.log_probs
        assert share_of_bound(case, "log_probs", got) <= 1, case.name
  assert seen > 8
