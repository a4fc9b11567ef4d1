"""How the target chooses a token: greedily, or by Gumbel-max seeded by position.

The noise behind a token depends on (seed, sequence id, absolute position) alone,
so a sampled text is a function of the prompt, and speculation can be compared
with plain decoding token for token. `kdtree_jax.reference.random` is the same in
numpy.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kdtree_jax.ops.best_token import NO_TOKEN, best_token

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
  """The rule by which tokens are chosen.

  Attributes:
    seed: u32 [].
    temperature: f32 [], used where `sampled`.
    top_p: f32 [], used where `nucleus`.
    sampled: draw at a temperature; else the most probable token.
    nucleus: filter by `top_p` before the noise is added.
  """

  seed: jax.Array
  temperature: jax.Array
  top_p: jax.Array
  sampled: bool = dataclasses.field(metadata={"static": True})
  nucleus: bool = dataclasses.field(metadata={"static": True})

  @classmethod
  def create(cls, temperature: float, top_p: float = 1.0, seed: int = 0) -> Sampler:
    """See `DecodeConfig` for the arguments."""
    return cls(
      seed=jnp.asarray(seed, jnp.uint32),
      temperature=jnp.asarray(temperature, jnp.float32),
      top_p=jnp.asarray(top_p, jnp.float32),
      sampled=temperature > 0,
      nucleus=temperature > 0 and top_p < 1,
    )

  def choose(
    self,
    logits: jax.Array,
    sequence_ids: jax.Array,
    first_position: jax.Array,
    depths: jax.Array,
    max_depth: int,
    implementation: str = "auto",
  ) -> jax.Array:
    """The target's token after each row.

    Args:
      logits: f32 [B, N, V].
      sequence_ids: i32 [B].
      first_position: i32 [B], absolute position of the token chosen at depth 0.
      depths: i32 [B, N]; the token chosen at row n has position
        first_position + depths[n].
      max_depth: static bound of `depths`.
      implementation: of the greedy choice. Samples are drawn by XLA on all devices,
        with its logarithm.

    Returns:
      i32 [B, N]; ties go to the lowest id; `NO_TOKEN` where the logits hold NaN
      or +inf, or nothing but -inf.
    """
    if not self.sampled:
      return best_token(logits, implementation=implementation)
    # A maximum is NaN where any logit is, and infinite where one is.
    usable = jnp.isfinite(jnp.max(logits, axis=-1))
    scaled = logits / self.temperature
    if self.nucleus:
      scaled = _top_p_filter(scaled, self.top_p)
    # Nodes of one depth share a position, so noise is drawn per depth.
    positions = first_position[:, None] + jnp.arange(max_depth + 1)
    noise = gumbel_noise(self.seed, sequence_ids[:, None], positions, logits.shape[-1])
    noisy = scaled + jnp.take_along_axis(noise, depths[:, :, None], axis=1)
    best = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    return jnp.where(usable, best, NO_TOKEN)


def gumbel_noise(
  seed: jax.Array, sequence_ids: jax.Array, positions: jax.Array, vocab_size: int
) -> jax.Array:
  """Standard Gumbel noise, a function of its arguments element by element.

  Args:
    seed: u32 [].
    sequence_ids, positions: i32, broadcastable to one shape [...].
    vocab_size: V.

  Returns:
    f32 [..., V]: `-log(-log(u))` with `u = ((bits >> 9) + 0.5) * 2**-23`.
  """
  ids, places = jnp.broadcast_arrays(sequence_ids, positions)
  zeros = jnp.zeros(places.shape, jnp.uint32)
  key = _threefry2x32(
    (jnp.broadcast_to(seed, ids.shape), ids.astype(jnp.uint32)),
    (places.astype(jnp.uint32), zeros),
  )
  tokens = jnp.arange(vocab_size, dtype=jnp.uint32)
  bits, _ = _threefry2x32(
    (key[0][..., None], key[1][..., None]), (tokens, jnp.zeros_like(tokens))
  )
  uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
  return -jnp.log(-jnp.log(uniform))


def _threefry2x32(
  key: tuple[jax.Array, jax.Array], counters: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Threefry2x32-20 on u32 words that broadcast (Salmon et al., SC 2011)."""
  schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
  x0 = counters[0] + schedule[0]
  x1 = counters[1] + schedule[1]
  for group in range(5):
    for distance in _ROTATIONS[group % 2]:
      x0 = x0 + x1
      x1 = (x1 << distance) | (x1 >> (32 - distance))
      x1 = x1 ^ x0
    x0 = x0 + schedule[(group + 1) % 3]
    x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
  return x0, x1


def _top_p_filter(scaled: jax.Array, top_p: jax.Array) -> jax.Array:
  """-inf for tokens outside the smallest set whose mass reaches `top_p`.

  Equal logits are kept lowest id first; the most probable token always stays.
  """
  order = jnp.argsort(-scaled, axis=-1, stable=True)
  mass = jnp.cumsum(
    jnp.take_along_axis(jax.nn.softmax(scaled, axis=-1), order, axis=-1), axis=-1
  )
  before = jnp.pad(mass[..., :-1], ((0, 0), (0, 0), (1, 0)))
  rank = jnp.argsort(order, axis=-1)
  kept = jnp.take_along_axis(before < top_p, rank, axis=-1)
  # A mass that rounds to 0 would drop the first token too.
  return jnp.where(kept | (rank == 0), scaled, -jnp.inf)
