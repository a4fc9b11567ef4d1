from __future__ import annotations

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.tree import Tree
from tests.tree.random_trees import FIELDS, differences, random_tables

GOLDEN = pathlib.Path(__file__).parents[1] / "tree" / "golden_trees.json"
# Depth, budget, candidates per depth. Fewer candidates than the budget stand for a
# small vocabulary.
SHAPES = [
  (depth, budget, width)
  for depth in (1, 7, 15)
  for budget, widths in {0: [1], 1: [1], 7: [7], 16: [16, 3], 64: [64, 5]}.items()
  for width in widths
]
CASES = 500  # times 21 shapes: 10,500 trees

from_table = jax.jit(ops.tree_from_table, static_argnums=3, static_argnames="rows")
build = jax.jit(ops.build_tree, static_argnums=2, static_argnames="rows")
chain = jax.jit(ops.chain_tree, static_argnames="rows")
table_of = jax.jit(ops.log_softmax_topk, static_argnums=1)


def references(log_probs, token_ids, roots, budget) -> list[reference.Tree]:
  return [
    reference.build_tree(lp, ids, budget, int(root))
    for lp, ids, root in zip(log_probs, token_ids, roots, strict=True)
  ]


def same_bits(a: Tree, b: Tree) -> bool:
  return all(
    np.asarray(getattr(a, n)).tobytes() == np.asarray(getattr(b, n)).tobytes()
    for n in FIELDS
  )


@pytest.mark.parametrize(("depth", "budget", "width"), SHAPES)
def test_random_tables_equal_the_reference(depth, budget, width):
  rng = np.random.default_rng([depth, budget, width])
  log_probs, token_ids = random_tables(rng, CASES, depth, width)
  roots = rng.integers(0, 3, size=CASES).astype(np.int32)
  trees = from_table(log_probs, token_ids, roots, budget)
  assert differences(trees, references(log_probs, token_ids, roots, budget)) == []


@pytest.mark.parametrize(
  "golden", json.loads(GOLDEN.read_text())["trees"], ids=lambda g: g["name"]
)
def test_golden_trees(golden):
  tree = from_table(
    np.array([golden["log_probs"]], np.float32),
    np.array([golden["token_ids"]], np.int32),
    np.array([golden["root_token"]], np.int32),
    golden["budget"],
  )
  nodes = [np.asarray(getattr(tree, name))[0].tolist() for name in FIELDS[:4]]
  live = [list(node) for node in zip(*nodes, strict=True)][: int(tree.size[0])]
  assert live == golden["nodes"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "budget"), [(500, 16), (500, 60), (5, 16), (2, 1)])
def test_logits_equal_the_reference_on_the_same_table(vocab, budget, dtype):
  # bf16 and coarse logits tie often, within rows and between subtrees.
  rng = np.random.default_rng(vocab + budget)
  B, L = 48, 7
  logits = rng.normal(size=(B, L, vocab)).astype(np.float32) * 3
  logits[::3] = np.round(logits[::3])
  logits[1, 2] = -np.inf
  logits[2, 1] = 0
  logits[3, 3, 0] = np.nan
  logits[4, 4, 1] = np.inf
  logits[5, :, 1:] = -np.inf  # a certain token, and its id is 0
  logits = jnp.asarray(logits, dtype)
  roots = rng.integers(0, vocab, size=B).astype(np.int32)
  log_probs, token_ids = map(np.asarray, table_of(logits, min(budget, vocab)))
  trees = build(logits, roots, budget)
  assert differences(trees, references(log_probs, token_ids, roots, budget)) == []
  # Nodes end where the distribution does.
  deepest = np.asarray(trees.depths).max(axis=1)
  assert deepest[1] <= 2 and deepest[3] <= 3 and deepest[4] <= 4
  if budget >= L:
    assert np.asarray(trees.token_ids)[5, 1 : L + 1].tolist() == [0] * L
    assert int(trees.size[5]) == 1 + L


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_table_is_a_log_softmax_in_fp32(dtype):
  rng = np.random.default_rng(7)
  V = 4096
  logits = rng.normal(size=(8, 7, V)) * rng.choice([0.1, 1, 4, 30], size=(8, 7, 1))
  logits = np.asarray(jnp.asarray(logits.astype(np.float32), dtype), np.float32)
  log_probs, ids = map(np.asarray, table_of(jnp.asarray(logits, dtype), 64))
  exact = logits.astype(np.float64)
  top = exact.max(-1, keepdims=True)
  log_z = top + np.log(np.exp(exact - top).sum(-1, keepdims=True))
  expected = np.take_along_axis(exact - log_z, ids, -1)
  # Half an ulp for rounding log_z and half for the result, in ulp of the larger
  # operand; one more for log(sum), whose error is the relative error of the sum: a
  # few 2**-24, where one ulp of log_z is up to 2**-20.
  ulp = np.spacing(np.maximum(abs(log_z), abs(expected)).astype(np.float32))
  assert (abs(log_probs - expected) <= 2 * ulp).all()
  # Candidates and their order are those of the reference.
  for b in range(8):
    np.testing.assert_array_equal(ids[b], reference.log_softmax_topk(logits[b], 64)[1])


