"""Wrappers and handlers of the custom calls fit together, and handlers refuse the rest.

The handlers are compiled for the CPU, with launchers that do nothing (`handlers.cc`).
Each wrapper then runs on the CPU as it would on a GPU, up to the launch; what it passes
is recorded and passed again with one thing wrong at a time (`handler_calls.py`). Needs
neither a GPU nor nvcc, but a C++ compiler and CUDA's headers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.ops import _library
from tests.custom_calls.handler_calls import (
  CASES,
  ERRORS,
  OPERANDS,
  RESULTS,
  Call,
  number,
  recorded,
)

# Sizes that no other array has, so that one more is right as well; by case or by op.
FREE: dict[str, set[tuple[str, int]]] = {
  "accept_tree": {("path", 1)},
  "ancestors": {("ancestors", 2)},
  "best_token": {("logits", 1)},
  "build_tree": {("logits", 1), ("logits", 2), ("workspace", 0)},
  "compact": {("tree_keys", 2), ("path", 1)},
  "emit": {("stop_tokens", 0)},
  "head_matmul": {("x", 2)},
  "head_matmul bf16": set(),  # In bfloat16 widths are whole multiples.
  "log_softmax_topk": {("logits", 1), ("logits", 2), ("workspace", 0)},
  "token_log_probs": {("logits", 2)},
  "tree_attention": {("cache", 0), ("cache", 2), ("ancestors", 2), ("messages", 0)},
}
# Arrays that say which sizes the others must have: one of the others is named then.
LEADING = {
  "accept_tree": {"token_ids"},
  "add_rms_norm": {"h"},
  "ancestors": {"parents"},
  "best_token": {"logits"},
  "build_tree": {"logits", "table", "token_ids"},
  "compact": {"cache", "path"},
  "emit": {"token_ids", "path", "tokens"},
  "grouped_matmul": {"x", "w", "group_sizes", "out"},
  "head_matmul": {"x", "w"},
  "log_softmax_topk": {"logits", "table"},
  "matmul": {"x", "w"},
  "matmul_chain": {"x", "w", "weight", "h", "out", "sum"},  # Of several steps each.
  "rms_norm": {"x"},
  "rope": {"x", "cos"},
  "rope_keys": {"kv", "weight", "cos"},
  "rope_queries": {"q", "absorbed", "cos"},
  "route": {"logits", "experts"},
  "routed_experts": {"x", "experts", "gate_up", "inner"},
  "token_log_probs": {"logits", "path"},
  "tree_attention": {"q", "out", "maxima"},
  "tree_from_table": {"table", "token_ids"},
}


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
  """Also where there is a GPU: the handlers of these tests are the CPU's."""
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    yield


def other_dtype(dtype: Any) -> Any:
  return jnp.int32 if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


@pytest.mark.parametrize("case", CASES)
def test_what_a_wrapper_passes_suits_the_handler(case: str) -> None:
  call = recorded(case)
  tables = call.op.startswith("rope") and "frequencies" not in case
  missing = 2 if call.op.startswith("rope") and not tables else case == "route"
  assert len(call.operands) == len(OPERANDS[call.op].split()) - missing
  assert len(call.results) == len(RESULTS[call.op].split())
  assert call.error() == ""


def test_every_target_has_a_wrapper_here() -> None:
  have = {f"kdtree_jax.{case.split()[0]}" for case in CASES}
  assert have == set(_library.TARGETS)


@pytest.mark.parametrize("case", CASES)
def test_each_size_is_checked(case: str) -> None:
  call = recorded(case)
  free = FREE.get(case, FREE.get(call.op, set()))
  for kind, i, name in call.buffers():
    array = getattr(call, kind)[i]
    for axis in range(array.ndim):
      shape = list(array.shape)
      shape[axis] += 1
      error = call.changed(kind, i, tuple(shape), array.dtype).error()
      where = f"{kind} {name} {array.shape} -> {shape}: {error}"
      if (name, axis) in free:
        assert not error, where
        continue
      match = re.match(rf"INVALID_ARGUMENT: kdtree_jax\.{call.op}: (\w+)", error)
      assert match, where
      if name in LEADING[call.op]:
        assert match[1] in {x for _, _, x in call.buffers()} | set(call.attributes), (
          where
        )
      else:
        assert match[1] == name, where
      if "has shape" in error:
        assert re.search(r"has shape \[.*\]; it must be \[.*\]", error), where


