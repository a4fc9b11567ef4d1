"""Golden cases of `emit`: texts near all of their ends, and numbers that disagree."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kdtree_jax.reference.golden.case import GoldenCase, bits

NO_TOKEN = -1
# Why a text ended, and 5 for an idle slot.
RUNNING, STOP, LENGTH, CACHE, ERROR, IDLE = range(6)
# Updated in place.
STATE = ("root", "finish", "generated", "rounds", "tokens", "logprobs", "accepted")
EXTREME = np.iinfo(np.int32)

Arrays = dict[str, np.ndarray]


def cases(rng: np.random.Generator, *, small: bool) -> list[GoldenCase]:
  """Paths shorter and longer than a warp, and every way to end.

  Args:
    rng: source of randomness.
    small: fewer sequences.
  """
  made = [
    _random("random", rng, batch=64),
    _random("one slot", rng, batch=16, nodes=1, longest=1, room=3),
    _random("a warp of slots", rng, batch=16, nodes=33, longest=32, room=40, vocab=99),
    _random("a warp and a slot", rng, 16, nodes=40, longest=33, room=64, vocab=99),
    _random("three warps of slots", rng, 16, nodes=97, longest=96, room=128, vocab=99),
    _random("room for one token", rng, batch=8, room=1),
    _random("no room", rng, batch=4, room=0),
    _random("no stop token", rng, batch=16, stops=()),
    _random("many stop tokens", rng, batch=16, vocab=300, stops=range(0, 300, 7)),
    _random("no sequence", rng, batch=0),
    _stops(rng),
    _wild("path out of range", rng, path=True),
    _wild("lengths out of range", rng, lengths=(-3, 0, 7, 8, 1 << 20)),
    _wild("counts beyond the text", rng, counts=(12, 13, 1 << 20)),
    _wild("counts before the text", rng, counts=(-1, -2, -8, -(1 << 20))),
  ]
  if not small:
    made += [
      _random(
        f"random {i}",
        rng,
        batch=200,
        nodes=int(rng.integers(1, 80)),
        longest=int(rng.integers(1, 80)),
        room=int(rng.integers(1, 100)),
        vocab=int(rng.choice([3, 20, 1000])),
      )
      for i in range(20)
    ]
  return made


def _inputs(
  rng: np.random.Generator,
  batch: int,
  nodes: int,
  longest: int,
  room: int,
  vocab: int,
  stops: tuple[int, ...] | range,
) -> Arrays:
  """A round and the texts before it, some of which will end."""
  capacity = 30 + longest

  def draw(low: int, high: int, *shape: int) -> np.ndarray:
    return rng.integers(low, max(high, low + 1), (batch, *shape)).astype(np.int32)

  length = draw(1, longest + 1)
  path = np.full((batch, longest), -1, np.int32)
  choices = draw(0, vocab, nodes)
  bonus = np.zeros(batch, np.int32)
  for b, count in enumerate(length):
    # From the root on; slots repeat on a path that is longer than the tree.
    path[b, :count] = np.resize(np.append(0, 1 + rng.permutation(nodes - 1)), count)
    last = path[b, count - 1]
    if rng.random() < 0.15:
      choices[b, last] = NO_TOKEN  # The logits were not finite.
    bonus[b] = choices[b, last]
  log_probs = rng.standard_normal((batch, longest)).astype(np.float32)
  log_probs[rng.random(log_probs.shape) < 0.1] = -np.inf
  log_probs[rng.random(log_probs.shape) < 0.1] = np.nan
  reasons = [RUNNING] * 15 + [STOP, LENGTH, CACHE, ERROR, IDLE]
  return {
    "token_ids": draw(0, vocab, nodes),
    "choices": choices,
    "path": path,
    "length": length,
    "bonus": bonus,
    "log_probs": log_probs,
    "lengths": draw(capacity // 2, capacity),
    # Padded with -1, which also stands for a choice that failed.
    "stop_tokens": np.array([*stops, -1] if stops else [], np.int32),
    "capacity": np.array(capacity, np.int32),
    "root": draw(0, vocab),
    "finish": rng.choice(reasons, batch).astype(np.int32),
    "generated": draw(1, room) if room > 1 else np.zeros(batch, np.int32),
    "rounds": draw(0, room),
    "tokens": draw(0, vocab, room),
    "logprobs": rng.standard_normal((batch, room)).astype(np.float32),
    "accepted": draw(0, longest, room),
  }


def _random(
  name: str,
  rng: np.random.Generator,
  batch: int,
  nodes: int = 9,
  longest: int = 6,
  room: int = 12,
  vocab: int = 5,
  stops: tuple[int, ...] | range = (3, -1, 4),
) -> GoldenCase:
  return _case(name, _inputs(rng, batch, nodes, longest, room, vocab, stops))


def _stops(rng: np.random.Generator) -> GoldenCase:
  """Two stop tokens, the first at each place of a path of two warps in turn."""
  longest = 64
  given = _inputs(rng, longest, longest, longest, longest + 1, 1, (7,))
  given["path"][:] = np.arange(longest)
  given["length"][:], given["finish"][:], given["generated"][:] = longest, RUNNING, 1
  given["choices"][:] = 0
  for place in range(longest):
    given["choices"][place, place] = 7
    given["choices"][place, (place + longest) // 2] = 7
  given["bonus"] = given["choices"][:, -1].copy()
  return _case("a stop token in any place", given)


def _wild(
  name: str,
  rng: np.random.Generator,
  *,
  path: bool = False,
  lengths: tuple[int, ...] = (),
  counts: tuple[int, ...] = (),
) -> GoldenCase:
  """Numbers that no round makes; nothing is read or written out of range."""
  batch, nodes = 24, 9
  given = _inputs(rng, batch, nodes, 6, 12, 9, (3,))
  if path:
    wild = [EXTREME.min, -1, 0, nodes - 1, nodes, EXTREME.max]
    given["path"] = rng.choice(wild, given["path"].shape).astype(np.int32)
  if lengths:
    given["length"] = rng.choice(lengths, batch).astype(np.int32)
  for field in ("generated", "rounds") if counts else ():
    given[field] = rng.choice([*counts, 3], batch).astype(np.int32)
  return _case(name, given)


def _case(name: str, inputs: Arrays) -> GoldenCase:
  outputs = _emitted(inputs)
  return GoldenCase(
    op="emit",
    name=name,
    attributes={},
    inputs=inputs,
    outputs=outputs,
    compare=bits(outputs),
  )


def _emitted(inputs: Mapping[str, np.ndarray]) -> Arrays:
  """What a round makes of the texts, one sequence and one token at a time.

  What no caller should ask for is fixed as both forms of the op have it: slots are cut
  to the tree, and a length beyond the path counts as a stop token behind it. Places
  outside of the text are dropped, as the kernel does.
  """
  batch, longest = inputs["path"].shape
  nodes, room = inputs["token_ids"].shape[1], inputs["tokens"].shape[1]
  slots = np.clip(inputs["path"], 0, nodes - 1)
  out = {name: inputs[name].copy() for name in STATE}
  out["committed"], out["kept"] = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
  out["new_lengths"] = inputs["lengths"].copy()
  out["path_tokens"] = np.take_along_axis(inputs["token_ids"], slots, axis=1)
  chosen = np.take_along_axis(inputs["choices"], slots, axis=1)
  stop_tokens = set(inputs["stop_tokens"].tolist())
  for b in range(batch):
    if inputs["finish"][b] != RUNNING:
      continue
    failed = inputs["bonus"][b] == NO_TOKEN
    committed, begin = int(inputs["length"][b]), int(inputs["generated"][b])
    count = min(committed - failed, room - begin)
    stopped, kept = count > longest, min(count, longest + 1)
    for i in range(min(count, longest)):
      if 0 <= begin + i < room:
        out["tokens"][b, begin + i] = chosen[b, i]
        out["logprobs"][b, begin + i] = inputs["log_probs"][b, i]
      if chosen[b, i] in stop_tokens:
        stopped, kept = True, i + 1
        break
    out["committed"][b], out["kept"][b] = committed, kept
    out["generated"][b] += kept
    out["new_lengths"][b] += committed
    if kept > 0:
      rounds = inputs["rounds"][b]
      out["root"][b] = chosen[b, min(kept, longest) - 1]
      out["rounds"][b] += 1
      if 0 <= rounds < room:
        out["accepted"][b, rounds] = kept
    if stopped:
      out["finish"][b] = STOP
    elif out["generated"][b] >= room:
      out["finish"][b] = LENGTH
    elif failed:
      out["finish"][b] = ERROR
    elif out["new_lengths"][b] >= inputs["capacity"]:
      out["finish"][b] = CACHE
  return out