def test_equal_logits_are_ordered_by_token():
  logits = np.array([[[1, 3, -0.0, 3, 0.0, 1]], [[0, 0, 0, 0, 0, 0]]], np.float32)
  log_probs, ids = table_of(logits, 6)
  assert np.asarray(ids)[:, 0].tolist() == [[1, 3, 0, 5, 2, 4], [0, 1, 2, 3, 4, 5]]
  assert (np.diff(log_probs) <= 0).all()


def test_best_prefixes_by_brute_force():
  # Whole tuples of tokens and float64 sums of few, exactly representable values.
  rng = np.random.default_rng(9)
  B, L, k, budget = 64, 4, 3, 20
  log_probs = -np.sort(rng.integers(0, 6, size=(B, L, k)) / 4, axis=-1)
  token_ids = np.tile(np.arange(k, dtype=np.int32), (B, L, 1))
  trees = from_table(
    log_probs.astype(np.float32), token_ids, np.zeros(B, np.int32), budget
  )
  tokens, parents = np.asarray(trees.token_ids), np.asarray(trees.parents)
  for b in range(B):
    every = [
      (-sum(log_probs[b, d, r] for d, r in enumerate(ranks)), ranks)
      for depth in range(1, L + 1)
      for ranks in itertools.product(range(k), repeat=depth)
    ]
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, 1 + budget):
      paths.append((*paths[parents[b, node]], int(tokens[b, node])))
    assert paths[1:] == [ranks for _, ranks in sorted(every)[:budget]]


def test_structure():
  rng = np.random.default_rng(10)
  log_probs, token_ids = random_tables(rng, 200, 7, 16)
  trees = from_table(log_probs, token_ids, np.zeros(200, np.int32), 32)
  sums = np.asarray(trees.log_probs)
  for b in range(200):
    size = int(trees.size[b])
    parents = np.asarray(trees.parents)[b, :size]
    assert (parents[1:] < np.arange(1, size)).all() and (parents[1:] >= 0).all()
    depths = np.asarray(trees.depths)[b, :size]
    assert (depths[1:] == depths[parents[1:]] + 1).all()
    assert (np.diff(sums[b, :size]) <= 0).all()
    siblings = list(zip(parents, np.asarray(trees.token_ids)[b, :size], strict=True))
    assert len(set(siblings)) == size


def test_limit_gives_the_tree_of_that_budget():
  rng = np.random.default_rng(11)
  log_probs, token_ids = random_tables(rng, 64, 7, 24)
  roots = np.ones(64, np.int32)
  limits = rng.integers(-1, 30, size=64).astype(np.int32)
  trees = from_table(log_probs, token_ids, roots, 24, limit=limits, rows=32)
  budgets = np.clip(limits, 0, 24)
  for b, budget in enumerate(budgets):
    small = reference.build_tree(log_probs[b], token_ids[b], budget, 1)
    live, size = slice(0, small.size), int(trees.size[b])
    assert size == small.size
    for name in FIELDS[:4]:
      values = np.asarray(getattr(trees, name))[b]
      assert values[live].tobytes() == getattr(small, name)[live].tobytes()
  padding = np.arange(32) >= np.asarray(trees.size)[:, None]
  for name, value in zip(FIELDS[:4], (0, -1, 0, -np.inf), strict=True):
    assert (np.asarray(getattr(trees, name))[padding] == value).all()
  # A plain number serves all sequences.
  for limit in (0, 5):
    whole = from_table(log_probs, token_ids, roots, 24, limit=limit)
    each = from_table(log_probs, token_ids, roots, 24, limit=np.full(64, limit))
    assert same_bits(whole, each)
    assert (np.asarray(whole.size) <= 1 + limit).all()


def test_max_depth_gives_the_tree_of_fewer_rows():
  rng = np.random.default_rng(12)
  log_probs, token_ids = random_tables(rng, 64, 7, 16)
  roots = np.ones(64, np.int32)
  cuts = rng.integers(0, 9, size=64).astype(np.int32)
  trees = from_table(log_probs, token_ids, roots, 16, max_depth=cuts)
  expected = [
    reference.build_tree(log_probs[b, :cut], token_ids[b, :cut], 16, 1)
    for b, cut in enumerate(cuts)
  ]
  assert differences(trees, expected) == []
  same = from_table(log_probs, token_ids, roots, 16, max_depth=3)
  assert int(same.depths.max()) == 3