@pytest.mark.parametrize("case", CASES)
def test_each_rank_and_dtype_is_checked(case: str) -> None:
  call = recorded(case)
  for kind, i, name in call.buffers():
    array = getattr(call, kind)[i]
    for shape, dtype in (
      ((*array.shape, 1), array.dtype),
      (array.shape[1:], array.dtype) if array.ndim else ((1, 1), array.dtype),
      (array.shape, other_dtype(array.dtype)),
      (array.shape, jnp.float16),
    ):
      error = call.changed(kind, i, shape, dtype).error()
      assert error.startswith("INVALID_ARGUMENT: "), f"{kind} {name} {shape} {dtype}"
      # XLA itself checks where the handler asks for one dtype and rank.
      if "kdtree_jax" in error:
        names = (
          {x for _, _, x in call.buffers()} if name in LEADING[call.op] else {name}
        )
        assert set(re.findall(r"\w+", error)) & names, error


@pytest.mark.parametrize("case", CASES)
def test_each_attribute_is_checked(case: str) -> None:
  call = recorded(case)
  for name, value in call.attributes.items():
    others = {k: v for k, v in call.attributes.items() if k != name}
    wrong = 2 if isinstance(value, float) else 0.5
    for attributes in (others, others | {name: wrong}, others | {name: "text"}):
      error = dataclasses.replace(call, attributes=attributes).error()
      assert error.startswith("INVALID_ARGUMENT: "), f"{attributes}: {error}"
  if call.attributes:  # Of a handler without any, XLA does not look at them.
    extra = dataclasses.replace(call, attributes=call.attributes | {"unknown": 1})
    assert extra.error().startswith("INVALID_ARGUMENT: ")


@pytest.mark.parametrize("case", ["emit", "compact"])
def test_what_is_updated_in_place_must_be_one_buffer(case: str) -> None:
  call = recorded(case)
  assert call.aliases == {i: i for i in range(7 if case == "emit" else 1)}
  for i in call.aliases:
    aliases = {k: v for k, v in call.aliases.items() if k != i}
    error = dataclasses.replace(call, aliases=aliases).error()
    name = OPERANDS[call.op].split()[i]
    assert f"kdtree_jax.{case}: {name} must be one buffer" in error


