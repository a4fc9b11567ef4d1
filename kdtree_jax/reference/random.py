"""Counter-based random bits, and the Gumbel noise of every sampled token.

Threefry2x32 with 20 rounds: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), section 4, checked against the known answers of its Random123
library. The noise of a token depends on (seed, sequence id, absolute position)
alone, so a sampled text does not depend on how it was speculated.
"""

from __future__ import annotations

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF


def threefry2x32(
  key: tuple[int, int], counters: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """Threefry2x32-20.

  Args:
    key: two 32-bit words.
    counters: two arrays of 32-bit words, of the same shape.

  Returns:
    Two arrays u32 of that shape.
  """
  keys = [int(word) & _MASK for word in key]
  schedule = [np.uint32(word) for word in (*keys, keys[0] ^ keys[1] ^ _PARITY)]
  x0, x1 = (np.array(words, dtype=np.uint32, ndmin=1) for words in counters)
  x0 = x0 + schedule[0]
  x1 = x1 + schedule[1]
  for group in range(5):
    for distance in _ROTATIONS[group % 2]:
      x0 = x0 + x1
      x1 = (x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance))
      x1 = x1 ^ x0
    x0 = x0 + schedule[(group + 1) % 3]
    x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
  shape = np.shape(counters[0])
  return x0.reshape(shape), x1.reshape(shape)


def random_bits(
  seed: int, sequence_id: int, position: int, vocab_size: int
) -> np.ndarray:
  """u32[V]: the bits behind the choice of the token at a position.

  The key (seed, sequence_id) hashes the counter (position, 0) to a row key,
  which hashes the counters (i, 0); the first output word counts.
  """
  word0, word1 = threefry2x32((seed, sequence_id), (np.array(position), np.array(0)))
  tokens = np.arange(vocab_size, dtype=np.uint32)
  bits, _ = threefry2x32((int(word0), int(word1)), (tokens, np.zeros_like(tokens)))
  return bits


def gumbel_noise(
  seed: int, sequence_id: int, position: int, vocab_size: int
) -> np.ndarray:
  """f32[V]: `-log(-log(u))` with `u = ((bits >> 9) + 0.5) * 2**-23`.

  `u` is exact in float32 and never 0 or 1. The logarithms are taken in float64
  and rounded once: their float32 forms differ from library to library.
  """
  bits = random_bits(seed, sequence_id, position, vocab_size)
  uniform = ((bits >> np.uint32(9)) + 0.5) * 2.0**-23
  return (-np.log(-np.log(uniform))).astype(np.float32)
