"""Decoding of one prompt: plainly, along a chain, or over draft trees.

Source: DDTree, arXiv 2604.12989; liranringel/ddtree, ddtree.py. The target
chooses a token at every node (sampled ones by noise that is a function of the
position), and the path of the tree that agrees with its choices is kept: the
text is the one that plain decoding writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kdtree_jax.config import ModelConfig
from kdtree_jax.reference.model import forward, init_cache, verify
from kdtree_jax.reference.sampling import choose
from kdtree_jax.reference.tree import (
  Tree,
  accept_tree,
  build_tree,
  compact,
  log_softmax_topk,
)
from kdtree_jax.reference.weights import Weights

Method = Literal["plain", "chain", "ddtree"]

# (features [length, taps * D], root token, length) -> logits [L, V]
DraftFn = Callable[[np.ndarray, int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class DecodeResult:
  """A decoded sequence.

  Attributes:
    tokens: generated tokens, the prompt not included.
    logits: raw logits [len(tokens), V] that each was chosen from.
    accepted_lengths: tokens committed by each round, drafts and the bonus, cut
      at stop and limit. The first token belongs to the prefill.
    finish_reason: "stop", "length", or "error" where NaN or +inf appeared in
      the logits of the next token.
  """

  tokens: list[int]
  logits: np.ndarray
  accepted_lengths: list[int]
  finish_reason: Literal["stop", "length", "error"]


class _Committed(NamedTuple):
  """What the text so far, except the root, left behind."""

  length: int
  cache: np.ndarray  # [layers, S, R + P]
  features: np.ndarray  # [length, taps * D]


def decode(
  config: ModelConfig,
  weights: Weights,
  prompt: Sequence[int],
  *,
  method: Method = "plain",
  draft_fn: DraftFn | None = None,
  feature_layers: Sequence[int] = (),
  budget: int | None = None,
  max_new_tokens: int = 128,
  temperature: float = 0.0,
  top_p: float = 1.0,
  seed: int = 0,
  sequence_id: int = 0,
  stop_token_ids: Sequence[int] | None = None,
  dtype: DTypeLike = np.float32,
) -> DecodeResult:
  """Decodes one prompt.

  Args:
    config: the target's.
    weights: its parameters under Hugging Face's names.
    prompt: one token or more.
    method: "plain", "chain" (the drafter's top-1 path) or "ddtree".
    draft_fn: the drafter, such as `functools.partial(draft, drafter_config,
      drafter_weights, weights)`; not used by "plain".
    feature_layers: taps of the features that `draft_fn` gets.
    budget: tree nodes without the root; None for 16 ("ddtree") or for as many
      as the drafter proposes ("chain").
    max_new_tokens: tokens generated at most, 1 or more.
    temperature: 0 decodes greedily.
    top_p: nucleus mass.
    seed: of the sampling noise.
    sequence_id: of the sampling noise.
    stop_token_ids: tokens that end the text; None for the config's eos.
    dtype: float32 or float64.

  Returns:
    Tokens, their logits, and how the rounds went.

  Raises:
    ValueError: an argument is not allowed.
  """
  propose = _proposer(method, draft_fn, budget)
  stop = config.eos_token_id if stop_token_ids is None else tuple(stop_token_ids)
  text = _Text(stop, max_new_tokens)

  def pick(logits: np.ndarray, position: int) -> int:
    return choose(logits, temperature, top_p, seed, sequence_id, position)

  length = len(prompt)
  # Room for a whole accepted path beyond the limit is not needed: compaction
  # drops rows past the end, and the text is cut there.
  cache = init_cache(config, length + max_new_tokens)
  start = forward(
    config, weights, np.array(prompt), cache=cache, taps=feature_layers, dtype=dtype
  )
  state = _Committed(length, start.cache, start.features)
  text.extend([pick(start.logits[-1], length)], start.logits[-1:])

  accepted_lengths = []
  while text.finish_reason is None:
    tree = propose(state, text.tokens[-1])
    out = verify(
      config,
      weights,
      state.cache,
      state.length,
      tree,
      taps=feature_layers,
      dtype=dtype,
    )
    positions = state.length + tree.depths + 1
    targets = np.array([pick(*row) for row in zip(out.logits, positions, strict=True)])
    path, accepted, _ = accept_tree(tree, targets, int(np.max(tree.depths)))
    path = path[:accepted]
    # A child on the path carries its parent's target token, so the committed
    # drafts and the bonus are just the targets along the path.
    count = text.extend(targets[path].tolist(), out.logits[path])
    if count:
      accepted_lengths.append(count)
    state = _commit(state, out.tree_keys, out.features, path)
  return DecodeResult(
    text.tokens, text.logits(config.vocab_size), accepted_lengths, text.finish_reason
  )


def _commit(
  state: _Committed, tree_keys: np.ndarray, features: np.ndarray, path: np.ndarray
) -> _Committed:
  """Moves the keys and features of the accepted nodes behind the committed ones."""
  layers = zip(state.cache, tree_keys, strict=True)
  cache = [compact(rows, keys, path, len(path), state.length) for rows, keys in layers]
  return _Committed(
    length=state.length + len(path),
    cache=np.stack(cache),
    features=np.concatenate([state.features, features[path]]),
  )


def _proposer(
  method: Method, draft_fn: DraftFn | None, budget: int | None
) -> Callable[[_Committed, int], Tree]:
  """How a round's tree is made from the committed state and the root token."""
  if method not in ("plain", "chain", "ddtree"):
    raise ValueError(f"method = {method!r} must be 'plain', 'chain' or 'ddtree'")
  if method != "plain" and draft_fn is None:
    raise ValueError(f"draft_fn is None, but method {method!r} needs a drafter")
  if budget is not None and budget < 0:
    raise ValueError(f"budget = {budget} must be 0 or more")

  def propose(state: _Committed, root: int) -> Tree:
    if method == "plain" or draft_fn is None:
      return build_tree(np.zeros((0, 0)), np.zeros((0, 0)), 0, root)
    logits = draft_fn(state.features, root, state.length)
    nodes = budget
    if nodes is None:
      nodes = 16 if method == "ddtree" else len(logits)
    if method == "chain":
      # Only one candidate per depth: the best tree is the top-1 path.
      return build_tree(*log_softmax_topk(logits, 1), min(nodes, len(logits)), root)
    k = min(nodes, logits.shape[-1])
    return build_tree(*log_softmax_topk(logits, k), nodes, root)

  return propose


class _Text:
  """Generated tokens with their logits, cut at stop, limit and bad logits."""

  def __init__(self, stop: Sequence[int], limit: int):
    if limit < 1:
      raise ValueError(f"max_new_tokens = {limit} must be 1 or more")
    self.tokens: list[int] = []
    self.finish_reason: Literal["stop", "length", "error"] | None = None
    self._rows: list[np.ndarray] = []
    self._stop = frozenset(stop)
    self._limit = limit

  def extend(self, tokens: Sequence[int], rows: np.ndarray) -> int:
    """Appends tokens until the text ends; returns how many were taken."""
    before = len(self.tokens)
    for token, row in zip(tokens, rows, strict=True):
      if np.any(np.isnan(row) | np.isposinf(row)):
        self.finish_reason = "error"
        break
      self.tokens.append(token)
      self._rows.append(row)
      if token in self._stop:
        self.finish_reason = "stop"
        break
      if len(self.tokens) == self._limit:
        self.finish_reason = "length"
        break
    return len(self.tokens) - before

  def logits(self, vocab_size: int) -> np.ndarray:
    return np.array(self._rows).reshape(len(self._rows), vocab_size)
