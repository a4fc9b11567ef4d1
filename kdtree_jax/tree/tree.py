"""A batch of draft trees, one static width for all.

In the shapes below, B denotes the batch, N the tree slots, L the drafter's depth.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

ROOT = 0
NO_PARENT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
  """Draft trees of B sequences.

  Slot 0 is the root, the token that the target wrote last. Nodes follow in the
  order in which best-first search takes them, so a parent lies before its
  children. Slots from `size` on are padding: token 0, parent -1, depth 0,
  log-probability -inf. Live slots are told by `size`, never by their token, since
  every token id is legal.

  Attributes:
    token_ids: token of each slot.
    parents: slot of the parent; -1 for the root and for padding.
    depths: tokens below the root; 0 for the root and for padding.
    log_probs: sum of the drafter's log-probabilities from the root down, in
      nats; 0 for the root.
    size: live slots, the root included.
  """

  token_ids: jax.Array  # i32[B, N]
  parents: jax.Array  # i32[B, N]
  depths: jax.Array  # i32[B, N]
  log_probs: jax.Array  # f32[B, N]
  size: jax.Array  # i32[B]

  @property
  def rows(self) -> int:
    """Static number of slots per sequence, N."""
    return self.token_ids.shape[-1]

  @classmethod
  def root_only(cls, root_tokens: jax.Array, rows: int = 1) -> Tree:
    """Trees without drafts: plain decoding.

    Args:
      root_tokens: i32[B].
      rows: slots per sequence, at least 1.

    Raises:
      ValueError: `rows` is less than 1.
    """
    root = jnp.asarray(root_tokens, jnp.int32)[:, None]
    return cls(
      token_ids=root,
      parents=jnp.full_like(root, NO_PARENT),
      depths=jnp.zeros_like(root),
      log_probs=jnp.zeros(root.shape, jnp.float32),
      size=jnp.ones(root.shape[:1], jnp.int32),
    ).pad_to(rows)

  @classmethod
  def chain(
    cls,
    tokens: jax.Array,
    log_probs: jax.Array,
    root_tokens: jax.Array,
    lengths: jax.Array | None = None,
  ) -> Tree:
    """Trees of a single path.

    Args:
      tokens: i32[B, L], the path below the root.
      log_probs: f32[B, L], log-probability of each token alone, not its sum.
      root_tokens: i32[B].
      lengths: i32[B], tokens of the path to keep, 0 .. L; all where None.

    Returns:
      Trees of 1 + L slots.
    """
    B, L = tokens.shape
    if lengths is None:
      lengths = jnp.full((B,), L, jnp.int32)
    sums = [jnp.zeros((B,), jnp.float32)]
    for d in range(L):  # one by one: cumsum may add in another order
      sums.append(sums[-1] + log_probs[:, d])
    slots = jnp.broadcast_to(jnp.arange(1 + L, dtype=jnp.int32), (B, 1 + L))
    live = slots <= lengths[:, None]
    all_tokens = jnp.concatenate([root_tokens[:, None], tokens], axis=1)
    return cls(
      token_ids=jnp.where(live, all_tokens, 0).astype(jnp.int32),
      parents=jnp.where(live, slots - 1, NO_PARENT),
      depths=jnp.where(live, slots, 0),
      log_probs=jnp.where(live, jnp.stack(sums, axis=1), -jnp.inf),
      size=lengths.astype(jnp.int32) + 1,
    )

  def pad_to(self, rows: int) -> Tree:
    """The same trees in `rows` slots, a number not less than the present one.

    Raises:
      ValueError: the trees have more slots already.
    """
    extra = rows - self.rows
    if extra < 0:
      raise ValueError(
        f"rows = {rows} is not allowed: the tree has {self.rows} slots already"
      )

    def pad(x: jax.Array, value: float) -> jax.Array:
      return jnp.pad(x, ((0, 0), (0, extra)), constant_values=value)

    return Tree(
      token_ids=pad(self.token_ids, 0),
      parents=pad(self.parents, NO_PARENT),
      depths=pad(self.depths, 0),
      log_probs=pad(self.log_probs, -jnp.inf),
      size=self.size,
    )

  def visibility(self) -> jax.Array:
    """bool[B, N, N]: row i sees slot j, that is, j is i or an ancestor of i.

    A padding slot sees itself alone, so every row has `depths + 1` ones.
    """
    N = self.rows
    seen = jnp.broadcast_to(jnp.eye(N, dtype=bool), (*self.parents.shape, N))
    return _union_over_ancestors(seen, self.parents, reach=N)


def ancestors(tree: Tree, max_depth: int) -> jax.Array:
  """The ancestor-or-self of each slot at each depth.

  Args:
    tree: trees no deeper than `max_depth`.
    max_depth: static depth that the table covers.

  Returns:
    i32[B, N, max_depth + 1]: slots by depth, -1 beyond the slot's own depth. A
    padding slot stands alone at depth 0.
  """
  depth = jnp.arange(max_depth + 1)
  slots = jnp.arange(tree.rows, dtype=jnp.int32)[:, None]
  own = jnp.where(tree.depths[..., None] == depth, slots, -1)
  return _union_over_ancestors(own, tree.parents, reach=max_depth + 1)


def _union_over_ancestors(
  table: jax.Array, parents: jax.Array, reach: int
) -> jax.Array:
  """Maximum of `table` rows over each slot and all its ancestors.

  Pointer doubling: after j steps a row covers 2**j slots of its path. A slot
  without parent points at itself, which changes no maximum.

  Args:
    table: [B, N, K].
    parents: i32[B, N].
    reach: most slots on a path.
  """
  up = jnp.where(parents < 0, jnp.arange(parents.shape[-1]), parents)
  covered = 1
  while covered < reach:
    above = jnp.take_along_axis(table, up[..., None], axis=1, mode="clip")
    table = jnp.maximum(table, above)
    up = jnp.take_along_axis(up, up, axis=1, mode="clip")
    covered *= 2
  return table
