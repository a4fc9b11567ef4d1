"""What the compiled programs do with memory, and that they leave the host alone."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.config import DecodeConfig
from kdtree_jax.decoding import modules
from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.decoding.prefill import PrefillState, prefill_chunk
from kdtree_jax.decoding.rounds import OPS, Program, run_rounds
from kdtree_jax.decoding.sampling import Sampler
from kdtree_jax.decoding.state import DecodeState, Limits
from kdtree_jax.environment import DECODE_LOOP_OPTIONS
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.ops import _implementation
from tests.decoding.models import (
  CONFIG,
  NEW,
  PROMPTS,
  ROWS,
  SETTINGS,
  SLOTS,
  VOCAB,
  Mixed,
  decode,
  plain,
  target,
  true_script,
  watch_calls,
)
from tests.ops.custom_calls import cuda_text, need_library

SAMPLING = {"temperature": 1.0}

# Ways in which a program on the CPU can talk to the host while it runs.
HOST = re.compile(r"infeed|outfeed|\bsend\b|\brecv\b|callback")


@pytest.fixture
def watched(monkeypatch):
  """Every compiled call of a decode, under a guard: (name, donated leaves, HLO)."""
  true_script(**SAMPLING)  # Decoded before anyone watches.
  calls = []

  def call(name, run, args, donate):
    donated = jax.tree.leaves(args[donate])
    with jax.transfer_guard("disallow"):
      out = jax.block_until_ready(run(*args))
    calls.append((name, donated, run.as_text()))
    return out

  watch_calls(monkeypatch, call)
  return calls


def test_the_listed_ops_are_those_of_a_round():
  need_library()
  drafter = Mixed.create("dflash")
  cache = LatentCache.empty(CONFIG, SLOTS, 128, jnp.dtype("float32"))
  drafter_state = drafter.init_state(SLOTS, cache.capacity)
  state = DecodeState.empty(cache, drafter_state, NEW, VOCAB, False)
  limits = Limits(jnp.full((4,), -1), jnp.asarray(128), jnp.asarray(ROWS - 1))
  program = Program("ddtree", ROWS, ROWS - 1, 0, "cuda")
  sampler = Sampler.create(0.0, 1.0, 0)

  model = target()  # Kept for later tests: it must not be made while tracing.

  def rounds(state):
    return run_rounds(model, drafter, state, sampler, limits, 2, program)

  text = cuda_text(rounds, state)
  called = set(re.findall(r"@kdtree_jax\.(\w+)", text))
  # A chain is built by the call that builds trees, SwiGLU's products are matmul's.
  assert called == set(OPS) - {"chain_tree", "gated_matmul"}
  assert set(OPS) <= _implementation.CUDA_OPS


@pytest.mark.parametrize("drafter", [None, "dflash"])
def test_nothing_goes_to_the_host_inside_a_call(watched, drafter):
  drafter = None if drafter is None else Mixed.create(drafter)
  result = decode(drafter, **SAMPLING)
  assert first_difference(plain(**SAMPLING), result) is None
  rounds = [hlo for name, _, hlo in watched if name.endswith("rounds")]
  assert len(rounds) == -(-max(s.rounds for s in result.stats) // 16)
  for _, _, hlo in watched:
    assert not HOST.search(hlo)


def test_the_guard_sees_transfers(watched):
  """So that the test above can fail."""
  with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
    modules.compiled("", jnp.add, (), (jnp.ones(3), jnp.ones(3)), 0, None)(
      np.ones(3, np.float32), np.ones(3, np.float32)
    )
  called_back = jax.jit(
    lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), "float32"), x)
  )
  assert HOST.search(called_back.lower(jnp.float32(1)).compile().as_text())


def test_the_state_is_donated(watched):
  decode(Mixed.create("1.0", continuations=true_script(**SAMPLING)), **SAMPLING)
  assert {name for name, *_ in watched} == {"prefill", "first token", "ddtree rounds"}
  for name, donated, _ in watched:
    kept = [x.shape for x in donated if x.size and not x.is_deleted()]
    assert kept == [], name


def test_models_survive_donation():
  """Twice with the same target and drafter: nothing of theirs was given up."""
  model, drafter = target(), Mixed.create("dflash")
  for _ in range(2):
    decode(drafter, model=model, **SAMPLING)
  for x in jax.tree.leaves((drafter, modules.split(model)[1])):
    assert not x.is_deleted()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharing:
  """A drafter whose state is its own parameter, twice."""

  table: jax.Array

  max_depth = 1
  feature_layers = ()

  def init_state(self, slots: int, cache_len: int) -> Any:
    del slots, cache_len
    return {"one": self.table, "other": self.table}

  def observe(self, target, state, tokens, features, start, count) -> Any:
    del target, tokens, features, start, count
    return state

  def draft(self, target, state, root_tokens, lengths, sequence_ids) -> jax.Array:
    del target, lengths, sequence_ids
    return (state["one"] + state["other"])[root_tokens][:, None]


def test_a_drafter_may_hand_out_its_own_arrays_as_state():
  """And the only compilation that it causes is reported."""
  drafter = Sharing(jnp.zeros((VOCAB, VOCAB)))
  config = DecodeConfig(**SETTINGS | {"max_new_tokens": 1, "temperature": 1.0})
  config = dataclasses.replace(config, budget=1)
  reported = []
  for _ in range(2):
    result = kd.decode(
      target(), drafter, PROMPTS, config, on_compile=lambda *x: reported.append(x)
    )
    assert not drafter.table.is_deleted()
    names, seconds = zip(*reported, strict=True)
    assert set(names) <= {"prefill", "first token"} and names.count("prefill") == 1
    if len(reported) > len(names):
      assert sum(seconds) <= result[0].stats.compile_seconds
  assert result[0].stats.compile_seconds < min(seconds)

  own = modules.unshared(drafter.init_state(1, 1), drafter)
  pointers = {x.unsafe_buffer_pointer() for x in (*own.values(), drafter.table)}
  assert len(pointers) == 3


CAPACITY = 1 << 15  # so long that a program's other needs are small against a cache


@functools.cache
def long_program(name):
  """(executable of plain rounds or prefill over a long cache, bytes of that cache).

  They are the hardest cases: both know their path before the target has run, so
  nothing but the commit's own order keeps the write behind the last read.
  """
  model = target()
  program = Program("plain", ROWS, 0, 0, "auto")
  limits = Limits(jnp.full(4, -1), jnp.asarray(CAPACITY), jnp.asarray(0))

  def start():
    cache = LatentCache.empty(CONFIG, SLOTS, CAPACITY, jnp.float32)
    if name == "prefill":
      return PrefillState(cache, (), jnp.zeros((SLOTS, VOCAB)))
    return DecodeState.empty(cache, (), NEW, VOCAB, True)

  def run(state, sampler, tokens, count):
    if name == "prefill":
      return prefill_chunk(model, None, state, tokens, count, (), "auto")[0]
    return run_rounds(model, None, state, sampler, limits, jnp.asarray(16), program)

  state = jax.eval_shape(start)
  tokens, count = jnp.zeros((SLOTS, 16), jnp.int32), jnp.zeros((SLOTS,), jnp.int32)
  lowered = jax.jit(run, donate_argnums=0, keep_unused=True).lower(
    state, Sampler.create(0.0), tokens, count
  )
  return lowered.compile(), state.cache.data.size * 4


@pytest.mark.parametrize("name", ["rounds", "prefill"])
def test_keys_are_written_in_place(name):
  """No call or round begins with a copy of the cache for the commit to write to."""
  executable, cache = long_program(name)
  layers = CONFIG.num_hidden_layers
  shape = rf"f32\[{layers},{SLOTS},{CAPACITY},{CONFIG.cache_width}\]"
  hlo = executable.as_text()
  assert re.search(rf"{shape}\S* scatter\(", hlo)
  assert not re.search(rf"{shape}\S* copy\(", hlo)
  # The state's buffers are used again.
  assert executable.memory_analysis().alias_size_in_bytes > cache


@pytest.mark.parametrize("name", ["rounds", "prefill"])
def test_the_cache_is_read_in_place(name):
  executable, cache = long_program(name)
  assert executable.memory_analysis().temp_size_in_bytes < cache / 4


def test_a_program_is_compiled_once():
  """Neither budget, temperature, seed, stop tokens, capacity nor weights recompile."""
  drafter = Mixed.create("1.0", continuations=true_script(**SAMPLING))
  decode(drafter, **SAMPLING)
  decode(**SAMPLING)
  compiled = []
  variants = [
    {"budget": 3},
    {"temperature": 0.3, "seed": 5},
    {"stop_token_ids": (1, 2, 3)},
    {"cache_len": 150},
    {"chunk_rounds": 2},
  ]
  for change in variants:
    for speculator in (None, drafter):
      config = DecodeConfig(
        **(SETTINGS | {"budget": 1} | SAMPLING | change),
        method="plain" if speculator is None else "ddtree",
      )
      if speculator is None:
        config = dataclasses.replace(config, budget=None)
      kd.decode(
        target(), speculator, PROMPTS, config, on_compile=lambda *x: compiled.append(x)
      )
  assert compiled == []


def test_options_reach_the_compiler():
  """Those of a captured loop are known to this compiler, and an unknown one is not."""
  args = (jnp.ones(3), jnp.ones(3))
  run = modules.compiled("", jnp.add, (), args, 0, None, DECODE_LOOP_OPTIONS)
  assert run(*args).tolist() == [2, 2, 2]
  args = (jnp.ones(4), jnp.ones(4))
  with pytest.raises(Exception, match="xla_no_such_option"):
    modules.compiled("", jnp.add, (), args, 0, None, {"xla_no_such_option": "1"})
  wrong = {"xla_gpu_enable_command_buffer": "WHILE,NONSENSE"}
  with pytest.raises(Exception, match="xla_gpu_enable_command_buffer"):
    modules.compiled("", jnp.add, (), args, 0, None, wrong)


def test_programs_for_a_gpu_leave_no_sum_to_a_stopwatch(monkeypatch):
  """XLA must know the option, and every program of a GPU must get it."""
  given = []

  class Lowered:
    def compile(self, compiler_options):
      given.append(compiler_options)
      return lambda *args: None

  class Jitted:
    def lower(self, *args):
      return Lowered()

  x = jnp.ones(5)
  modules.compiled("", jnp.square, (), (x,), 0, None, modules.SAME_SUMS_OPTIONS)
  monkeypatch.setattr(jax, "jit", lambda *args, **settings: Jitted())
  for backend, expected in (
    ("gpu", {**modules.SAME_SUMS_OPTIONS, "more": "1"}),
    ("cpu", {"more": "1"}),
  ):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    modules.compiled("", jnp.negative, (), (x,), 0, None, {"more": "1"})
    assert given.pop() == expected


def test_each_device_gets_its_own_executable():
  """Arrays on another device than the first call's; needs two, so a process."""
  code = """
import jax, jax.numpy as jnp
from kdtree_jax.decoding import modules
for device in jax.devices():
  for _ in range(2):
    x = jax.device_put(jnp.arange(3.0), device)
    args = (x, jnp.ones(3))
    y = modules.compiled("add", jnp.add, (), args, 1, None)(*args)
    assert y.devices() == {device} and y.tolist() == [1, 2, 3]
assert len(modules._EXECUTABLES) == 2 == len(jax.devices())
"""
  subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    timeout=300,
    env={
      "PYTHONPATH": ":".join(sys.path),
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    },
  )
