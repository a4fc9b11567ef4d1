"""What is computed from generated texts: acceptance, repetition, intervals.

In a round the target accepts `a` drafts and adds one token of its own, so it
commits k = a + 1 tokens, cut at stop and limit. "micro" pools all rounds of all
prompts; "macro" is the mean over prompts of each prompt's own mean, which gives
a short answer the weight of a long one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """Acceptance of one method over a set of prompts.

  Attributes:
    prompts: prompts with at least one round; the others count nowhere.
    rounds: verify passes in all.
    committed: tokens that those rounds committed; the first token of a text
      comes from its prefill and is not among them.
    tokens_per_round_micro: mean of k over all rounds; NaN without rounds.
    tokens_per_round_macro: mean over prompts of the mean of k; NaN likewise.
    unconditional: u_d for d = 1 .. L, share of rounds with a >= d. Their sum is
      `tokens_per_round_micro - 1`.
    conditional: c_d = u_d / u_(d - 1) with u_0 = 1: of the rounds that reached
      depth d - 1, the share that went on; NaN where none did.
    histogram: rounds with a = 0, 1, .. L.
    zero_share: share of rounds without an accepted draft.
  """

  prompts: int
  rounds: int
  committed: int
  tokens_per_round_micro: float
  tokens_per_round_macro: float
  unconditional: tuple[float, ...]
  conditional: tuple[float, ...]
  histogram: tuple[int, ...]
  zero_share: float


def acceptance(accepted_lengths: Sequence[Sequence[int]], depth: int) -> Acceptance:
  """Counts the rounds of a set of prompts.

  Args:
    accepted_lengths: per prompt, tokens committed by each round (accepted drafts
      and one more), as in `Stats.accepted_lengths`.
    depth: L, most drafts that a round can accept.

  Raises:
    ValueError: a round committed none, or more than L + 1 tokens.
  """
  per_prompt = [np.asarray(k, np.int64) for k in accepted_lengths if len(k)]
  pooled = np.concatenate(per_prompt) if per_prompt else np.zeros(0, np.int64)
  if pooled.size and not (1 <= pooled.min() and pooled.max() <= depth + 1):
    raise ValueError(
      f"accepted_lengths holds {pooled.min()} .. {pooled.max()}; a round of depth "
      f"{depth} commits 1 .. {depth + 1} tokens"
    )
  histogram = np.bincount(pooled - 1, minlength=depth + 1)
  rounds = len(pooled)
  at_least = np.cumsum(histogram[::-1])[::-1]  # rounds with a >= d, d = 0 .. L
  unconditional = at_least[1:] / rounds if rounds else np.full(depth, np.nan)
  before = at_least[:-1]
  conditional = np.divide(
    at_least[1:], before, out=np.full(depth, np.nan), where=before > 0
  )
  nothing = float("nan")
  return Acceptance(
    prompts=len(per_prompt),
    rounds=rounds,
    committed=int(pooled.sum()),
    tokens_per_round_micro=float(pooled.mean()) if rounds else nothing,
    tokens_per_round_macro=(
      float(np.mean([k.mean() for k in per_prompt])) if rounds else nothing
    ),
    unconditional=tuple(unconditional.tolist()),
    conditional=tuple(conditional.tolist()),
    histogram=tuple(histogram.tolist()),
    zero_share=float(histogram[0] / rounds) if rounds else nothing,
  )


def repeated_ngram_share(
  texts: Sequence[Sequence[int] | np.ndarray], n: int = 8
) -> float:
  """Share of the n-grams of generated texts that repeat an earlier one.

  A text that loops is easy to draft, so acceptance means little without this
  figure beside it.

  Args:
    texts: generated tokens of each prompt, prompts not included.
    n: tokens per n-gram.

  Returns:
    Over all n-grams of all texts, the share of those that occurred before in
    the same text; NaN where every text is shorter than n.
  """
  total = repeated = 0
  for text in texts:
    tokens = [int(t) for t in text]
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    total += len(grams)
    repeated += len(grams) - len(set(grams))
  return repeated / total if total else float("nan")


def ratio_interval(
  above: tuple[Sequence[float], Sequence[float]],
  below: tuple[Sequence[float], Sequence[float]],
  seed: int = 0,
) -> tuple[float, float]:
  """95 % interval of a ratio of two pooled means over the same prompts.

  Paired bootstrap: prompts are drawn with replacement, `RESAMPLES` times, and
  both means are taken over the same draw.

  Args:
    above: (sum, count) per prompt of the mean in the numerator.
    below: likewise of the denominator.
    seed: of the draws.

  Returns:
    The 2.5 and 97.5 percentiles; NaN without prompts.
  """
  columns = np.array([*above, *below], np.float64)  # [4, prompts]
  prompts = columns.shape[1]
  if prompts == 0:
    return float("nan"), float("nan")
  rng = np.random.default_rng(seed)
  draws = rng.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
  sums = draws @ columns.T  # [RESAMPLES, 4]
  with np.errstate(divide="ignore", invalid="ignore"):
    ratios = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
  low, high = np.nanpercentile(ratios, [2.5, 97.5])
  return float(low), float(high)


def median_ratio_interval(
  above: np.ndarray, below: np.ndarray, seed: int = 0
) -> tuple[float, float]:
  """95 % interval of a ratio of two medians over the same prompts.

  Args:
    above: [prompts, repetitions] values whose median is the numerator.
    below: [prompts, repetitions], of the same prompts.
    seed: of the paired bootstrap over prompts.

  Returns:
    The 2.5 and 97.5 percentiles.
  """
  rng = np.random.default_rng(seed)
  prompts = len(above)
  draws = rng.integers(0, prompts, (RESAMPLES, prompts))
  ratios = np.median(above[draws], axis=(1, 2)) / np.median(below[draws], axis=(1, 2))
  low, high = np.percentile(ratios, [2.5, 97.5])
  return float(low), float(high)
