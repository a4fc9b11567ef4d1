"""The slice suite's comparison of bits finds what it is there to find."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.bench import kimi_slice, markdown
from kdtree_jax.bench import slice_exact as suite
from kdtree_jax.model.moe import MoE
from kdtree_jax.model.target import Block, Target
from tests.bench.slice_test import CONFIG

PRODUCT = suite.Product(
  widths=(1, 5), batches=(1, 2), sequences=3, tokens=6, context=126
)


@pytest.fixture(scope="module")
def target():
  return kimi_slice.random_target(CONFIG, jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def texts(target):
  return suite.plain(target, PRODUCT)


def test_texts_and_siblings_take_turns():
  for width in (1, 2, 3, 8, 17, 128):
    shape = suite.Shape.create(width)
    assert shape.width == width and len(shape.text) == (width + 1) // 2
    assert [shape.depths[slot] for slot in shape.text] == list(range(len(shape.text)))
    before = (-1, *shape.text)
    assert [shape.parents[slot] for slot in shape.text] == list(before[:-1])
    assert all(parent < slot for slot, parent in enumerate(shape.parents))
    siblings = sorted(set(range(width)) - set(shape.text))
    assert all(shape.parents[slot] in shape.text for slot in siblings)


def test_plain_texts_are_greedy(target, texts):
  assert texts.tokens.shape == (3, 7) and texts.logits.shape == (3, 6, 97)
  np.testing.assert_array_equal(
    jnp.argmax(texts.logits, -1).astype(jnp.int32), texts.tokens[:, 1:]
  )
  end = PRODUCT.context
  np.testing.assert_array_equal(texts.before[:, :, :end], texts.after[:, :, :end])
  assert not np.array_equal(texts.before[:, :, end], texts.after[:, :, end])
  assert len({tuple(row) for row in texts.tokens.tolist()}) == 3


@pytest.mark.parametrize(("width", "batch"), [(1, 1), (5, 2)])
def test_the_same_texts_come_out(target, texts, width, batch):
  """XLA's sums depend on the width here, so bits may differ, but not by much."""
  got = suite.compare(target, PRODUCT, texts, width, batch)
  assert got["tokens"] == 18
  # Logits of unit scale from sums of at most 64 products of fp32, in three layers.
  assert got["largest_difference"] < 1e-4
  if (width, batch) == (1, 1):
    assert (got["rows"], got["first"], got["layers"]) == (0, None, [])


def test_a_head_that_depends_on_the_rows_is_found(target, texts, monkeypatch):
  head = Target.head

  def wrong(self, hidden, implementation):
    factor = 1.0 if hidden.shape[1] == 1 else 1.001
    return head(self, hidden, implementation) * factor

  monkeypatch.setattr(Target, "head", wrong)
  product = suite.Product(**(vars(PRODUCT) | {"widths": (1, 7), "batches": (1,)}))
  monkeypatch.setattr(suite, "plain", lambda *_: texts)
  report = suite.run(target, product)
  one, seven = report["measurements"]
  assert one["rows"] == 0
  assert seven["rows"] == 18 and seven["first"] == [0, 0]
  assert suite.failed(report)
  assert "18 of 18 rows of logits DIFFER" in suite.verdict(report)
  assert "DIFFER" in markdown.table(report)


def test_a_layer_that_depends_on_its_neighbours_is_named(target, texts, monkeypatch):
  step_ffn = Block.step_ffn

  def wrong(self, h, attended, implementation):
    h, added = step_ffn(self, h, attended, implementation)
    if not isinstance(self.mlp, MoE):  # the dense layer, the first
      added = added + 1e-3 * jnp.mean(h, axis=1, keepdims=True)
    return h, added

  monkeypatch.setattr(Block, "step_ffn", wrong)
  got = suite.compare(target, PRODUCT, texts, 3, 1)
  assert got["rows"] == 18 and got["layers"][0] == 1


def test_what_fails_is_reported_and_the_rest_goes_on(target, texts, monkeypatch):
  def compare(target, product, texts, width, batch):
    if width == 5:
      raise ValueError("too many rows")
    same = {"tokens": 18, "rows": 0, "first": None}
    return same | {"largest_difference": 0.0, "layers": []}

  monkeypatch.setattr(suite, "plain", lambda *_: texts)
  monkeypatch.setattr(suite, "compare", compare)
  report = suite.run(target, PRODUCT)
  assert suite.failed(report) and "too many rows" in suite.verdict(report)
  good = report | {"measurements": report["measurements"][:1]}
  assert not suite.failed(good)
  assert "have the bits of plain decoding" in suite.verdict(good)
  late = suite.run(target, PRODUCT, max_seconds=0.0)
  assert late["measurements"] == [] and len(late["left_out"]) == 4
  assert "All" not in suite.verdict(late)


def test_the_product_is_the_one_that_is_asked_for():
  product = suite.Product()
  assert product.widths == (1, 2, 8, 17, 33, 64, 128)
  assert product.batches == (1, 2, 7, 32)
  assert product.sequences * product.tokens >= 2000
  programs = product.programs()
  assert len(set(programs)) == 28
  # Each width and each batch comes first.
  assert {w for w, _ in programs[:10]} == set(product.widths)
  assert {b for _, b in programs[:10]} == set(product.batches)


def test_bits_tell_zeros_apart():
  zero = jnp.zeros((2, 1, 3, 4), jnp.bfloat16)
  other = zero.at[1, 0, 1, 2].set(-0.0)
  assert suite._differing_layers(zero, other, 0, 3).tolist() == [False, True]
  assert suite._differing_layers(zero, other, 2, 1).tolist() == [False, False]
  assert jax.dtypes.issubdtype(suite._bits(zero).dtype, np.unsignedinteger)
