"""The custom calls of build_tree: bits of the reference, accuracy, independence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops, reference
from kdtree_jax.ops import _build_tree_cuda
from kdtree_jax.tree import Tree
from tests.ops.build_tree_test import references
from tests.ops.custom_calls import assert_same_bits, cuda_text, replayed
from tests.tree.random_trees import FIELDS, differences, random_tables

from_table = functools.partial(ops.tree_from_table, implementation="cuda")
build = functools.partial(ops.build_tree, implementation="cuda")
chain = functools.partial(ops.chain_tree, implementation="cuda")
table_of = functools.partial(ops.log_softmax_topk, implementation="cuda")

# Depth, budget, candidates per depth, trees.
SHAPES = [
  (15, 64, 64, 2000),
  (15, 16, 3, 2000),
  (7, 7, 7, 2000),
  (1, 1, 1, 200),
  (15, 0, 1, 50),
  (7, 127, 127, 300),  # the largest frontier in registers
  (7, 128, 40, 300),
  (15, 300, 300, 60),  # a table too large for shared memory
  (2, 1023, 1023, 16),
]


def bounded(
  log_probs, token_ids, roots, budget, limits, depths
) -> list[reference.Tree]:
  """The reference's trees under a limit and a depth for each, in 1 + budget slots."""
  trees = []
  for b, (limit, depth) in enumerate(zip(limits, depths, strict=True)):
    cut = slice(0, max(depth, 0))
    tree = reference.build_tree(
      log_probs[b][cut], token_ids[b][cut], int(np.clip(limit, 0, budget)), roots[b]
    )
    trees.append(padded(tree, 1 + budget))
  return trees


def padded(tree: reference.Tree, rows: int) -> reference.Tree:
  extra = (0, rows - len(tree.parents))
  return reference.Tree(
    np.pad(tree.token_ids, extra),
    np.pad(tree.parents, extra, constant_values=-1),
    np.pad(tree.depths, extra),
    np.pad(tree.log_probs, extra, constant_values=-np.inf),
    tree.size,
  )


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "budget", "width", "cases"), SHAPES)
def test_random_tables_equal_the_reference(depth, budget, width, cases):
  rng = np.random.default_rng([depth, budget, width])
  log_probs, token_ids = random_tables(rng, cases, depth, width)
  roots = rng.integers(0, 3, size=cases).astype(np.int32)
  # Half of them unbounded.
  limits = np.where(
    rng.random(cases) < 0.5, budget, rng.integers(-1, budget + 3, cases)
  )
  depths = np.where(rng.random(cases) < 0.5, depth, rng.integers(-1, depth + 3, cases))
  run = replayed(
    lambda *x: from_table(*x[:3], budget, limit=x[3], max_depth=x[4], rows=budget + 4)
  )
  trees = run(log_probs, token_ids, roots, limits, depths)
  want = bounded(log_probs, token_ids, roots, budget, limits, depths)
  assert differences(trees, [padded(tree, budget + 4) for tree in want]) == []


@pytest.mark.gpu
def test_without_bounds_and_with_one_for_all():
  rng = np.random.default_rng(1)
  log_probs, token_ids = random_tables(rng, 300, 7, 24)
  roots = np.ones(300, np.int32)
  free = jax.jit(lambda *x: from_table(*x, 24))(log_probs, token_ids, roots)
  assert differences(free, references(log_probs, token_ids, roots, 24)) == []
  bound = jax.jit(lambda *x: from_table(*x[:3], 24, limit=x[3], max_depth=x[4]))
  trees = bound(log_probs, token_ids, roots, 5, 3)
  want = bounded(log_probs, token_ids, roots, 24, [5] * 300, [3] * 300)
  assert differences(trees, want) == []