@pytest.mark.parametrize(
  ("case", "attributes", "says"),
  [
    ("build_tree", {"budget": -1}, "budget -1"),
    ("build_tree", {"budget": 1024}, "budget 1024"),
    ("build_tree", {"budget": 9}, "budget 9 with 9 slots of token_ids"),
    ("tree_from_table", {"budget": 7}, "budget 7 with 7 slots"),
    ("rope bf16 frequencies", {"length": 0}, "length 0 is not allowed"),
    ("rope bf16 frequencies", {"length": 2**31}, "length 2147483648 is not"),
    ("rope_keys bf16 frequencies", {"frequencies": np.ones(3)}, "frequencies has 3"),
    ("rope_queries", {"offset": -1}, "offset -1"),
    ("rope_queries", {"offset": 14}, "offset 14"),
    ("rope_queries", {"offset": -(2**63)}, "offset -9223372036854775808"),
    ("rope_queries", {"offset": 5}, "offset 5"),
    ("rope_queries", {"offset": 4}, r"out has shape \[3, 5, 7, 20\]; .* 5, 7, 22\]"),
    ("route", {"n_group": 0}, "n_group 0 with 12 experts"),
    ("route", {"n_group": 5}, "n_group 5 with 12 experts"),
    ("route", {"n_group": 2**32 + 1}, "n_group 4294967297 with"),
    ("route", {"topk_group": 0}, "topk_group 0 is not allowed"),
    ("route", {"topk_group": 2}, r"topk_group 2 is not .* 1 \.\. n_group = 1"),
    ("tree_attention", {"layer": 2}, "layer 2 is none of the cache's 2"),
    ("tree_attention", {"layer": -1}, "layer -1"),
    ("tree_attention", {"chunk": 0}, "chunk 0 is not"),
    ("tree_attention", {"chunk": 24}, "chunk 24 is not"),
    ("tree_attention", {"chunk": 2**20 + 16}, "chunk 1048592 is not"),
    ("tree_attention", {"chunk": 2**32}, "chunk 4294967296 is not"),
    ("tree_attention", {"chunk": 64}, "maxima has 1 chunks of 64 positions, too few"),
    (
      "tree_attention",
      {"chunk_on_hopper": 112},
      "chunk_on_hopper 112 is not .* least chunk",
    ),
    ("tree_attention", {"chunk_on_hopper": 136}, "chunk_on_hopper 136 is not"),
    ("tree_attention", {"kernel": 3}, "kernel must be 0 .auto., 1 .portable. or 2"),
    ("tree_attention", {"kernel": -1}, "kernel must be 0"),
    ("tree_attention", {"kernel": 2}, "the kernel for Hopper takes bfloat16, W = 576"),
    ("tree_attention", {"blocks_per_item": 3}, "blocks_per_item must be 0, 1, 2,"),
    ("tree_attention", {"rows_per_block": 8}, "rows_per_block must be 0, 16, 32 or"),
  ],
)
def test_attributes_out_of_range_are_refused(case, attributes, says) -> None:
  call = recorded(case)
  error = dataclasses.replace(call, attributes=call.attributes | attributes).error()
  assert re.search(f"^INVALID_ARGUMENT: kdtree_jax.{call.op}: {says}", error), error


def with_sizes(call: Call, **sizes: dict[int, int]) -> Call:
  """With other sizes of axes, by the name of the array."""
  for kind, i, name in call.buffers():
    array = getattr(call, kind)[i]
    own = sizes.get(name, {})
    shape = [own[k] if k in own else x for k, x in enumerate(array.shape)]
    if tuple(shape) != array.shape:
      call = call.changed(kind, i, tuple(shape), array.dtype)
  return call


def row(**others: dict[int, int]) -> dict[str, dict[int, int]]:
  """Tree attention of one row of one feature; `others` on top."""
  sizes: dict[str, dict[int, int]] = {
    "q": {0: 1, 1: 1, 2: 1, 3: 1},
    "cache": {1: 1, 2: 1, 3: 1},
    "tree_keys": {0: 1, 1: 1, 2: 1},
    "ancestors": {0: 1, 1: 1},
    "depths": {0: 1, 1: 1},
    "lengths": {0: 1},
    "out": {0: 1, 1: 1, 2: 1, 3: 1},
    "accumulators": {0: 1, 1: 1, 3: 1},
    "maxima": {0: 1, 1: 1},
    "sums": {0: 1, 1: 1},
  }
  return {name: sizes[name] | others.get(name, {}) for name in sizes}


def chunks(C: int) -> dict[str, dict[int, int]]:
  return row(accumulators={2: C}, maxima={2: C}, sums={2: C})


def batch(B: int) -> dict[str, dict[int, int]]:
  return row(**{name: {1 if name == "cache" else 0: B} for name in row()})


