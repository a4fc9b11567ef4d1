"""Text of the target's own making, which a drafter is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.target import Target


@partial(jax.jit, static_argnames=("graph", "length"))
def _continue(graph, state, prompts, temperatures, key, length):
  """Samples continuations; prompts [M, P] -> tokens i32 [M, length]."""
  target = nnx.merge(graph, state)
  M, P = prompts.shape
  cache = LatentCache.empty(target.config, M, length, target.dtype)
  prompts = jnp.pad(prompts, ((0, 0), (0, length - P)))
  root = jnp.zeros((M, 1), jnp.int32)

  def one_token(carry, position):
    data, token = carry
    lengths = jnp.full((M,), position, jnp.int32)
    hidden, _, keys = target.step(token[:, None], root[..., None], root, data, lengths)
    data = jax.lax.dynamic_update_slice(data, keys, (0, 0, position, 0))
    logits = target.head(hidden[:, 0])
    scaled = logits / jnp.maximum(temperatures, 1e-6)[:, None]
    noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
    sampled = jnp.where(temperatures[:, None] > 0, scaled + noise, logits)
    chosen = jnp.argmax(sampled, -1).astype(jnp.int32)
    following = jnp.where(position + 1 < P, prompts[:, position + 1], chosen)
    return (data, following), token

  _, tokens = jax.lax.scan(
    one_token, (cache.data, prompts[:, 0]), jnp.arange(length, dtype=jnp.int32)
  )
  return tokens.T


def generate(
  target: Target,
  prompts: np.ndarray,
  length: int,
  *,
  temperatures: Sequence[float] = (0.0, 0.6, 1.0),
  batch_size: int = 4096,
  seed: int = 0,
) -> Iterator[np.ndarray]:
  """Continues prompts by sampling from the target, many at once.

  This is a plain sampler for bulk text, not the decoding loop: it has no stop
  tokens, and its sampling noise is drawn per batch.

  Args:
    target: the model.
    prompts: integers [M, P], all of one length.
    length: tokens per sequence, prompt included.
    temperatures: sequence i is sampled at `temperatures[i % len]`; 0 is greedy.
    batch_size: sequences per compiled call; a last partial batch is dropped.
    seed: of the sampling noise.

  Yields:
    uint16 [batch_size, length].
  """
  graph, state = nnx.split(target)
  cycle = np.resize(np.asarray(temperatures, np.float32), batch_size)
  batches = len(prompts) // batch_size
  for i in tqdm.trange(batches, desc="generate", mininterval=5.0):
    chunk = prompts[i * batch_size : (i + 1) * batch_size].astype(np.int32)
    key = jax.random.fold_in(jax.random.key(seed), i)
    tokens = _continue(
      graph, state, jnp.asarray(chunk), jnp.asarray(cycle), key, length
    )
    yield np.asarray(tokens).astype(np.uint16)