def rows_of_logits(rng: np.random.Generator, V: int) -> dict[str, np.ndarray]:
  """Rows on which a selection or a sum may go wrong; f32[V] each."""
  normal = rng.normal(size=V)
  one = np.arange(V) == rng.integers(V)
  few = np.isin(np.arange(V), rng.integers(V, size=3))
  return {
    "normal": 3 * normal,
    "ties": np.round(3 * normal),
    "one value": np.full(V, 1.25),
    "rising": 1e-3 * np.arange(V),
    "falling": -1e-3 * np.arange(V),
    "zeros of either sign": np.where(normal > 0, 0.0, -0.0),
    "half of it -inf": np.where(normal > 0, -np.inf, normal),
    "three finite": np.where(few, normal, -np.inf),
    "huge": 1e37 * normal,
    "certain": np.where(one, 40.0, normal),
    "nearly certain": np.where(one, 14.0, 1e-3 * normal),
    "nothing": np.full(V, -np.inf),
    "NaN": np.where(one, np.nan, normal),
    "negative NaN": np.where(one, -np.nan, normal),
    "+inf": np.where(one, np.inf, normal),
  }


def exact_table(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
  """Log-probabilities in float64 or better, and tokens."""
  _, (ids,) = reference.log_softmax_topk(row[None], k)
  x = row.astype(np.longdouble)
  # All but the first maximum: adding its 1 would lose the rest where that is tiny.
  rest = np.exp(x - x[ids[0]])
  rest[ids[0]] = 0
  return (x[ids] - x[ids[0]]) - np.log1p(rest.sum()), ids


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("vocab", "budget"),
  [
    (163840, 64),
    (50001, 127),
    (20480, 1),
    (20481, 16),
    (4096, 64),
    (300, 200),
    (5, 16),
  ],
)
def test_from_logits(vocab, budget, dtype):
  """Candidates are exact, log-probabilities within 2 ulp, trees the table's."""
  rng = np.random.default_rng([vocab, budget])
  rows = rows_of_logits(rng, vocab)
  B, k = 2, min(budget, vocab)
  logits = np.array([*rows.values()] * B, np.float32).reshape(B, -1, vocab)
  logits[1] = logits[1][rng.permutation(len(rows))]  # other rows end the search
  logits = np.array(jnp.asarray(logits, dtype))
  L = logits.shape[1]
  roots = np.arange(B, dtype=np.int32)

  def both(logits, roots):
    tree = build(logits, roots, budget)
    built = _build_tree_cuda.build(
      logits,
      roots,
      jnp.full((1,), budget),
      jnp.full((1,), L),
      depths=L,
      width=k,
      budget=budget,
      rows=1 + budget,
    )
    return tree, *built, table_of(logits, k)

  tree, same, log_probs, ids, table = replayed(both)(logits, roots)
  assert_same_bits(tree, same)
  assert_same_bits((log_probs, ids), table)
  assert differences(tree, references(log_probs, ids, roots, budget)) == []
  for b in range(B):
    for d in range(L):
      row = logits[b, d].astype(np.float32)
      if not np.isfinite(row.max()):
        assert np.isnan(log_probs[b, d]).all()
        continue
      want, tokens = exact_table(row, k)
      np.testing.assert_array_equal(ids[b, d], tokens)
      nearest = want.astype(np.float32)
      finite = np.isfinite(nearest)
      np.testing.assert_array_equal(log_probs[b, d][~finite], nearest[~finite])
      error = abs(log_probs[b, d][finite].astype(np.longdouble) - want[finite])
      # Half an ulp for the last rounding. The sum of exponentials is right to 2**-24,
      # each term to 0.9 * 2**-24 (log_softmax_math.h), which is at most one ulp more:
      # neither log1p nor a sum of two numbers of one sign makes it worse.
      assert (error <= 2 * np.spacing(abs(nearest[finite]))).all(), (b, d)


@pytest.mark.gpu
def test_a_row_depends_on_itself_alone():
  """Not on its neighbours, on its place, on the depth or on the type of the array."""
  rng = np.random.default_rng(3)
  logits = jnp.asarray(3 * rng.normal(size=(3, 4, 50000)), jnp.bfloat16)
  table = jax.jit(lambda x: table_of(x, 32))
  whole = jax.device_get(table(logits))
  for b, d in ((0, 0), (1, 2), (2, 3)):
    for alone in (logits[b, d], logits[b, d].astype(jnp.float32)):
      one = table(alone[None, None])
      assert_same_bits([x[b : b + 1, d : d + 1] for x in whole], one)
  order = rng.permutation(3)
  assert_same_bits([x[order] for x in whole], table(logits[order]))
  spoiled = logits.at[1].set(jnp.nan)
  after = jax.device_get(table(spoiled))
  assert_same_bits([x[[0, 2]] for x in whole], [x[[0, 2]] for x in after])
  tree = jax.jit(lambda x: build(x, jnp.zeros(x.shape[0], jnp.int32), 32))
  first, alone = tree(logits), tree(logits[1:2])
  assert_same_bits(jax.tree.map(lambda x: x[1:2], first), alone)