def test_permuting_the_batch_permutes_the_trees():
  rng = np.random.default_rng(13)
  logits = rng.normal(size=(8, 7, 300)).astype(np.float32) * 3
  roots = np.arange(8, dtype=np.int32)
  order = rng.permutation(8)
  straight = build(logits, roots, 16)
  permuted = build(logits[order], roots[order], 16)
  assert same_bits(jax.tree.map(lambda x: x[order], straight), permuted)


def test_neighbours_do_not_change_a_tree():
  rng = np.random.default_rng(14)
  logits = rng.normal(size=(4, 7, 300)).astype(np.float32) * 3
  roots = np.zeros(4, np.int32)
  before = build(logits, roots, 16, limit=np.array([16, 16, 16, 16]))
  logits[[0, 3]] = np.nan
  logits[1] *= 7
  after = build(logits, roots, 16, limit=np.array([3, 0, 16, 1]))
  third = jax.tree.map(lambda x: x[2], before), jax.tree.map(lambda x: x[2], after)
  assert same_bits(*third)
  assert int(after.size[0]) == 1  # NaN logits: the root alone


def test_chain_is_the_top_path():
  rng = np.random.default_rng(15)
  logits = rng.normal(size=(16, 7, 50)).astype(np.float32) * 3
  logits[3, 4] = np.nan
  logits[4, 0] = -np.inf
  logits[5, :, :2] = 99.0  # ties go to token 0
  roots = np.full(16, 2, np.int32)
  trees = chain(logits, roots)
  log_probs, token_ids = map(np.asarray, table_of(logits, 1))
  assert differences(trees, references(log_probs, token_ids, roots, 7)) == []
  tokens, sizes = np.asarray(trees.token_ids), np.asarray(trees.size)
  assert sizes.tolist() == [8, 8, 8, 5, 1] + [8] * 11
  np.testing.assert_array_equal(tokens[6, 1:], logits[6].argmax(-1))
  assert tokens[5].tolist() == [2] + [0] * 7
  # A tree on candidates of width 1 is the chain; so is its own chain constructor.
  np.testing.assert_array_equal(trees.parents[6], np.arange(-1, 7))
  made = Tree.chain(token_ids[:, :, 0], log_probs[:, :, 0], jnp.asarray(roots))
  assert same_bits(
    jax.tree.map(lambda x: x[6:], made), jax.tree.map(lambda x: x[6:], trees)
  )


def test_chain_limit_and_rows():
  rng = np.random.default_rng(16)
  logits = rng.normal(size=(4, 7, 50)).astype(np.float32)
  roots = np.zeros(4, np.int32)
  limits = np.array([0, 2, 7, 9], np.int32)
  wide = chain(logits, roots, rows=12, limit=limits)
  assert wide.rows == 12
  assert np.asarray(wide.size).tolist() == [1, 3, 8, 8]
  cut = chain(logits, roots, rows=4)
  assert cut.rows == 4 and np.asarray(cut.size).tolist() == [4] * 4
  assert chain(logits, roots, rows=1).rows == 1


def test_errors_name_the_argument():
  logits, roots = jnp.zeros((2, 3, 4)), jnp.zeros((2,), jnp.int32)
  with pytest.raises(ValueError, match="budget = -1"):
    ops.build_tree(logits, roots, -1)
  with pytest.raises(ValueError, match="budget = 3000000 .* 0 .. 46335"):
    ops.build_tree(logits, roots, 3_000_000)
  with pytest.raises(ValueError, match="rows = 46337 .* at most 46336"):
    ops.build_tree(logits, roots, 4, rows=46_337)
  with pytest.raises(ValueError, match="rows = 4 .* at least 5"):
    ops.build_tree(logits, roots, 4, rows=4)
  with pytest.raises(ValueError, match=r"root_tokens \(3,\)"):
    ops.build_tree(logits, jnp.zeros((3,), jnp.int32), 4)
  with pytest.raises(ValueError, match="rows = 0"):
    ops.chain_tree(logits, roots, rows=0)
  with pytest.raises(ValueError, match=r"\(2, 3, 4\) and token_ids \(2, 3, 5\)"):
    ops.tree_from_table(logits, jnp.zeros((2, 3, 5), jnp.int32), roots, 4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the CPU's program")
def test_no_row_is_sorted_whole():
  # XLA's CPU compiler turns a top-k whose result is sliced into a full sort, which
  # is a hundred times slower and otherwise unnoticed.
  logits, roots = jnp.zeros((2, 7, 500)), jnp.zeros((2,), jnp.int32)
  for program in (
    build.lower(logits, roots, 16),
    build.lower(logits, roots, 16, limit=roots, max_depth=roots),
    chain.lower(logits, roots),
  ):
    text = program.compile().as_text()
    assert " sort(" not in text
    assert text.count('custom_call_target="TopK"') == 1
