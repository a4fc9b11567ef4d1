"""How the target chooses a token: greedily, or by Gumbel-max.

Source: Gumbel-max, arXiv 1411.0030, section 2; nucleus sampling, arXiv
1904.09751, section 3.1.
"""

from __future__ import annotations

import numpy as np

from kdtree_jax.reference import layers
from kdtree_jax.reference.random import gumbel_noise


def top_p_filter(scaled: np.ndarray, top_p: float) -> np.ndarray:
  """Keeps the fewest most probable tokens whose mass reaches `top_p`.

  Args:
    scaled: logits over temperature, f32[V].
    top_p: mass in (0, 1]; 1 keeps all.

  Returns:
    f32[V], -inf for dropped tokens. Equal logits are kept lowest id first, and
    the most probable token always is.
  """
  if top_p >= 1:
    return scaled
  order = np.argsort(-scaled, kind="stable")
  with np.errstate(invalid="ignore"):  # NaN and +inf: the caller drops the choice.
    mass = np.cumsum(layers.softmax(scaled)[order])
  before = np.concatenate([[0], mass[:-1]])
  kept = order[before < top_p]
  filtered = np.full_like(scaled, -np.inf)
  filtered[kept] = scaled[kept]
  return filtered


def choose(
  logits: np.ndarray,
  temperature: float,
  top_p: float,
  seed: int,
  sequence_id: int,
  position: int,
) -> int:
  """The token that the target writes at a position.

  Args:
    logits: [V], cast to float32.
    temperature: 0 for the most probable token; otherwise logits are divided by
      it, filtered by `top_p`, and the noise is added.
    top_p: see `top_p_filter`.
    seed: of the noise, 32 bits.
    sequence_id: of the text, 32 bits.
    position: absolute position of the token to choose.

  Returns:
    The token id; ties go to the lowest.
  """
  logits = np.asarray(logits, np.float32)
  if temperature == 0:
    return int(np.argmax(logits))
  scaled = top_p_filter(logits / np.float32(temperature), top_p)
  noise = gumbel_noise(seed, sequence_id, position, len(logits))
  return int(np.argmax(scaled + noise))