@pytest.mark.gpu
def test_rows_that_start_anywhere():
  """A vocabulary of odd size: rows are not aligned to 16 bytes."""
  rng = np.random.default_rng(4)
  x = (3 * rng.normal(size=(2, 3, 40007))).astype(np.float32)
  for dtype in ("float32", "bfloat16"):
    logits = jnp.asarray(x, dtype)
    even = jnp.pad(logits, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    table = jax.jit(lambda x: table_of(x, 16))
    assert_same_bits(table(even), table(logits))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 9, 1])
def test_chain_is_the_top_path(rows):
  rng = np.random.default_rng(5)
  logits = (3 * rng.normal(size=(64, 15, 3000))).astype(np.float32)
  logits[3, 4] = np.nan
  logits[4, 0] = -np.inf
  logits[5, :, :2] = 99.0  # ties go to token 0
  roots = np.full(64, 2, np.int32)
  limits = rng.integers(0, 20, size=64).astype(np.int32)
  run = replayed(lambda x, r, n: (chain(x, r, rows=rows, limit=n), table_of(x, 1)))
  trees, (log_probs, ids) = run(logits, roots, limits)
  want = bounded(log_probs, ids, roots, rows - 1, limits, [15] * 64)
  assert differences(trees, want) == []


@pytest.mark.gpu
def test_ancestors_equal_the_reference():
  rng = np.random.default_rng(6)
  log_probs, token_ids = random_tables(rng, 500, 15, 20)
  roots = np.zeros(500, np.int32)

  def both(*x):
    tree = from_table(*x, 64, rows=72)
    return tree, *(ops.ancestors(tree, d, implementation="cuda") for d in (71, 15))

  tree, *tables = replayed(both)(log_probs, token_ids, roots)
  trees = [
    reference.Tree(*(getattr(tree, name)[b] for name in FIELDS)) for b in range(500)
  ]
  for table, max_depth in zip(tables, (71, 15), strict=True):
    want = np.stack([reference.ancestors(t, 71) for t in trees])[:, :, : max_depth + 1]
    np.testing.assert_array_equal(table, want)


@pytest.mark.gpu
def test_ancestors_of_garbage_end():
  rng = np.random.default_rng(7)
  junk = rng.integers(-(2**31), 2**31, size=(4, 64, 65), dtype=np.int64)
  junk[:, ::2] = rng.integers(-3, 70, size=(4, 32, 65))
  tokens, parents, depths, _ = junk.astype(np.int32)
  tree = Tree(tokens, parents, depths, depths.astype(np.float32), tokens[:, 0])
  run = jax.jit(lambda t: ops.ancestors(t, 64, implementation="cuda"))
  table = np.asarray(run(jax.tree.map(jnp.asarray, tree)))
  assert ((table >= -1) & (table < 65)).all()


@pytest.mark.gpu
def test_vmap_runs_one_after_the_other():
  rng = np.random.default_rng(8)
  logits = (3 * rng.normal(size=(3, 2, 7, 500))).astype(np.float32)
  roots = np.arange(6, dtype=np.int32).reshape(3, 2)
  run = jax.jit(lambda x, r: build(x, r, 16))
  mapped = jax.jit(jax.vmap(lambda x, r: build(x, r, 16)))(logits, roots)
  flat = run(logits.reshape(6, 7, 500), roots.reshape(6))
  assert_same_bits(flat, jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), mapped))


