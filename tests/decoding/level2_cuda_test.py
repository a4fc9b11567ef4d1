"""Bits do not depend on the number of rows or of sequences, on a GPU.

Of each op, of each op within a step, and of whole texts: plain decoding at one row and
one slot has the bits of any width, batch and method.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import pytest

import kdtree_jax as kd
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import DecodeResult
from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.decoding.rounds import OPS
from kdtree_jax.demo import load_demo, load_prompts
from tests.decoding import level2
from tests.decoding.level2 import Embedding, LiveRows
from tests.ops.custom_calls import need_library

pytestmark = pytest.mark.gpu

# The demo pair: dtype and that of its experts.
KINDS = {
  "float32": ("float32", "dequantized"),
  "bfloat16": ("bfloat16", "dequantized"),
  "int4": ("bfloat16", "int4"),
}
SAMPLING = {
  "float32": {"temperature": 0.0},
  "bfloat16": {"temperature": 0.7, "seed": 5},
  "int4": {"temperature": 0.0},
}
every_kind = pytest.mark.parametrize("kind", KINDS)

# Methods and rows, by slots: each width and each batch, in both methods.
PROGRAMS = {
  1: [("plain", 2), ("plain", 128), ("ddtree", 17), ("ddtree", 64)],
  2: [("plain", 33), ("ddtree", 2), ("ddtree", 128)],
  7: [("plain", 17), ("ddtree", 8), ("ddtree", 33)],
  32: [("plain", 1), ("ddtree", 8), ("ddtree", 128)],
}
PLACES = [
  Embedding(1, 1),
  Embedding(2, 7),
  Embedding(8, 2),
  Embedding(17, 1),
  Embedding(33, 7),
  Embedding(64, 2),
  Embedding(65, 1),
  Embedding(128, 1),
  Embedding(128, 32),
]


@pytest.fixture(autouse=True)
def _library():
  need_library()


@functools.cache
def pair(kind: str) -> Any:
  return load_demo(*KINDS[kind])


@functools.cache
def prompts() -> list[list[int]]:
  """Four of different lengths, of one and of two chunks."""
  tokenizer = pair("float32")[2]
  texts = [p["prompt"] for p in load_prompts("humaneval")]
  encoded = [[0, *tokenizer.encode(texts[i]).ids] for i in (14, 43, 11, 34)]
  return [prompt[:90] for prompt in encoded]


def decode(kind: str, method: str, rows: int, slots: int, ids: list[int], **more: Any):
  target, drafter, _ = pair(kind)
  config = {
    "rows": rows,
    "slots": slots,
    "max_new_tokens": 32,
    "cache_len": 256,
    "stop_token_ids": (),
    "return_logits": True,
    "budget": None if method == "plain" else rows - 1,
  }
  return kd.decode(
    target,
    None if method == "plain" else drafter,
    [prompts()[i] for i in ids],
    DecodeConfig(method=method, **(config | SAMPLING[kind] | more)),
    sequence_ids=ids,
  )


@functools.cache
def plain(kind: str) -> DecodeResult:
  return decode(kind, "plain", 1, 1, [0, 1, 2, 3])


@every_kind
@pytest.mark.parametrize("slots", PROGRAMS)
def test_texts_and_logits_are_those_of_one_row_and_one_slot(kind, slots):
  ids = [i % 4 for i in range(max(slots, 4))]
  expected = DecodeResult(tuple(plain(kind)[i] for i in ids))
  found = {}
  for method, rows in PROGRAMS[slots]:
    result = decode(kind, method, rows, slots, ids)
    difference = first_difference(expected, result)
    if difference is not None:
      found[f"{method}, {rows} rows, {slots} slots"] = difference
    if method == "ddtree" and rows >= 17:
      assert result.tokens_per_round > 1.5  # It does speculate.
  assert not found


def test_how_prompts_are_cut_does_not_matter():
  """Into chunks of 16 tokens instead of 64: other rows beside each one."""
  ids = [0, 1, 2, 3]
  result = decode("bfloat16", "plain", 1, 1, ids, prefill_chunk=16)
  assert first_difference(plain("bfloat16"), result) is None


@every_kind
@pytest.mark.parametrize("half", [0, 1])
def test_each_op_of_a_step_gives_a_row_its_bits(kind, half):
  """The same six rows among 1 to 128, in batches of 1 to 32."""
  target = pair(kind)[0]
  live = LiveRows.create(target, 253)  # Attention's chunks end within the tree.
  want = level2.step_outputs(target, live, Embedding(6, 1), "auto")
  found = {}
  for place in PLACES[half::2]:
    have = level2.step_outputs(target, live, place, "auto")
    difference = level2.first_difference(want, have)
    if difference is not None:
      found[f"{place.rows} rows, batch {place.batch}"] = difference
  assert not found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(set(OPS) - level2.NOT_OF_ROWS))
def test_an_op_gives_a_row_its_bits_in_any_company(name, dtype):
  for op in level2.row_ops(jnp.dtype(dtype))[name]:
    assert level2.differences(op, "cuda") == []