@pytest.mark.parametrize(
  ("case", "sizes", "says"),
  [
    ("accept_tree", {k: {1: 6145} for k in OPERANDS["accept_tree"].split()}, "6144"),
    ("accept_tree", {"path": {1: 0}}, "path has no slot"),
    ("ancestors", {"parents": {1: 4097}}, "parents has 4097 slots"),
    ("best_token", {"logits": {1: 0}}, "logits has no token"),
    ("build_tree", {"table": {1: 0}, "table_tokens": {1: 0}}, "table has no depth"),
    ("build_tree", {"table": {1: 5}, "table_tokens": {1: 5}}, "table has 5 depths"),
    ("build_tree", {"table": {2: 51}, "table_tokens": {2: 51}}, "table has 51 cand"),
    ("build_tree", {"table": {2: 0}, "table_tokens": {2: 0}}, "table has 0 cand"),
    ("build_tree", {"workspace": {0: 8}}, "the workspace is too small"),
    ("log_softmax_topk", {"workspace": {0: 8}}, "the workspace is too small"),
    ("emit", {"token_ids": {1: 0}, "choices": {1: 0}}, "token_ids has no slot"),
    ("emit", {k: {1: 0} for k in ("path", "log_probs", "path_tokens")}, "path has no"),
    ("rope", {"x": {2: 258}, "out": {2: 258}}, "there are 129 pairs of features; 1"),
    ("rope", {"cos": {0: 0}, "sin": {0: 0}}, "cos has no row"),
    ("route", {"logits": {1: 1025}, "scores": {1: 1025}}, "logits has 1025 experts"),
    ("route", {"logits": {1: 0}, "scores": {1: 0}}, "logits has 0 experts"),
    ("route", {k: {1: 13} for k in ("experts", "weights")}, "13 slots of 12"),
    ("route", {k: {1: 0} for k in ("experts", "weights")}, "0 slots"),
    (
      "route",
      {k: {1: 40} for k in ("logits", "scores")}
      | {k: {1: 33} for k in ("experts", "weights")},
      "33 slots of 40",
    ),
    ("route", {k: {1: 1024} for k in ("logits", "scores")}, ""),
    ("matmul bf16", {"x": {1: 24}, "w": {0: 24}}, "x and its weights in bfloat16"),
    ("matmul bf16", {"w": {1: 12}, "out": {1: 12}}, "x and its weights in bfloat16"),
    ("matmul gated", {"w": {1: 8}, "out": {1: 4}}, "gate and up multiples of 8"),
    ("matmul gated", {"w": {1: 33}}, "w has an odd number of features"),
    ("head_matmul", {"x": {2: 9}}, "x has 9 columns; w needs 10"),
    ("head_matmul bf16", {"x": {2: 20}}, "x and its weights in bfloat16"),
    ("grouped_matmul", {"group_sizes": {0: 8193}}, "w has 8193 groups; 8192 are all"),
    (
      "grouped_matmul bf16",
      {"w": {2: 4}, "out": {1: 4}},
      "x and its weights in bfloat16",
    ),
    ("grouped_matmul int4", {"x": {1: 80}}, "w has depth 80; int4 needs a multiple"),
    ("grouped_matmul int4", {"x": {1: 128}}, r"w has shape .* \[3, 3, 2, 576\]"),
    ("grouped_matmul int4", {"out": {1: 49}}, r"w has shape .* \[3, 4, 1, 576\]"),
    ("routed_experts", {"gate_up": {0: 8193}}, "there are 8193 experts and 2 slots"),
    ("routed_experts", {"experts": {1: 0}}, "there are 3 experts and 0 slots"),
    ("routed_experts int4", {"x": {1: 80}}, "gate_up has depth 80; int4 needs"),
    (
      "routed_experts bf16",
      {"inner": {1: 8}, "gate_up": {2: 16}, "down": {1: 8}},
      "x and its weights in bfloat16",
    ),
    ("token_log_probs", {"logits": {2: 0}}, "logits must have a row and a token"),
    (
      "tree_attention",
      {"q": {3: 621}, "cache": {3: 621}, "tree_keys": {2: 621}},
      r"q is 621 wide; 1 \.\. 620",
    ),
    ("tree_attention", {"out": {3: 21}, "accumulators": {3: 21}}, "out is 21 wide; 1"),
    ("tree_attention", {"out": {3: 0}, "accumulators": {3: 0}}, "out is 0 wide; 1"),
    ("tree_attention", {"ancestors": {2: 0}}, "ancestors has no depth"),
    ("tree_attention", {"cache": {2: 128}}, "maxima has 1 chunks of 128 positions"),
    ("tree_attention", chunks(65536), "maxima has 65536 chunks; at most 65535"),
    ("tree_attention", chunks(65535), ""),
    ("tree_attention", batch(65536), "q has 65536 sequences; at most 65535"),
    ("tree_attention", batch(65535), ""),
  ],
)
def test_sizes_out_of_range_are_refused(case, sizes, says) -> None:
  error = with_sizes(recorded(case), **sizes).error()
  if not says:
    assert not error
  else:
    name = case.split()[0]
    assert re.search(f"^INVALID_ARGUMENT: kdtree_jax.{name}: .*{says}", error), error