def test_the_program_for_cuda_holds_one_call():
  logits, roots = jnp.zeros((2, 7, 500), jnp.bfloat16), jnp.zeros(2, jnp.int32)
  table = jnp.zeros((2, 7, 3)), jnp.zeros((2, 7, 3), jnp.int32)
  for target, op, *arguments in (
    ("build_tree", lambda i, *x: ops.build_tree(*x, 16, **i), logits, roots),
    ("build_tree", lambda i, *x: ops.chain_tree(*x, **i), logits, roots),
    ("tree_from_table", lambda i, *x: ops.tree_from_table(*x, 16, **i), *table, roots),
    ("log_softmax_topk", lambda i, x: ops.log_softmax_topk(x, 4, **i), logits),
    ("ancestors", lambda i, x: ops.ancestors(x, 8, **i), Tree.root_only(roots, rows=9)),
  ):
    for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
      chosen = functools.partial(op, {"implementation": implementation})
      text = cuda_text(chosen, *arguments)
      assert text.count("custom_call @kdtree_jax.") == expected
      assert text.count(f"@kdtree_jax.{target}(") == expected
      searches = "tree" in target and implementation == "xla"
      assert ("stablehlo.while" in text) == searches


def test_the_call_gets_all_logits_and_its_workspace():
  """No slice of the logits, which would be a copy; the size that the handler asks."""
  logits = jax.ShapeDtypeStruct((2, 15, 163840), jnp.float32)
  roots = jax.ShapeDtypeStruct((2,), jnp.int32)
  text = cuda_text(lambda *x: chain(*x, rows=9), logits, roots)
  assert "slice" not in text
  assert "tensor<2x8x1xf32>" in text and "budget = 8 : i64" in text
  # 8 slices of a row: maximum and sum, and one candidate; and a counter per sequence.
  assert f"tensor<{2 * 8 * 8 * (16 + 8) + 2 * 4}xui8>" in text


def test_vmap_can_be_traced_for_every_platform():
  logits, roots = jnp.zeros((3, 2, 7, 50)), jnp.zeros((3, 2), jnp.int32)
  run = jax.jit(jax.vmap(lambda x, r: ops.build_tree(x, r, 4)))
  assert run(logits, roots).token_ids.shape == (3, 2, 5)


def test_what_is_too_large_has_the_xla_form_alone():
  logits, roots = jnp.zeros((1, 1, 2000)), jnp.zeros(1, jnp.int32)
  table = jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2), jnp.int32)
  tree = Tree.root_only(roots, rows=4097)
  for call, message in (
    (lambda i: ops.build_tree(logits, roots, 1024, implementation=i), "at most 1023"),
    (lambda i: ops.log_softmax_topk(logits, 1024, implementation=i), "at most 1023"),
    (
      lambda i: ops.tree_from_table(*table, roots, 1024, implementation=i),
      "at most 1023",
    ),
    (lambda i: ops.ancestors(tree, 1, implementation=i), "at most 4096 slots"),
  ):
    with pytest.raises(ValueError, match=message):
      call("cuda")
    assert "kdtree_jax." not in cuda_text(functools.partial(call, "auto"))


def test_errors_name_the_argument():
  logits, roots = jnp.zeros((2, 3, 4)), jnp.zeros(2, jnp.int32)
  with pytest.raises(ValueError, match="logits are float16; they must be float32 or"):
    ops.build_tree(logits.astype(jnp.float16), roots, 4)
  with pytest.raises(ValueError, match="logits are int32"):
    ops.log_softmax_topk(logits.astype(jnp.int32), 2)
  with pytest.raises(ValueError, match=r"k = 5 must be in 1 \.\. V"):
    ops.log_softmax_topk(logits, 5)
  with pytest.raises(ValueError, match=r"limit must be .* \(2,\); it is int32 \(3,\)"):
    ops.build_tree(logits, roots, 4, limit=jnp.zeros(3, jnp.int32))
  with pytest.raises(ValueError, match=r"max_depth must be .* it is float32 \(1,\)"):
    ops.build_tree(logits, roots, 4, max_depth=1.5)
  with pytest.raises(ValueError, match=r"root_tokens \(3,\) must be \[B\]"):
    ops.tree_from_table(logits, logits.astype(jnp.int32), jnp.zeros(3, jnp.int32), 4)
  with pytest.raises(ValueError, match="max_depth = -1"):
    ops.ancestors(Tree.root_only(roots), -1)
