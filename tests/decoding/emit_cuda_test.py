"""emit's custom call against the XLA form, in place and inside a loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.decoding.emit import append
from tests.decoding.emit_test import limits, random_case
from tests.ops.custom_calls import assert_same_bits, cuda_text, replayed


def run(state, accepted, implementation="cuda"):
  return append(state, accepted, limits(), implementation)


run_xla = jax.jit(functools.partial(run, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("path_len", [1, 6, 40])
def test_bits_of_the_xla_form(path_len):
  rng = np.random.default_rng(path_len)
  for calls in (4, 1, 1):
    state, accepted = random_case(rng, 2000, path_len)
    got = replayed(run, calls)(state, accepted)
    assert_same_bits(run_xla(state, accepted), got)


@pytest.mark.gpu
def test_a_loop_updates_the_state_in_place():
  """Rounds of one path each, until every text has ended."""
  state, accepted = random_case(np.random.default_rng(0), 64)

  def loop(implementation, state, accepted):
    def body(carry):
      round_, state = carry
      return round_ + 1, append(state, accepted, limits(), implementation)[0]

    def goes_on(carry):
      return (carry[0] < 20) & jnp.any(carry[1].running)

    return jax.lax.while_loop(goes_on, body, (0, state))

  want = jax.jit(functools.partial(loop, "xla"))(state, accepted)
  program = jax.jit(functools.partial(loop, "cuda"), donate_argnums=0)
  for _ in range(3):
    own = jax.tree.map(jnp.copy, state)
    pointer = own.tokens.unsafe_buffer_pointer()
    got = program(own, accepted)
    assert got[1].tokens.unsafe_buffer_pointer() == pointer
    assert_same_bits(want, got)


def test_the_program_for_cuda_updates_in_place():
  state, accepted = random_case(np.random.default_rng(0), 3)
  for implementation, expected in (("cuda", 1), ("auto", 1), ("xla", 0)):
    text = cuda_text(
      functools.partial(run, implementation=implementation), state, accepted
    )
    assert text.count("@kdtree_jax.emit") == expected
    assert text.count("#stablehlo.output_operand_alias") == 7 * expected