@pytest.mark.parametrize("case", [case for case in CASES if "matmul" in case])
def test_float32_takes_another_kernel(case: str) -> None:
  """And so do bfloat16 rows with float32 weights: the tensor cores would round."""
  before = number("kdt_mma_products").value
  call = recorded(case)
  assert call.error() == ""
  wide = any(x.dtype == jnp.float32 for x in call.operands)
  assert (number("kdt_mma_products").value == before) is wide


@pytest.mark.parametrize("op", ["matmul", "head_matmul", "grouped_matmul"])
def test_rows_in_float32_need_weights_in_float32(op: str) -> None:
  """Weights in bfloat16 are for the tensor cores alone."""
  call = recorded(f"{op} bf16")
  error = call.changed("operands", 0, call.operands[0].shape, jnp.float32).error()
  assert f"kdtree_jax.{op}: w is bfloat16; with float32 rows it must be" in error


def test_tiles_are_of_grouped_weights_alone() -> None:
  call = recorded("matmul bf16")
  error = call.changed("operands", 1, call.operands[1].shape, jnp.uint8).error()
  assert "kdtree_jax.matmul: w has " in error and "int4" in error


def test_experts_have_one_dtype() -> None:
  """All of x, or both of their weights int4."""
  call = recorded("routed_experts bf16")
  for change in ("x", "both"):
    changed = call
    for i in [0] if change == "x" else [3, 4]:
      shape = call.operands[i].shape
      changed = changed.changed("operands", i, shape, jnp.float32)
    error = changed.error()
    assert re.search("kdtree_jax.routed_experts: .*(dtype|bfloat16)", error), error


def test_more_positions_than_an_int_holds_are_refused() -> None:
  call = recorded("tree_attention")
  attributes = call.attributes | {"chunk": 2**20, "chunk_on_hopper": 2**20}
  for C, says in ((2047, ""), (2048, "more than 2.31 - 1 positions")):
    wide = with_sizes(call, **chunks(C))
    error = dataclasses.replace(wide, attributes=attributes).error()
    assert re.search(says, error) if says else not error


def test_keys_off_their_alignment_are_refused() -> None:
  """The tensor-core form copies 16 bytes at a time. Layer 1 lies 2 bytes further on."""
  call = recorded("tree_attention bf16")
  call = with_sizes(call, **row())
  first = dataclasses.replace(call, attributes=call.attributes | {"layer": 0})
  supports = number("kdt_mma_supports")
  assert call.error() == ""
  supports.value = 1
  try:
    assert first.error() == ""
    assert "tree_attention: cache must lie on a multiple of 16 bytes" in call.error()
  finally:
    supports.value = 0


def test_the_kernel_for_hopper_has_its_workspace() -> None:
  """The wrapper's is just large enough; the portable kernel needs none."""
  call = recorded("tree_attention hopper")
  (bytes_,) = call.results[-1].shape
  assert call.error() == ""
  small = with_sizes(call, messages={0: bytes_ - 1})
  assert f"messages has {bytes_ - 1} bytes; the kernel for Hopper needs {bytes_}" in (
    small.error()
  )
  portable = dataclasses.replace(small, attributes=call.attributes | {"kernel": 1})
  assert portable.error() == ""


def test_what_a_launcher_returns_is_reported() -> None:
  call, status = recorded("best_token"), number("kdt_status")
  for value, says in ((1, "as told"), (209, "has no code for this GPU. Rebuild")):
    status.value = value
    try:
      with pytest.raises(ERRORS, match="INTERNAL.*" + says):
        call.run()
    finally:
      status.value = 0
