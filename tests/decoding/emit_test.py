"""The bookkeeping of a round against one token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kdtree_jax.decoding.emit import Accepted, Commit, append, keep_logits
from kdtree_jax.decoding.state import DecodeState, Limits
from kdtree_jax.model.cache import LatentCache

N, A, M, VOCAB = 9, 6, 12, 5
CAPACITY = 30


def limits() -> Limits:
  return Limits(jnp.array([3, -1, 4, -1]), jnp.asarray(CAPACITY), jnp.asarray(8))


def random_case(
  rng: np.random.Generator, batch: int, path_len: int = A
) -> tuple[DecodeState, Accepted]:
  """Texts near all of their ends, and paths that agree with the trees' tokens."""
  A = path_len
  length = rng.integers(1, A + 1, batch)
  path = np.full((batch, A), -1, np.int32)
  tokens = rng.integers(0, VOCAB, (batch, N)).astype(np.int32)
  choices = rng.integers(0, VOCAB, (batch, N)).astype(np.int32)
  bonus = np.zeros(batch, np.int32)
  for b in range(batch):
    # Distinct slots; on longer paths than trees they repeat, which is as good.
    slots = rng.permutation(np.arange(1, N))
    path[b, : length[b]] = np.resize(np.append(0, slots), length[b])
    if A <= N:
      along = path[b, : length[b]]
      choices[b, along[:-1]] = tokens[b, along[1:]]
    if rng.random() < 0.15:
      choices[b, path[b, length[b] - 1]] = -1  # logits that were not finite
    bonus[b] = choices[b, path[b, length[b] - 1]]
  reasons = [DecodeState.RUNNING] * 8 + [1, 2, 3, 4, 5]
  ints = {
    "root": rng.integers(0, VOCAB, batch),
    "sequence_ids": np.arange(batch),
    "finish": rng.choice(reasons, batch),
    "generated": rng.integers(1, M, batch),
    "tokens": rng.integers(0, VOCAB, (batch, M)),
    "rounds": rng.integers(0, M, batch),
    "accepted": rng.integers(0, A, (batch, M)),
  }
  lengths = rng.integers(1, CAPACITY, batch)
  state = DecodeState(
    cache=LatentCache(jnp.zeros((1,)), jnp.asarray(lengths, jnp.int32)),
    drafter=(),
    logprobs=jnp.asarray(rng.normal(size=(batch, M)), jnp.float32),
    logits=jnp.zeros((batch, M, VOCAB)),
    **{name: jnp.asarray(x, jnp.int32) for name, x in ints.items()},
  )
  log_probs = rng.normal(size=(batch, A)).astype(np.float32)
  arrays = (tokens, choices, path, length.astype(np.int32), bonus, log_probs)
  return state, Accepted(*map(jnp.asarray, arrays))


def one_by_one(state: dict, accepted: dict, b: int) -> tuple[int, int]:
  """Appends the choices of a sequence until it ends; returns (committed, kept)."""
  if state["finish"][b] != DecodeState.RUNNING:
    return 0, 0
  slots = accepted["path"][b][: accepted["length"][b]]
  kept, reason = 0, DecodeState.RUNNING
  for i, slot in enumerate(slots):
    token = accepted["choices"][b, slot]
    if token == -1:
      reason = DecodeState.ERROR
      break
    at = state["generated"][b]
    state["tokens"][b, at], state["logprobs"][b, at] = (
      token,
      accepted["log_probs"][b, i],
    )
    state["logits"][b, at] = slot
    state["root"][b] = token
    state["generated"][b] += 1
    kept += 1
    if token in (3, 4):
      reason = DecodeState.STOP
    elif state["generated"][b] == M:
      reason = DecodeState.LENGTH
    if reason:
      break
  state["lengths"][b] += len(slots)
  if not reason and state["lengths"][b] >= CAPACITY:
    reason = DecodeState.CACHE
  state["finish"][b] = reason
  if kept:
    state["accepted"][b, state["rounds"][b]] = kept
    state["rounds"][b] += 1
  return len(slots), kept


def as_dict(state: DecodeState) -> dict[str, np.ndarray]:
  names = ("root", "finish", "generated", "tokens", "logprobs", "logits", "rounds")
  out = {name: np.array(getattr(state, name)) for name in (*names, "accepted")}
  return out | {"lengths": np.array(state.cache.lengths)}


def test_equals_one_token_at_a_time():
  @jax.jit
  def run(state, accepted):
    new, commit = append(state, accepted, limits(), "auto")
    # Logits that tell their slot.
    logits = jnp.broadcast_to(jnp.arange(N, dtype=jnp.float32)[:, None], (N, VOCAB))
    logits = jnp.broadcast_to(logits, (state.root.shape[0], N, VOCAB))
    return keep_logits(new, logits, accepted.path, commit, state.generated), commit

  rng = np.random.default_rng(0)
  seen = set()
  for _ in range(10):
    state, accepted = random_case(rng, 200)
    new, commit = run(state, accepted)
    expected = as_dict(state)
    arrays = {k: np.asarray(v) for k, v in vars(accepted).items()}
    for b in range(200):
      committed, kept = one_by_one(expected, arrays, b)
      assert (commit.length[b], commit.kept[b]) == (committed, kept)
    for name, value in as_dict(new).items():
      np.testing.assert_array_equal(value, expected[name], err_msg=name)
    slots = np.maximum(arrays["path"], 0)
    path_tokens = np.take_along_axis(arrays["token_ids"], slots, 1)
    np.testing.assert_array_equal(commit.path_tokens, path_tokens)
    seen |= set(np.asarray(new.finish)[np.asarray(state.finish) == 0].tolist())
  assert seen == {0, 1, 2, 3, 4}  # every way to end, and going on


def test_a_state_without_logits_keeps_none():
  state, accepted = random_case(np.random.default_rng(1), 3)
  lean = DecodeState(**{**vars(state), "logits": jnp.zeros((3, 0, VOCAB))})
  new, commit = append(lean, accepted, limits(), "auto")
  assert isinstance(commit, Commit)
  kept = keep_logits(new, jnp.ones((3, N, VOCAB)), accepted.path, commit, new.generated)
  assert kept is new and new.logits.shape == (3, 0, VOCAB)
