"""The custom calls of the wrappers, on the CPU, with handlers that launch nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kdtree_jax import ops
from kdtree_jax.decoding import emit
from kdtree_jax.decoding.state import DecodeState, Limits
from kdtree_jax.model.cache import LatentCache
from kdtree_jax.ops import _implementation, _library, int4_weight
from kdtree_jax.ops.int4_weight import Int4Weight
from kdtree_jax.ops.rope import RopeFrequencies, rope_table
from kdtree_jax.ops.rope_rows import rope_keys, rope_queries
from kdtree_jax.tree import Tree
from tests.custom_calls import checker

PREFIX = "handlers_test."  # of the names on the CPU

STATE = "root finish generated rounds tokens text_log_probs accepted"
TREE = "token_ids parents depths log_probs size"

# Operands and results of each handler, in order.
OPERANDS = {
  "accept_tree": "token_ids parents size target_tokens",
  "add_rms_norm": "h out weight",
  "ancestors": "parents depths",
  "best_token": "logits",
  "build_tree": "logits root_tokens limit max_depth",
  "compact": "cache tree_keys path length start",
  "emit": f"{STATE} token_ids choices path length bonus log_probs lengths stop_tokens "
  "capacity",
  "grouped_matmul": "x w group_sizes",
  "head_matmul": "x w",
  "log_softmax_topk": "logits",
  "matmul": "x w",
  "matmul_chain": "x w w weight w h weight",
  "rms_norm": "x weight",
  "rope": "x positions cos sin",
  "rope_keys": "kv weight positions cos sin",
  "rope_queries": "absorbed q positions cos sin",
  "route": "logits bias",
  "routed_experts": "x experts weights gate_up down",
  "token_log_probs": "logits tokens path",
  "tree_attention": "q cache tree_keys ancestors depths lengths",
  "tree_from_table": "table table_tokens root_tokens limit max_depth",
}
RESULTS = {
  "accept_tree": "path length bonus",
  "add_rms_norm": "sum normed",
  "ancestors": "ancestors",
  "best_token": "tokens",
  "build_tree": f"{TREE} table table_tokens workspace",
  "compact": "new_cache",
  "emit": f"{STATE} committed new_lengths kept path_tokens",
  "grouped_matmul": "out chunks num_chunks",
  "head_matmul": "out",
  "log_softmax_topk": "table table_tokens workspace",
  "matmul": "out",
  "matmul_chain": "out out out out sum out",
  "rms_norm": "out",
  "rope": "out",
  "rope_keys": "out",
  "rope_queries": "out",
  "route": "experts weights scores",
  "routed_experts": "out order chunks num_chunks inner outputs",
  "token_log_probs": "log_probs",
  "tree_attention": "out accumulators maxima sums messages",
  "tree_from_table": TREE,
}
# How many kernels a handler launches, where it is not one.
LAUNCHES = {"grouped_matmul": 2, "matmul_chain": 5, "routed_experts": 4}
# A program's first call raises JaxRuntimeError, later ones ValueError.
ERRORS = (ValueError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True)
class Call:
  """What a wrapper passes to `jax.ffi`."""

  op: str
  operands: tuple[jax.ShapeDtypeStruct, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  attributes: dict[str, Any]
  aliases: dict[int, int]

  def names(self, kind: str) -> list[str]:
    table = OPERANDS if kind == "operands" else RESULTS
    return table[self.op].split()[: len(getattr(self, kind))]

  def buffers(self) -> Iterator[tuple[str, int, str]]:
    """Operands or results, which of them, and its name."""
    for kind in ("operands", "results"):
      for i, name in enumerate(self.names(kind)):
        yield kind, i, name

  def changed(self, kind: str, i: int, shape: tuple[int, ...], dtype: Any) -> Call:
    """With another operand or result; then it shares no buffer any more."""
    arrays = list(getattr(self, kind))
    arrays[i] = jax.ShapeDtypeStruct(shape, dtype)
    aliases = {k: v for k, v in self.aliases.items() if k != i}
    return dataclasses.replace(self, aliases=aliases, **{kind: tuple(arrays)})

  def run(self) -> None:
    call = jax.ffi.ffi_call(
      PREFIX + self.op, self.results, input_output_aliases=self.aliases
    )
    arrays = [jnp.zeros(x.shape, x.dtype) for x in self.operands]
    jax.block_until_ready(call(*arrays, **self.attributes))

  def error(self) -> str:
    """What the handler says against it; "" where it launches."""
    before = launches()
    try:
      self.run()
    except ERRORS as error:
      assert launches() == before
      return str(error)
    assert launches() == before + LAUNCHES.get(self.op, 1)
    return ""


@functools.cache
def library() -> ctypes.CDLL:
  """The handlers on the host, registered for the CPU; skips where they cannot be."""
  compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
  cuda = checker.cuda_headers()
  if compiler is None or cuda is None:
    pytest.skip("needs a C++ compiler and CUDA's headers")
  here = Path(__file__).parent
  path = checker.temporary_folder("kdtree_handlers") / "handlers.so"
  command = [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-Wall"]
  command += [f"-I{checker.ROOT / 'custom_calls'}", "-isystem", str(cuda)]
  command += ["-isystem", jax.ffi.include_dir(), str(here / "handlers.cc")]
  done = subprocess.run(
    [*command, "-o", str(path)], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  loaded = ctypes.CDLL(str(path))
  for target, symbol in _library.TARGETS.items():
    op = target.removeprefix("kdtree_jax.")
    handler = jax.ffi.pycapsule(getattr(loaded, symbol))
    jax.ffi.register_ffi_target(PREFIX + op, handler, platform="cpu")
  return loaded


def number(name: str) -> ctypes.c_int:
  return ctypes.c_int.in_dll(library(), name)


def launches() -> int:
  return number("kdt_launches").value


def ints(*shape: int) -> jax.Array:
  return jnp.zeros(shape, jnp.int32)


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
  return jnp.zeros(shape, dtype)


CUDA: dict[str, Any] = {"implementation": "cuda"}


# B = 3, N = 5; other sizes all differ, so that none passes for another.
def tree() -> Tree:
  return Tree(ints(3, 5), ints(3, 5), ints(3, 5), floats(3, 5), ints(3))


def attention(dtype: Any, width: int = 20, **chosen: Any) -> Callable[[], Any]:
  settings: dict[str, Any] = {"scale": 0.5, "value_dim": 16, "layer": 1} | CUDA | chosen
  return lambda: ops.tree_attention(
    floats(3, 5, 7, width, dtype=dtype),
    floats(2, 3, 64, width, dtype=dtype),
    floats(3, 5, width, dtype=dtype),
    ints(3, 5, 6),
    ints(3, 5),
    ints(3),
    **settings,
  )


def tiles(G: int, K: int, N: int, gated: bool = False) -> Int4Weight:
  shape = int4_weight.tiles_shape(G, K, N, gated)
  return Int4Weight(jnp.zeros(shape, jnp.uint8), K, N, gated)


def experts(dtype: Any, axis: int = 0, int4: bool = False) -> Callable[[], Any]:
  """Five tokens of two experts each, of three."""
  D, F, E = (64, 32, 3) if int4 else (48, 16, 3)
  gate_up: Any = floats(*((D, E) if axis else (E, D)), 2 * F, dtype=dtype)
  kernels = gate_up, floats(E, F, D, dtype=dtype)
  if int4:
    kernels = tiles(E, D, 2 * F, gated=True), tiles(E, F, D)
  return lambda: ops.routed_experts(
    floats(5, D, dtype=dtype),
    ints(5, 2),
    floats(5, 2),
    *kernels,
    experts_axis=axis,
    **CUDA,
  )


def append() -> Any:
  cache = LatentCache(floats(1, 3, 8, 4), ints(3))
  state = DecodeState.empty(cache, (), 9, 16, keep_logits=False)
  accepted = emit.Accepted(
    ints(3, 5), ints(3, 5), ints(3, 4), ints(3), ints(3), floats(3, 4)
  )
  return emit.append(state, accepted, Limits(ints(2), ints(), ints()), "cuda")


def chain(dtype: Any) -> Callable[[], Any]:
  """Each kind of step once."""
  rows = functools.partial(floats, dtype=dtype)
  return lambda: ops.matmul_chain(
    rows(5, 16),
    [
      ("gated_matmul", rows(16, 64)),
      ("matmul", rows(32, 48)),
      ("rms_norm", rows(48), 1e-6),
      ("head_matmul", rows(3, 16, 8)),
      ("add_rms_norm", rows(5, 24), rows(24), 1e-5),
    ],
    **CUDA,
  )


FREQUENCIES = RopeFrequencies.create(8, 10000.0, None)
COS, SIN = rope_table(8, 40, 10000.0, None)
ROTATE: dict[str, Any] = {"interleave": True, "implementation": "cuda"}
bf16 = jnp.bfloat16

# Each wrapper, in each way that changes the kinds of what it passes.
CASES: dict[str, Callable[[], Any]] = {
  "accept_tree": lambda: ops.accept_tree(tree(), ints(3, 5), 3, **CUDA),
  "add_rms_norm": lambda: ops.add_rms_norm(
    floats(3, 5, 12), floats(3, 5, 12), floats(12), 1e-6, **CUDA
  ),
  "add_rms_norm bf16": lambda: ops.add_rms_norm(
    floats(5, 12, dtype=bf16),
    floats(5, 12, dtype=bf16),
    floats(12, dtype=bf16),
    1e-6,
    **CUDA,
  ),
  "ancestors": lambda: ops.ancestors(tree(), 3, **CUDA),
  "best_token": lambda: ops.best_token(floats(3, 5, 11), **CUDA),
  "build_tree": lambda: ops.build_tree(floats(3, 4, 50), ints(3), 6, rows=9, **CUDA),
  "build_tree bf16 bounds": lambda: ops.build_tree(
    floats(3, 4, 50, dtype=bf16), ints(3), 6, limit=ints(3), max_depth=ints(3), **CUDA
  ),
  "build_tree chain": lambda: ops.chain_tree(floats(3, 4, 50), ints(3), rows=4, **CUDA),
  "compact": lambda: ops.compact(
    floats(2, 3, 8, 6), floats(2, 3, 5, 6), ints(3, 4), ints(3), ints(3), **CUDA
  ),
  "emit": append,
  "grouped_matmul": lambda: ops.grouped_matmul(
    floats(70, 12), floats(3, 12, 7), ints(3), **CUDA
  ),
  "grouped_matmul bf16": lambda: ops.grouped_matmul(
    floats(70, 32, dtype=bf16), floats(3, 32, 8, dtype=bf16), ints(3), **CUDA
  ),
  "grouped_matmul bf16 int4": lambda: ops.grouped_matmul(
    floats(70, 64, dtype=bf16), tiles(3, 64, 48), ints(3), **CUDA
  ),
  "grouped_matmul int4": lambda: ops.grouped_matmul(
    floats(70, 64), tiles(3, 64, 48), ints(3), **CUDA
  ),
  "head_matmul": lambda: ops.head_matmul(floats(5, 3, 10), floats(3, 10, 7), **CUDA),
  "head_matmul bf16": lambda: ops.head_matmul(
    floats(5, 3, 16, dtype=bf16), floats(3, 16, 8, dtype=bf16), **CUDA
  ),
  "log_softmax_topk": lambda: ops.log_softmax_topk(floats(3, 4, 50), 7, **CUDA),
  "log_softmax_topk bf16": lambda: ops.log_softmax_topk(
    floats(3, 4, 50, dtype=bf16), 7, **CUDA
  ),
  "matmul": lambda: ops.matmul(floats(5, 12), floats(12, 7), **CUDA),
  "matmul bf16": lambda: ops.matmul(
    floats(5, 16, dtype=bf16), floats(16, 8, dtype=bf16), **CUDA
  ),
  "matmul by feature": lambda: ops.matmul(
    floats(5, 16, dtype=bf16),
    floats(7, 16, dtype=bf16),
    by_feature=True,
    out_dtype=jnp.float32,
    **CUDA,
  ),
  "matmul gated": lambda: ops.gated_matmul(
    floats(5, 16, dtype=bf16), floats(16, 24, dtype=bf16), **CUDA
  ),
  "matmul mixed": lambda: ops.matmul(
    floats(5, 12, dtype=bf16), floats(12, 7), out_dtype=jnp.float32, **CUDA
  ),
  "matmul_chain": chain(jnp.float32),
  "matmul_chain bf16": chain(bf16),
  "rms_norm": lambda: ops.rms_norm(floats(3, 5, 12), floats(12), 1e-6, **CUDA),
  "rms_norm bf16": lambda: ops.rms_norm(
    floats(5, 12, dtype=bf16), floats(12, dtype=bf16), 1e-6, **CUDA
  ),
  "rope": lambda: ops.rope(floats(3, 5, 7, 8), ints(3, 5, 1), COS, SIN, **ROTATE),
  "rope bf16 frequencies": lambda: ops.rope(
    floats(3, 5, 7, 8, dtype=bf16),
    ints(3, 5, 1),
    COS,
    SIN,
    frequencies=FREQUENCIES,
    **ROTATE,
  ),
  "rope_keys": lambda: rope_keys(
    floats(3, 5, 20), floats(12), ints(3, 5), COS, SIN, eps=1e-6, **ROTATE
  ),
  "rope_keys bf16 frequencies": lambda: rope_keys(
    floats(3, 5, 20, dtype=bf16),
    floats(12, dtype=bf16),
    ints(3, 5),
    COS,
    SIN,
    eps=1e-6,
    frequencies=FREQUENCIES,
    **ROTATE,
  ),
  "rope_queries": lambda: rope_queries(
    floats(3, 5, 7, 12), floats(3, 5, 7, 14), ints(3, 5), COS, SIN, **ROTATE
  ),
  "rope_queries bf16 frequencies": lambda: rope_queries(
    floats(3, 5, 7, 12, dtype=bf16),
    floats(3, 5, 7, 14, dtype=bf16),
    ints(3, 5),
    COS,
    SIN,
    frequencies=FREQUENCIES,
    **ROTATE,
  ),
  "route": lambda: ops.route(floats(5, 12), k=3, scoring="softmax", **CUDA),
  "route bias": lambda: ops.route(
    floats(5, 12), floats(12), k=3, scoring="sigmoid", n_group=4, topk_group=2, **CUDA
  ),
  "routed_experts": experts(jnp.float32),
  "routed_experts bf16": experts(bf16),
  "routed_experts bf16 one axis": experts(bf16, axis=1),
  "routed_experts bf16 int4": experts(bf16, int4=True),
  "routed_experts int4": experts(jnp.float32, int4=True),
  "token_log_probs": lambda: ops.token_log_probs(
    floats(3, 5, 11), ints(3, 5), ints(3, 4), **CUDA
  ),
  "tree_attention": attention(jnp.float32),
  "tree_attention bf16": attention(bf16, chunk=16),
  "tree_attention hopper": attention(bf16, width=576, value_dim=512, chunk=16),
  "tree_from_table": lambda: ops.tree_from_table(
    floats(3, 4, 7), ints(3, 4, 7), ints(3), 6, **CUDA
  ),
}


@functools.cache
def recorded(case: str) -> Call:
  """Runs a wrapper on the CPU, up to the launches; returns what it passed."""
  library()
  found: list[Call] = []
  real = jax.ffi.ffi_call

  def ffi_call(target: str, results: Any, **settings: Any) -> Any:
    op = target.removeprefix("kdtree_jax.")
    call = real(PREFIX + op, results, **settings)

    def function(*operands: jax.Array, **attributes: Any) -> Any:
      shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
      aliases = settings.get("input_output_aliases") or {}
      kinds = tuple(shapes), tuple(jax.tree.leaves(results))
      found.append(Call(op, *kinds, attributes, aliases))
      return call(*operands, **attributes)

    return function

  def dispatch(op: str, chosen: str, cuda: Any, xla: Any, *arguments: Any) -> Any:
    if chosen == "xla":  # For the shapes of a chain's results.
      return xla(*arguments)
    assert chosen == "cuda", op
    return cuda(*arguments)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.ffi, "ffi_call", ffi_call)
    patch.setattr(_implementation, "dispatch", dispatch)
    before = launches()
    jax.block_until_ready(CASES[case]())
  (call,) = found
  assert launches() == before + LAUNCHES.get(call.op, 1)
  assert call.op == case.split()[0]
  return call
