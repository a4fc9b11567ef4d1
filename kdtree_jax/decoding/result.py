"""What decoding returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Stats:
  """How a sequence was decoded.

  Attributes:
    rounds: verify passes of the target after the prefill.
    accepted_lengths: tokens committed by each round (accepted drafts and the
      bonus), cut at stop and limit; their sum is `len(tokens) - 1`, because the
      first token comes from the prefill.
    tokens_per_round: mean of `accepted_lengths`; NaN without rounds.
    prefill_seconds: wall time of the prefill that the prompt was part of.
    decode_seconds: wall time of the rounds, neighbours in the batch included.
    compile_seconds: wall time spent compiling, not counted in the other two.
  """

  rounds: int
  accepted_lengths: tuple[int, ...]
  prefill_seconds: float
  decode_seconds: float
  compile_seconds: float

  @property
  def tokens_per_round(self) -> float:
    if not self.accepted_lengths:
      return float("nan")
    return sum(self.accepted_lengths) / len(self.accepted_lengths)


@dataclasses.dataclass(frozen=True)
class Round:
  """One round of one sequence, kept on request.

  Attributes:
    token_ids, parents, depths: i32 [N]; log_probs: f32 [N]; size: live nodes
      with the root: the draft tree, see `kdtree_jax.Tree`.
    draft_logits: f32 [L, V] the drafter's table.
    path: accepted slots from the root.
    start: absolute position of the root.
  """

  token_ids: np.ndarray
  parents: np.ndarray
  depths: np.ndarray
  log_probs: np.ndarray
  size: int
  draft_logits: np.ndarray
  path: tuple[int, ...]
  start: int


@dataclasses.dataclass(frozen=True)
class SequenceResult:
  """One prompt's continuation.

  Attributes:
    tokens: i32 [T] generated tokens, the stop token included.
    finish_reason: "stop", "length", "cache" (no position left) or "error" (NaN
      or +inf in the target's logits; `tokens` holds what came before).
    logprobs: f32 [T] log-softmax, in fp32, of the raw logits at each token,
      before temperature and filters.
    stats: see `Stats`.
    logits: f32 [T, V] raw logits that each token was chosen from, or None.
    rounds: each round's tree, or None.
  """

  tokens: np.ndarray
  finish_reason: str
  logprobs: np.ndarray
  stats: Stats
  logits: np.ndarray | None = None
  rounds: tuple[Round, ...] | None = None


@dataclasses.dataclass(frozen=True)
class DecodeResult(Sequence):
  """Continuations in the order of the prompts; indexable, iterable.

  Attributes:
    sequences: one per prompt.
  """

  sequences: tuple[SequenceResult, ...]

  def __getitem__(self, index):
    return self.sequences[index]

  def __len__(self) -> int:
    return len(self.sequences)

  def __iter__(self) -> Iterator[SequenceResult]:
    return iter(self.sequences)

  @property
  def tokens(self) -> list[np.ndarray]:
    return [s.tokens for s in self.sequences]

  @property
  def finish_reason(self) -> list[str]:
    return [s.finish_reason for s in self.sequences]

  @property
  def logprobs(self) -> list[np.ndarray]:
    return [s.logprobs for s in self.sequences]

  @property
  def stats(self) -> list[Stats]:
    return [s.stats for s in self.sequences]

  @property
  def logits(self) -> list[np.ndarray | None]:
    return [s.logits for s in self.sequences]

  @property
  def tokens_per_round(self) -> float:
    """Mean tokens per round, pooled over all rounds of all sequences."""
    lengths = [n for s in self.sequences for n in s.stats.accepted_lengths]
    return sum(lengths) / len(lengths) if lengths else float("nan")


@dataclasses.dataclass(frozen=True)
class StreamEvent:
  """Tokens of one sequence that became known at the end of a chunk.

  Attributes:
    index: of the prompt.
    tokens: i32 [t], t >= 0 new tokens.
    logprobs: f32 [t].
    finish_reason: as in `SequenceResult`, or None while it goes on.
    result: the whole sequence, once it has ended.
  """

  index: int
  tokens: np.ndarray
  logprobs: np.ndarray
  finish_reason: str | None
  result: SequenceResult | None = None
