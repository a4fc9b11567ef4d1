"""The training loss of the DFlash drafter (arXiv 2602.06036, section 4.2).

Many blocks are cut out of each sequence at random anchors and denoised in one
pass. Every masked row is scored against the token at its own position; early rows
weigh more, because a row counts for nothing at decoding once a row before it is
wrong.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kdtree_jax.drafter.dflash import DFlash


def sample_anchors(
  key: jax.Array, loss_mask: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
  """Draws block anchors uniformly, without replacement.

  Args:
    key: PRNG key, consumed.
    loss_mask: bool [B, T], True at tokens that may be predicted. An anchor is a
      position that is True and whose next one is.
    num_anchors: A, drawn per sequence, at most T.

  Returns:
    (anchors i32 [B, A], valid bool [B, A]): the anchors in ascending order; where
    a sequence has fewer than A of them, the rest are 0 and not valid.

  Raises:
    ValueError: `num_anchors` is not in 1 .. T.
  """
  B, T = loss_mask.shape
  if not 1 <= num_anchors <= T:
    raise ValueError(
      f"num_anchors = {num_anchors} is not allowed: sequences of {T} tokens take "
      f"1 to {T} anchors"
    )
  loss_mask = loss_mask.astype(bool)
  eligible = loss_mask & jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
  order = jnp.where(eligible, jax.random.uniform(key, (B, T)), -1.0)
  drawn, anchors = jax.lax.top_k(order, num_anchors)
  anchors = jnp.sort(jnp.where(drawn >= 0, anchors, T), axis=1)
  valid = anchors < T
  return jnp.where(valid, anchors, 0).astype(jnp.int32), valid


def drafter_loss(
  drafter: DFlash,
  target: Any,
  features: jax.Array,
  tokens: jax.Array,
  anchors: jax.Array,
  valid: jax.Array,
  gamma: float,
  *,
  dpace_smoothing: float | None = None,
  loss_mask: jax.Array | None = None,
  chunk: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Weighted cross-entropy of the masked rows of all blocks.

  Row k = 1 .. L of a block is to predict the token at `anchor + k` and weighs
  `exp(-(k - 1) / gamma)` (DFlash, arXiv 2602.06036, section 4.2), or what
  `dpace_weights` gives it; row 0, the anchor, is given. A row does not count where
  its block is not valid, its position lies beyond the sequence, or `loss_mask` is
  False there. The loss is the weighted sum over the sum of the weights.

  Args:
    drafter: what is trained; differentiate with respect to it.
    target: the frozen target, whose embedding and head are used.
    features: [B, T, taps * target_hidden_size], see `DFlash.block_hidden`.
    tokens: i32 [B, T].
    anchors: i32 [B, A].
    valid: bool [B, A].
    gamma: decay of the weights, in rows; published: 7 for blocks of 16 tokens, 5
      for 10, 4 for 8. Not used with `dpace_smoothing`.
    dpace_smoothing: see `dpace_weights`, or None for the decay by position.
    loss_mask: bool [B, T], or None if every token may be predicted.
    chunk: anchors whose logits are alive at once (they are computed again in the
      backward pass), or None for all. All take `4 * B * A * L * V` bytes, several
      times over.

  Returns:
    (loss, metrics), f32 scalar and:
      accuracy: f32 [L], share of correct top-1 predictions of each row, over the
        rows that count; NaN where none does.
      tokens_per_round: f32, mean of (leading correct rows + 1) over the blocks all
        of whose rows count (others would be cut short); NaN if there is none.
      blocks: i32, number of those blocks.

  Raises:
    ValueError: `gamma` or `chunk` is not positive.
  """
  if gamma <= 0:
    raise ValueError(f"gamma = {gamma} is not allowed: it must be positive")
  if chunk is not None and chunk < 1:
    raise ValueError(f"chunk = {chunk} is not allowed: it must be at least 1")
  T = tokens.shape[1]
  L = drafter.max_depth
  positions = anchors[..., None] + jnp.arange(1, L + 1)  # [B, A, L]
  live = valid[..., None] & (positions < T)
  flat = jnp.minimum(positions, T - 1).reshape(len(tokens), -1)
  labels = jnp.take_along_axis(tokens, flat, axis=1).reshape(positions.shape)
  if loss_mask is not None:
    allowed = jnp.take_along_axis(loss_mask.astype(bool), flat, axis=1)
    live = live & allowed.reshape(positions.shape)

  hidden = drafter.block_hidden(target, features, tokens, anchors)
  losses, correct = _score(target, hidden, labels, chunk)
  if dpace_smoothing is None:
    weights = live * jnp.exp(-jnp.arange(L) / gamma)
  else:
    weights = live * dpace_weights(losses, live, dpace_smoothing)
  # where, not a product: a row that does not count may hold anything.
  total = jnp.sum(jnp.where(live, losses, 0.0) * weights)
  loss = total / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)
  return loss, _metrics(correct, live)


def dpace_weights(losses: jax.Array, live: jax.Array, smoothing: float) -> jax.Array:
  """Weights that follow how far a block is likely to be accepted.

  With q_i the drafter's probability of the right token at row i and
  `p_i = (1 - a) q_i + a`, row j weighs `sum over m >= j of prod over i <= m of
  p_i` (D-PACE, arXiv 2605.18810). At a = 0 this is the gradient of the expected
  number of accepted drafts; a > 0 keeps deep rows learning early on.

  Args:
    losses: f32 [..., L] cross-entropy of each row, so that q = exp(-loss).
    live: bool [..., L]; rows that do not count end the block.
    smoothing: a, 0 .. 1.

  Returns:
    f32 [..., L], without a gradient.
  """
  q = jnp.where(live, jnp.exp(-jax.lax.stop_gradient(losses)), 0.0)
  reached = jnp.cumprod(jnp.where(live, (1 - smoothing) * q + smoothing, 0.0), axis=-1)
  return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)


def _score(
  target: Any, hidden: jax.Array, labels: jax.Array, chunk: int | None
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy f32 [B, A, L] and top-1 hits bool [B, A, L]."""

  def score(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    hidden, labels = rows
    logits = target.head(hidden)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - picked
    return loss, jnp.argmax(logits, axis=-1) == labels

  if chunk is None:
    return score((hidden, labels))
  A = hidden.shape[1]
  pieces = -(-A // chunk)

  def split(x: jax.Array) -> jax.Array:
    """[B, A, ..] -> [pieces, B, chunk, ..], padded with zeros."""
    padding = [(0, 0), (0, pieces * chunk - A)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding).reshape(x.shape[0], pieces, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], pieces * chunk, *x.shape[3:])[:, :A]

  scored = jax.lax.map(jax.checkpoint(score), (split(hidden), split(labels)))
  return jax.tree.map(join, scored)


def _metrics(correct: jax.Array, live: jax.Array) -> dict[str, jax.Array]:
  def mean(values: jax.Array, count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, values / jnp.maximum(count, 1), jnp.nan)

  correct = correct & live
  leading = jnp.sum(jnp.cumprod(correct, axis=-1), axis=-1)  # [B, A]
  whole = jnp.all(live, axis=-1)
  blocks = jnp.sum(whole)
  return {
    "accuracy": mean(jnp.sum(correct, axis=(0, 1)), jnp.sum(live, axis=(0, 1))),
    "tokens_per_round": mean(jnp.sum(jnp.where(whole, leading + 1, 0)), blocks),
    "blocks": blocks,
  }
