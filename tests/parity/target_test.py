"""The target's numbers against those of the `transformers` package.

Every variant's model is random, saved by that package, published (see variants.py) and
loaded by `kd.load_checkpoint`. Then both read the same texts: at once, into a cache,
token by token, and as draft trees.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import kdtree_jax as kd
from kdtree_jax import reference
from kdtree_jax.model import Target
from kdtree_jax.tree import Tree
from tests.parity.oracle import CLASSES, Oracle
from tests.parity.variants import PUBLISHED, SINGLE, VARIANTS, VOCAB, Variant, yarn
from tests.tree.random_trees import random_tree, stack

LENGTHS = (44, 31)  # of the prompts
# Over several chunks of the prefill (64) and of attention (128), whose ends the steps
# and the tree cross.
LONG_LENGTHS = (248, 125)
STEPS = 5  # tokens after the prompt, one by one
ROWS = 16  # of a step

# Logits reach 10 in size. Both sides round in fp32, in different orders: differences
# of up to 2.2e-5 were seen, and transformers alone differs by 1e-5 with its own float64
# form. Anything wrong in the formulas moves logits by 1e-2 and more.
LOGITS = 1e-4
# Rows are normed: they reach 5 in size, and differences of 6e-6 were seen.
CACHE_ROWS = 3e-5
# Where the oracle's two best tokens are farther apart than this, ours must be its best.
TOP_1 = 1e-3
# Between experts as close as this, two programs may choose differently: such texts are
# left out. Scores are at most 1.2 in size, and their errors below 1e-6.
CHOICE = 1e-5


@dataclasses.dataclass
class Expected:
  """What the oracle says about texts, lists by sequence.

  Attributes:
    oracle: the model.
    lengths: of the prompts.
    texts: i32 [B, T]: the prompts, STEPS tokens more, and more where one is shorter.
    logits: f32 [T, V] of each whole text of the table.
    prompt_rows, rows: cache rows of the prompt, and of prompt and steps.
    prompt_logits: f32 [V] after the prompt, from the cache.
    step_logits: f32 [STEPS, V] token by token.
    trees: whose roots stand after the last step.
    tree_logits, tree_rows: of the nodes.
  """

  oracle: Oracle
  lengths: tuple[int, ...]
  texts: np.ndarray
  trees: list[reference.Tree]
  logits: list[np.ndarray]
  prompt_rows: list[np.ndarray]
  prompt_logits: list[np.ndarray]
  step_logits: list[np.ndarray]
  rows: list[np.ndarray]
  tree_logits: list[np.ndarray]
  tree_rows: list[np.ndarray]


def run_oracle(variant: Variant, lengths: tuple[int, ...]) -> Expected:
  """Random texts and trees; the first without a near tie between experts."""
  for seed in range(20):
    rng = np.random.default_rng(seed)
    expected = _run_oracle(variant.oracle(seed), lengths, rng)
    if expected.oracle.choice_gap > CHOICE:
      return expected
  raise AssertionError("every text comes near a tie between experts")


def _run_oracle(
  oracle: Oracle, lengths: tuple[int, ...], rng: np.random.Generator
) -> Expected:
  shape = (len(lengths), max(lengths) + STEPS)
  texts = rng.integers(0, VOCAB, shape, dtype=np.int32)
  trees = [large_tree(rng) for _ in lengths]
  expected = Expected(oracle, lengths, texts, trees, *([] for _ in range(7)))
  for text, prompt, tree in zip(texts, lengths, trees, strict=True):
    expected.logits.append(oracle.logits(text))
    cache = oracle.start()
    expected.prompt_logits.append(oracle.append(cache, text[:prompt])[-1])
    expected.prompt_rows.append(oracle.rows(cache))
    steps = [oracle.append(cache, text[prompt + s, None])[0] for s in range(STEPS)]
    expected.step_logits.append(np.stack(steps))
    expected.rows.append(oracle.rows(cache))
    live = slice(tree.size)
    out = oracle.tree(cache, tree.token_ids[live], tree.depths[live], visible(tree))
    expected.tree_logits.append(out.logits)
    expected.tree_rows.append(out.rows)
  return expected


def large_tree(rng: np.random.Generator) -> reference.Tree:
  """A random tree with branches that end at different depths."""
  while True:
    tree = random_tree(rng, ROWS, VOCAB)
    leaves = set(range(tree.size)) - set(tree.parents.tolist())
    if tree.size > 10 and len(leaves) > 3 and tree.depths.max() > 3:
      return tree


def visible(tree: reference.Tree) -> np.ndarray:
  """bool [size, size]: row i sees node j, itself or an ancestor."""
  seen = np.eye(tree.size, dtype=bool)
  for node in range(1, tree.size):  # A parent lies before its children.
    seen[node] |= seen[tree.parents[node]]
  return seen


@jax.jit
def forward(target: Target, tokens: jax.Array) -> jax.Array:
  return kd.forward(target, tokens)


@jax.jit
def prefill(target: Target, tokens: jax.Array, lengths: jax.Array):
  """(cache, logits)."""
  cache_len = tokens.shape[1] + STEPS
  return kd.prefill(target, tokens, cache_len, lengths=lengths)[:2]


@jax.jit
def verify(target: Target, cache, tree: Tree) -> tuple[jax.Array, jax.Array]:
  """(logits, tree keys)."""
  logits, _, keys = kd.verify(target, cache, tree)
  return logits, keys


commit = jax.jit(kd.commit)


def assert_logits(got: jax.Array, want: np.ndarray, form: str) -> None:
  """Logits [..., V] are as near as rounding allows, and name the same best tokens."""
  got = np.asarray(got)
  assert got.shape == want.shape and want.std() > 1, form
  np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS, err_msg=form)
  best = np.sort(want, axis=-1)
  clear = best[..., -1] - best[..., -2] > TOP_1
  same = got.argmax(-1) == want.argmax(-1)
  assert same[clear].all(), f"{form}: another best token at {np.argwhere(~same)}"


def assert_rows(got: jax.Array, want: np.ndarray, form: str) -> None:
  """Cache rows [layers, T, R + P]."""
  got = np.asarray(got)
  assert got.shape == want.shape, form
  np.testing.assert_allclose(got, want, rtol=0, atol=CACHE_ROWS, err_msg=form)


def assert_rope_table(target: Target, oracle: Oracle) -> None:
  """The bits of cos and sin where their amplitude is 1, as in all published models.

  Else `transformers` rounds three times (cos, amplitude, product) and we once: that is
  4 * 2**-24 at most.
  """
  for got, want in zip(
    (target.cos[...], target.sin[...]),
    oracle.rope_table(target.config.max_position_embeddings),
    strict=True,
  ):
    rtol = 0 if target.config.rope_amplitude == 1 else 2**-22
    np.testing.assert_allclose(got, want, rtol=rtol, atol=0)


def check_forms(target: Target, expected: Expected) -> None:
  """All ways to read the texts and the trees."""
  texts, lengths = expected.texts, expected.lengths
  got = forward(target, texts)
  assert_logits(got, np.stack(expected.logits), "forward")

  prompts = texts[:, : max(lengths)]
  cache, got = prefill(target, prompts, jnp.asarray(lengths, jnp.int32))
  assert_logits(got, np.stack(expected.prompt_logits), "prefill")
  for b, length in enumerate(lengths):
    assert_rows(cache.data[:, b, :length], expected.prompt_rows[b], "prefill")

  B = len(lengths)
  root, one = jnp.zeros((B, 1), jnp.int32), jnp.ones(B, jnp.int32)
  for step in range(STEPS):
    tokens = texts[np.arange(B), np.asarray(lengths) + step]
    got, keys = verify(target, cache, Tree.root_only(jnp.asarray(tokens), ROWS))
    want = np.stack([logits[step] for logits in expected.step_logits])
    assert_logits(got[:, 0], want, f"step {step}")
    cache = commit(cache, keys, root, one)
  for b, length in enumerate(lengths):
    assert_rows(cache.data[:, b, : length + STEPS], expected.rows[b], "steps")

  got, keys = verify(target, cache, stack(expected.trees))
  for b, tree in enumerate(expected.trees):
    assert_logits(got[b, : tree.size], expected.tree_logits[b], "tree")
    assert_rows(keys[:, b, : tree.size], expected.tree_rows[b], "tree")


# Of torch, which makes empty shared experts where there are none.
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_are_those_of_transformers(name, tmp_path):
  variant = VARIANTS[name]
  expected = run_oracle(variant, LENGTHS)
  variant.save(expected.oracle, tmp_path)
  target = kd.load_checkpoint(tmp_path, dtype="float32")
  assert isinstance(target, Target)
  assert_rope_table(target, expected.oracle)
  check_forms(target, expected)


def test_long_texts(tmp_path):
  rope = yarn(original_max_position_embeddings=64)
  variant = Variant({"rope_parameters": rope, "max_position_embeddings": 512})
  expected = run_oracle(variant, LONG_LENGTHS)
  variant.save(expected.oracle, tmp_path)
  check_forms(kd.load_checkpoint(tmp_path, dtype="float32"), expected)


def test_there_are_enough_variants():
  assert len(VARIANTS) == len(PUBLISHED) + len(SINGLE) >= 24


# The wrapper is read as it lies there; `transformers` knows no "kimi_k2" by itself.
@pytest.mark.parametrize(
  "name", ["kimi_k2_6", "kimi_k2_5_wrapper", "deepseek_v2_lite", "bfloat16_shards"]
)
def test_transformers_reads_the_published_files(name, tmp_path):
  """What we load is in the hub's layout: that package makes the oracle of it."""
  oracle = VARIANTS[name].oracle(0)
  VARIANTS[name].save(oracle, tmp_path)
  path = tmp_path / "config.json"
  path.write_text(path.read_text().replace('"kimi_k2"', '"deepseek_v3"'))
  cls = getattr(transformers, CLASSES[oracle.model.config.model_type])
  again = Oracle(cls.from_pretrained(tmp_path, dtype=torch.float32))
  text = np.random.default_rng(0).integers(0, VOCAB, 40)
  np.testing.assert_array_equal(again.logits(text), oracle.logits(text))
