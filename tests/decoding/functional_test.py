"""The steps of a round by hand: what a node's logits and the cache depend on."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax import functional
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.ops import accept_tree, build_tree, chain_tree
from kdtree_jax.tree import Tree
from tests.decoding.models import (
  CACHE,
  CONFIG,
  DEPTH,
  NEW,
  ROWS,
  SETTINGS,
  SLOTS,
  VOCAB,
  Mixed,
  decode,
  dflash,
  prompt,
  target,
)

TAPS = (0, 1)
# Trees of 8 rows from here on lie before, across and behind the end of attention's
# first chunk of 128 positions.
LENGTHS = (5, 125, 200)

commit = jax.jit(kd.commit)


@functools.cache
def _verify():
  model = target()
  return jax.jit(lambda *x: kd.verify(model, *x, feature_layers=TAPS))


def verify(cache: LatentCache, tree: Tree):
  return _verify()(cache, tree)


@functools.cache
def prefix(capacity: int = CACHE) -> LatentCache:
  """Random committed rows, and NaN where no row has been committed."""
  rng = np.random.default_rng(0)
  shape = (CONFIG.num_hidden_layers, SLOTS, capacity, CONFIG.cache_width)
  data = np.full(shape, np.nan, np.float32)
  for slot, length in enumerate(LENGTHS):
    size = (shape[0], length, shape[3])
    data[:, slot, :length] = rng.normal(size=size)
  return LatentCache(jnp.asarray(data), jnp.asarray(LENGTHS, jnp.int32))


def random_tree(rng: np.random.Generator, size: int = ROWS) -> Tree:
  """Trees with random parents, so that slots of one path are far apart."""
  tokens = rng.integers(0, VOCAB, (SLOTS, ROWS), dtype=np.int32)
  parents = np.full((SLOTS, ROWS), -1, np.int32)
  depths = np.zeros((SLOTS, ROWS), np.int32)
  for slot in range(SLOTS):
    for n in range(1, size):
      parent = rng.integers(max(0, n - 3), n)
      parents[slot, n], depths[slot, n] = parent, depths[slot, parent] + 1
  live = np.arange(ROWS) < size
  return Tree(
    token_ids=jnp.where(live, tokens, 0),
    parents=jnp.asarray(parents),
    depths=jnp.asarray(depths),
    log_probs=jnp.where(live, -depths, -jnp.inf).astype(jnp.float32),
    size=jnp.full((SLOTS,), size, jnp.int32),
  )


def path_to(tree: Tree, slot: int, node: int) -> list[int]:
  parents = np.asarray(tree.parents)[slot]
  path = [node]
  while parents[path[-1]] >= 0:
    path.append(int(parents[path[-1]]))
  return path[::-1]


def chain_of(tree: Tree, paths: list[list[int]]) -> Tree:
  """One path of each tree, alone in as many rows."""
  tokens = np.zeros((SLOTS, ROWS), np.int32)
  for slot, path in enumerate(paths):
    tokens[slot, : len(path)] = np.asarray(tree.token_ids)[slot, path]
  lengths = jnp.array([len(path) - 1 for path in paths])
  zeros = jnp.zeros((SLOTS, ROWS - 1))
  return Tree.chain(
    jnp.asarray(tokens[:, 1:]), zeros, jnp.asarray(tokens[:, 0]), lengths
  )


def bits(x) -> bytes:
  return np.asarray(x).tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_a_node_is_its_ancestor_path_alone(seed):
  """Logits, features and keys of a node are those of its path run as a chain."""
  tree = random_tree(np.random.default_rng(seed))
  whole = verify(prefix(), tree)
  assert np.isfinite(whole[0]).all()
  for node in range(ROWS):
    paths = [path_to(tree, slot, node) for slot in range(SLOTS)]
    alone = verify(prefix(), chain_of(tree, paths))
    for slot, path in enumerate(paths):
      end = len(path) - 1
      assert bits(alone[0][slot, end]) == bits(whole[0][slot, node])
      assert bits(alone[1][slot, end]) == bits(whole[1][slot, node])
      assert bits(alone[2][:, slot, end]) == bits(whole[2][:, slot, node])


def test_a_node_is_its_path_decoded_token_by_token():
  """The same with the path committed root after root, as plain decoding does."""
  tree = random_tree(np.random.default_rng(7))
  logits, _, keys = verify(prefix(), tree)
  paths = [path_to(tree, slot, ROWS - 1) for slot in range(SLOTS)]
  deepest = max(map(len, paths))
  cache = prefix()
  for step in range(deepest):
    nodes = np.array([path[min(step, len(path) - 1)] for path in paths])
    tokens = np.take_along_axis(np.asarray(tree.token_ids), nodes[:, None], 1)[:, 0]
    root = Tree.root_only(jnp.asarray(tokens), ROWS)
    step_logits, _, step_keys = verify(cache, root)
    for slot, path in enumerate(paths):
      if step < len(path):
        assert bits(step_logits[slot, 0]) == bits(logits[slot, nodes[slot]])
    live = jnp.array([int(step < len(path)) for path in paths])
    cache = commit(cache, step_keys, jnp.zeros((SLOTS, 1), jnp.int32), live)
  # One commit of the whole path leaves the same cache behind.
  padded = np.full((SLOTS, ROWS), -1, np.int32)
  for slot, path in enumerate(paths):
    padded[slot, : len(path)] = path
  lengths = jnp.array([len(path) for path in paths])
  at_once = commit(prefix(), keys, jnp.asarray(padded), lengths)
  assert bits(at_once.lengths) == bits(cache.lengths)
  assert bits(at_once.data) == bits(cache.data)
  assert deepest > 3


def test_padding_siblings_and_slots_do_not_matter():
  rng = np.random.default_rng(3)
  tree = random_tree(rng, size=5)
  expected = [np.asarray(x) for x in verify(prefix(), tree)]
  garbage = rng.integers(0, VOCAB, (SLOTS, ROWS))
  padded = dataclasses.replace(
    tree, token_ids=jnp.where(jnp.arange(ROWS) < 5, tree.token_ids, garbage)
  )
  grown = random_tree(np.random.default_rng(4))
  live = np.arange(ROWS) < 5
  sibling = Tree(
    token_ids=jnp.where(live, tree.token_ids, grown.token_ids),
    parents=jnp.where(live, tree.parents, 0),
    depths=jnp.where(live, tree.depths, 1),
    log_probs=grown.log_probs,
    size=grown.size,
  )
  # The same nodes in other slots; the root stays in slot 0.
  order = np.array([0, 6, 3, 5, 2, 1, 4, 7])
  to = np.argsort(order)
  moved = Tree(
    token_ids=sibling.token_ids[:, order],
    parents=jnp.where(sibling.parents < 0, -1, jnp.asarray(to)[sibling.parents])[
      :, order
    ],
    depths=sibling.depths[:, order],
    log_probs=sibling.log_probs[:, order],
    size=sibling.size,
  )
  for other, rows in ((padded, range(5)), (sibling, range(5)), (moved, to[:5])):
    logits, features, keys = (np.asarray(x) for x in verify(prefix(), other))
    for row, at in enumerate(rows):
      assert bits(logits[:, at]) == bits(expected[0][:, row])
      assert bits(features[:, at]) == bits(expected[1][:, row])
      assert bits(keys[:, :, at]) == bits(expected[2][:, :, row])
  assert bits(verify(prefix(), padded)[0]) != bits(expected[0])


def test_capacity_and_leftovers_of_the_cache_do_not_matter():
  tree = random_tree(np.random.default_rng(5))
  expected = verify(prefix(), tree)
  small = prefix()
  unused = np.arange(CACHE) >= np.array(LENGTHS)[:, None]
  leftovers = jnp.where(unused[None, :, :, None], 1e30, small.data)
  large = prefix(CACHE + 128)
  large = LatentCache(large.data.at[:, :, :CACHE].set(small.data), large.lengths)
  for cache in (LatentCache(leftovers, small.lengths), large):
    for want, have in zip(expected, verify(cache, tree), strict=True):
      assert bits(want) == bits(have)


def test_a_tree_of_only_a_spine_is_a_chain():
  rng = np.random.default_rng(6)
  logits = rng.normal(size=(SLOTS, DEPTH, VOCAB)).astype(np.float32)
  best = logits.argmax(axis=2)
  peaked = logits.copy()
  np.put_along_axis(peaked, best[..., None], 40.0, axis=2)
  root = jnp.array([3, 0, 96])
  tree = build_tree(peaked, root, ROWS - 1)
  chain = chain_tree(peaked, root)
  for want, have in zip(jax.tree.leaves(chain), jax.tree.leaves(tree), strict=True):
    assert bits(want) == bits(have)
  assert np.asarray(tree.depths).tolist() == [list(range(ROWS))] * SLOTS
  target_tokens = jnp.argmax(verify(prefix(), tree)[0], axis=2)
  for one, other in zip(
    accept_tree(tree, target_tokens, DEPTH),
    accept_tree(chain, target_tokens, DEPTH),
    strict=True,
  ):
    assert bits(one) == bits(other)


PROMPTS = [prompt(29, 0), prompt(5, 1), prompt(18, 2)]


@functools.cache
def read_prompts():
  """(tokens, lengths, cache, logits, features), read at the width of `decode`."""
  lengths = np.array([len(p) for p in PROMPTS])
  tokens = np.zeros((SLOTS, max(lengths)), np.int32)
  for row, p in zip(tokens, PROMPTS, strict=True):
    row[: len(p)] = p
  model = target()

  @jax.jit
  def read(tokens, lengths):
    return kd.prefill(model, tokens, CACHE, lengths=lengths, feature_layers=TAPS)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(functional, "PREFILL_CHUNK", SETTINGS["prefill_chunk"])
    return (tokens, jnp.asarray(lengths), *read(tokens, lengths))


def test_a_loop_by_hand_writes_what_decode_writes():
  """Tokens, logit bits, rounds and cache."""
  model, drafter = target(), dflash()
  tokens, lengths, cache, logits, features = read_prompts()
  observe = jax.jit(lambda *x: functional.observe(drafter, model, *x))
  draft = jax.jit(lambda *x: kd.draft(drafter, model, *x))
  context = functional.draft_context(drafter, SLOTS, CACHE)
  context = observe(context, tokens, features, lengths)

  root = jnp.argmax(logits, axis=1).astype(jnp.int32)
  texts = [[int(t)] for t in root]
  rows = [[np.asarray(r)] for r in logits]
  rounds = [[] for _ in texts]
  while min(map(len, texts)) < NEW:
    tree = build_tree(draft(context, root), root, ROWS - 1)
    logits, features, keys = verify(cache, tree)
    chosen = jnp.argmax(logits, axis=2).astype(jnp.int32)
    path, length, bonus = accept_tree(tree, chosen, DEPTH)
    slots = jnp.maximum(path, 0)
    accepted = jnp.take_along_axis(tree.token_ids, slots, axis=1)
    seen = jnp.take_along_axis(features, slots[..., None], axis=1)
    cache = commit(cache, keys, path, length)
    context = observe(context, accepted, seen, length)
    root = bonus
    for b, text in enumerate(texts):
      taken = np.asarray(path)[b, : int(length[b])]
      text.extend(np.asarray(chosen)[b, taken].tolist())
      rows[b].extend(np.asarray(logits)[b, taken])
      rounds[b].append(len(taken))

  expected = decode(None, PROMPTS)
  speculated = decode(Mixed.create("dflash"), PROMPTS)
  for b, sequence in enumerate(expected):
    assert texts[b][:NEW] == sequence.tokens.tolist()
    assert bits(np.stack(rows[b][:NEW])) == bits(sequence.logits)
    taken = speculated[b].stats.accepted_lengths
    assert tuple(rounds[b][: len(taken) - 1]) == taken[:-1]

  # The cache is the one that plain decoding of the same text leaves behind.
  _, _, plain_cache, _, _ = read_prompts()
  for t in range(NEW - 1):
    root = jnp.array([text[t] for text in texts])
    _, _, keys = verify(plain_cache, Tree.root_only(root, ROWS))
    ones = jnp.ones((SLOTS,), jnp.int32)
    plain_cache = commit(plain_cache, keys, jnp.zeros((SLOTS, 1), jnp.int32), ones)
  for b, p in enumerate(PROMPTS):
    until = len(p) + NEW - 1
    assert bits(cache.data[:, b, :until]) == bits(plain_cache.data[:, b, :until])


def test_prefill_agrees_with_forward():
  """Absorbed and expanded attention are equal up to rounding.

  Both round sums of at most 125 products of order 1 in fp32 a few dozen times: errors
  of 1e-6 per logit at most have been seen, and 1e-4 is far below any mistake.
  """
  tokens, lengths, cache, logits, features = read_prompts()
  model = target()

  @jax.jit
  def run(tokens):
    _, tapped, _ = model.sequence(tokens, feature_layers=TAPS)
    return kd.forward(model, tokens), tapped

  whole, tapped = run(tokens)
  for b, length in enumerate(np.asarray(lengths)):
    np.testing.assert_allclose(logits[b], whole[b, length - 1], atol=1e-4)
    np.testing.assert_allclose(features[b, :length], tapped[b, :length], atol=1e-4)
  assert cache.lengths.tolist() == lengths.tolist()
  assert cache.capacity == CACHE


def test_bad_arguments():
  model = target()
  with pytest.raises(ValueError, match=r"tokens must be \[B, T\]"):
    kd.forward(model, jnp.zeros((3,), jnp.int32))
  with pytest.raises(ValueError, match="not empty"):
    kd.prefill(model, jnp.zeros((1, 0), jnp.int32), 10)
  with pytest.raises(ValueError, match="max_position_embeddings is 512"):
    kd.forward(model, jnp.zeros((1, 513), jnp.int32))
  with pytest.raises(ValueError, match="cache_len = 3 is shorter than the 4"):
    kd.prefill(model, jnp.zeros((1, 4), jnp.int32), 3)
