"""Arguments that no form takes, and those at the edge that all take."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from kdtree_jax.ops import _implementation, _library
from kdtree_jax.tree import Tree
from tests.ops.custom_calls import cuda_text

B, N, L, V = 2, 4, 3, 7
FORMS = pytest.mark.parametrize("implementation", ["auto", "xla", "cuda"])

ROOTS = np.array([1, 2], np.int32)
TREE = Tree.root_only(jnp.asarray(ROOTS), N)
ROPE: dict[str, Any] = dict(
  zip(("cos", "sin"), ops.rope_table(8, 9, 1e4, None), strict=True)
)
ROPE["interleave"] = True
PLACES = np.zeros((B, N), np.int32)
# Arguments that each op takes; numpy arrays, as good as JAX's.
ARGUMENTS: dict[str, dict[str, Any]] = {
  "accept_tree": {
    "tree": TREE,
    "target_tokens": np.zeros((B, N), np.int32),
    "max_depth": 3,
  },
  "add_rms_norm": {
    "h": np.ones((B, N, 6), np.float32),
    "out": np.ones((B, N, 6), np.float32),
    "weight": np.ones(6, np.float32),
    "eps": 1e-6,
  },
  "ancestors": {"tree": TREE, "max_depth": 3},
  "best_token": {"logits": np.zeros((B, V), np.float32)},
  "build_tree": {
    "logits": np.zeros((B, L, V), np.float32),
    "root_tokens": ROOTS,
    "budget": 4,
  },
  "chain_tree": {"logits": np.zeros((B, L, V), np.float32), "root_tokens": ROOTS},
  "compact": {
    "cache": np.zeros((2, B, 9, 5), np.float32),
    "tree_keys": np.ones((2, B, N, 5), np.float32),
    "path": np.array([[0, 1], [0, -1]], np.int32),
    "length": np.array([2, 1], np.int32),
    "start": np.array([0, 3], np.int32),
  },
  "grouped_matmul": {
    "x": np.ones((3, 2), np.float32),
    "weights": np.ones((2, 2, 5), np.float32),
    "group_sizes": np.array([1, 2], np.int32),
  },
  "gated_matmul": {
    "x": np.ones((B, N, 4), np.float32),
    "w": np.ones((4, 6), np.float32),
  },
  "head_matmul": {
    "x": np.ones((B, 3, 5), np.float32),
    "w": np.ones((3, 4, 2), np.float32),
  },
  "log_softmax_topk": {"logits": np.zeros((B, L, V), np.float32), "k": 2},
  "matmul": {
    "x": np.ones((B, N, 4), np.float32),
    "w": np.ones((4, 6), np.float32),
  },
  "matmul_chain": {
    "x": np.ones((B, N, 4), np.float32),
    "steps": [("gated_matmul", np.ones((4, 6), np.float32))],
  },
  "rms_norm": {
    "x": np.ones((B, N, 6), np.float32),
    "weight": np.ones(6, np.float32),
    "eps": 1e-6,
  },
  "rope": {"x": np.ones((B, N, 8), np.float32), "positions": PLACES, **ROPE},
  "rope_keys": {
    "kv": np.ones((B, N, 14), np.float32),
    "weight": np.ones(6, np.float32),
    "positions": PLACES,
    "eps": 1e-6,
    **ROPE,
  },
  "rope_queries": {
    "absorbed": np.ones((B, N, 2, 6), np.float32),
    "q": np.ones((B, N, 2, 11), np.float32),
    "positions": PLACES,
    **ROPE,
  },
  "route": {
    "logits": np.zeros((B, 6), np.float32),
    "bias": np.zeros(6, np.float32),
    "scoring": "sigmoid",
    "k": 2,
    "n_group": 3,
    "topk_group": 2,
  },
  "routed_experts": {
    "x": np.ones((B, 4), np.float32),
    "experts": np.array([[0, 2], [1, 0]], np.int32),
    "weights": np.ones((B, 2), np.float32),
    "gate_up": np.ones((3, 4, 6), np.float32),
    "down": np.ones((3, 3, 4), np.float32),
  },
  "token_log_probs": {
    "logits": np.zeros((B, N, V), np.float32),
    "tokens": np.zeros((B, N), np.int32),
    "path": np.zeros((B, 3), np.int32),
  },
  "tree_attention": {
    "q": np.ones((B, N, 2, 8), np.float32),
    "cache": np.ones((B, 128, 8), np.float32),
    "tree_keys": np.ones((B, N, 8), np.float32),
    "ancestors": np.zeros((B, N, 4), np.int32),
    "depths": np.zeros((B, N), np.int32),
    "lengths": np.zeros(B, np.int32),
    "scale": 0.5,
    "value_dim": 6,
  },
  "tree_from_table": {
    "log_probs": np.zeros((B, L, 2), np.float32),
    "token_ids": np.zeros((B, L, 2), np.int32),
    "root_tokens": ROOTS,
    "budget": 4,
  },
}


def call(op: str, implementation: str = "auto", /, **changes: Any) -> Any:
  arguments = ARGUMENTS[op] | changes
  return getattr(ops, op)(**arguments, implementation=implementation)


def same(one: Any, other: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_all_ops_are_here():
  assert set(ARGUMENTS) | {"emit"} == _implementation.CUDA_OPS


@pytest.mark.parametrize("op", ARGUMENTS)
def test_numpy_arrays_and_lists_are_as_good(op: str):
  arrays = {k: v for k, v in ARGUMENTS[op].items() if isinstance(v, np.ndarray)}
  wanted = call(op, **{name: jnp.asarray(x) for name, x in arrays.items()})
  same(wanted, call(op))
  same(wanted, call(op, **{name: x.tolist() for name, x in arrays.items()}))


INTEGERS = [
  (op, name)
  for op, arguments in ARGUMENTS.items()
  for name, value in arguments.items()
  if isinstance(value, np.ndarray) and value.dtype == np.int32
]


@FORMS
@pytest.mark.parametrize(("op", "name"), INTEGERS)
def test_integers_are_not_truncated(op: str, name: str, implementation: str):
  if op == "grouped_matmul" and implementation == "cuda":
    pytest.skip("it has no such form")
  for dtype in ("float32", "bool"):
    value = ARGUMENTS[op][name].astype(dtype)
    with pytest.raises(ValueError, match=f"{name} must be integers; they are {dtype}"):
      call(op, implementation, **{name: value})


STATIC = [
  (op, name)
  for op, names in {
    "accept_tree": ("max_depth",),
    "ancestors": ("max_depth",),
    "build_tree": ("budget", "rows"),
    "chain_tree": ("rows",),
    "log_softmax_topk": ("k",),
    "route": ("k", "n_group", "topk_group"),
    "tree_attention": ("value_dim", "layer", "chunk", "max_positions"),
    "tree_from_table": ("budget", "rows"),
  }.items()
  for name in names
]


@pytest.mark.parametrize(("op", "name"), STATIC)
def test_static_integers_are_integers(op: str, name: str):
  for value in (4.0, True, "4"):
    with pytest.raises(ValueError, match=f"{name} = {value!r} .* static integer"):
      call(op, **{name: value})
  with pytest.raises(ValueError, match=f"{name} = .* static integer"):
    jax.jit(lambda x: call(op, **{name: x}))(4)


@FORMS
@pytest.mark.parametrize(
  ("op", "name"),
  [
    ("tree_attention", "scale"),
    ("rope_keys", "eps"),
    ("rms_norm", "eps"),
    ("add_rms_norm", "eps"),
    ("route", "scaling"),
  ],
)
def test_static_numbers_are_not_traced(op: str, name: str, implementation: str):
  with pytest.raises(ValueError, match=f"{name} is traced, but it must be static"):
    jax.jit(lambda x: call(op, implementation, **{name: x}))(0.5)
  with pytest.raises(ValueError, match=f"{name} = 'much' .* a number"):
    call(op, implementation, **{name: "much"})
  same(call(op, **{name: 0.5}), call(op, **{name: np.float32(0.5)}))


LARGE = {
  "accept_tree": (
    {"tree": Tree.root_only(jnp.array([1]), 6145), "target_tokens": [[0] * 6145]},
    "tree has 6145 slots; at most 6144",
  ),
  "ancestors": (
    {"tree": Tree.root_only(jnp.array([1]), 4097)},
    "tree has 4097 slots; at most 4096",
  ),
  "build_tree": ({"budget": 1024}, "budget = 1024; at most 1023"),
  "chain_tree": (
    {"logits": np.zeros((B, 1024, V), np.float32)},
    r"rows = 1025 for logits \(2, 1024, 7\) .* 1024 nodes; at most 1023",
  ),
  "log_softmax_topk": (
    {"k": 2000, "logits": np.zeros((1, 1, 2000), np.float32)},
    "k = 2000; at most 1023",
  ),
  "rope": (
    {
      "x": np.ones((B, N, 258), np.float32),
      "cos": np.ones((5, 129), np.float32),
      "sin": np.ones((5, 129), np.float32),
    },
    "x has 258 rotated features; at most 256",
  ),
  "rms_norm": (
    {"x": np.ones((B, 6), np.float16), "weight": np.ones(6, np.float16)},
    "x is float16; it must be float32 or bfloat16",
  ),
  "add_rms_norm": (
    {
      "h": np.ones((B, 6), np.float16),
      "out": np.ones((B, 6), np.float16),
      "weight": np.ones(6, np.float16),
    },
    "h is float16; it must be float32 or bfloat16",
  ),
  "route": (
    {"logits": np.zeros((B, 1026), np.float32), "bias": np.zeros(1026, np.float32)},
    "logits has 1026 experts; at most 1024",
  ),
  "tree_attention": ({"chunk": 8}, "chunk = 8 must be a multiple of 16"),
  "tree_from_table": ({"budget": 1024}, "budget = 1024; at most 1023"),
}


@pytest.mark.parametrize("op", LARGE)
def test_beyond_the_limits_of_the_cuda_form(op: str, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(_library, "why_not", lambda: None)
  changes, says = LARGE[op]
  says = f"implementation='cuda' of {op}: {says}.*; implementation='xla' or 'auto' has"
  with pytest.raises(ValueError, match=says):
    call(op, "cuda", **changes)
  with pytest.raises(ValueError, match=f"implementation = 'bogus' of {op}"):
    call(op, "bogus", **changes)
  same(call(op, "auto", **changes), call(op, "xla", **changes))


def test_none_beyond_the_limits_is_xla():
  within = functools.partial(_implementation.within_limits, "rope")
  assert [within(i, None) for i in ("auto", "xla", "cuda")] == ["auto", "xla", "cuda"]
  assert [within(i, "too much") for i in ("auto", "xla")] == ["xla", "xla"]


@pytest.mark.parametrize("op", sorted(set(ARGUMENTS) - {"grouped_matmul"}))
def test_no_sequences(op: str):
  arguments = {}
  shared = ("cos", "sin", "weight", "bias", "w", "gate_up", "down")
  for name, value in ARGUMENTS[op].items():
    axis = 1 if name in ("cache", "tree_keys") and op == "compact" else 0
    if isinstance(value, np.ndarray) and name not in shared:
      arguments[name] = np.delete(value, np.arange(B), axis)
    if name == "tree":
      arguments[name] = jax.tree.map(lambda x: x[:0], value)
  wanted = jax.eval_shape(lambda: call(op))
  out = call(op, **arguments)
  for one, empty in zip(jax.tree.leaves(wanted), jax.tree.leaves(out), strict=True):
    axis = 1 if op == "compact" else 0
    assert empty.shape == np.delete(np.empty(one.shape), np.arange(B), axis).shape
    assert empty.dtype == one.dtype


def test_no_row_of_logits_has_no_candidates():
  log_probs, ids = call("log_softmax_topk", logits=np.zeros((B, 0, V), np.float32))
  assert log_probs.shape == ids.shape == (B, 0, 2)
  text = cuda_text(lambda x: call("log_softmax_topk", logits=x), jnp.zeros((0, L, V)))
  assert "kdtree_jax" not in text
  empty = {"log_probs": np.zeros((B, L, 0)), "token_ids": np.zeros((B, L, 0), int)}
  same(call("tree_from_table", **empty), Tree.root_only(jnp.asarray(ROOTS), 5))


@pytest.mark.parametrize("op", ["accept_tree", "ancestors"])
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Tree)])
def test_fields_of_a_tree_agree(op: str, field: str):
  value = getattr(TREE, field)
  larger = dataclasses.replace(TREE, **{field: jnp.concatenate([value, value])})
  blamed = "parents" if field == "token_ids" else field  # Who fits the token ids?
  with pytest.raises(ValueError, match=rf"tree\.{blamed} .* to fit tree\.token_ids"):
    call(op, tree=larger)
  if field == "log_probs":
    return
  wrong = dataclasses.replace(TREE, **{field: value.astype(jnp.float32)})
  with pytest.raises(ValueError, match=rf"tree\.{field} must be integers"):
    call(op, tree=wrong)


ATTENTION = ARGUMENTS["tree_attention"]


@pytest.mark.parametrize(
  ("op", "changes", "says"),
  [
    ("build_tree", {"budget": 0, "limit": 2.0}, "limit must be an integer"),
    ("build_tree", {"budget": 0, "max_depth": [1, 2, 3]}, "max_depth must be an int"),
    ("chain_tree", {"rows": 1, "limit": 2.0}, "limit must be an integer"),
    ("tree_from_table", {"budget": 0, "limit": 2.0}, "limit must be an integer"),
    (
      "tree_attention",
      {
        name: ATTENTION[name][:, :0]
        for name in ("q", "tree_keys", "ancestors", "depths")
      },
      r"q \(2, 0, 2, 8\) has no node",
    ),
    ("tree_attention", {"cache": ATTENTION["cache"][:, :0]}, r"cache .* no position"),
    (
      "tree_attention",
      {"ancestors": ATTENTION["ancestors"][..., :0]},
      r"ancestors \(2, 4, 0\) has no depth",
    ),
    (
      "tree_attention",
      {name: ATTENTION[name].astype(np.int32) for name in ("q", "cache", "tree_keys")},
      "q, cache and tree_keys are int32; they must be float32 or bfloat16",
    ),
    (
      "tree_attention",
      {"layer": 0},
      r"cache must have shape \[\?, 2, \?, 8\] .* and a layer; it has \(2, 128, 8\)",
    ),
    (
      "tree_attention",
      {"cache": ATTENTION["cache"][None]},
      r"cache must have shape \[2, \?, 8\] .*; it has \(1, 2, 128, 8\)",
    ),
    ("rope", {"x": np.float32(1)}, "x is a scalar"),
    ("rope_queries", {"cos": np.float32(1)}, "cos is a scalar"),
    ("rope_keys", {"cos": np.float32(1)}, "cos is a scalar"),
    ("rope", {"frequencies": (1.0,) * 4}, "frequencies .* must be RopeFrequencies"),
    ("compact", {"start": np.zeros(3, np.int32)}, r"^start \(3,\) must be \[B\]"),
    ("compact", {"length": np.zeros(3, np.int32)}, r"^length \(3,\) must be \[B\]"),
    ("compact", {"path": np.zeros((3, 1), np.int32)}, r"^path \(3, 1\) must be"),
    ("compact", {"cache": np.zeros((B, 9, 5))}, r"^cache \(2, 9, 5\) must be"),
    ("compact", {"tree_keys": np.zeros((B, 9), np.float32)}, r"^tree_keys \(2, 9\)"),
    ("token_log_probs", {"path": np.zeros(3, np.int32)}, r"^path \(3,\) must be"),
    ("token_log_probs", {"tokens": np.zeros(3, np.int32)}, r"^tokens \(3,\) must be"),
  ],
)
def test_errors_name_the_argument(op: str, changes: dict[str, Any], says: str):
  with pytest.raises(ValueError, match=says):
    call(op, **changes)


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (((1.0, 0.5), "float16"), "angle_dtype = 'float16' must be one of"),
    (((),), r"values = \(\) must be a tuple"),
    (([1.0],), r"values = \[1.0\] must be a tuple"),
    (((1.0, float("nan")),), r"values\[1\] = nan must be a finite"),
    (((1.0, "2"),), r"values\[1\] = '2' must be a finite"),
    (((1.0,), "float32", float("inf")), "amplitude = inf must be a finite"),
  ],
)
def test_frequencies_are_checked(arguments: tuple[Any, ...], says: str):
  with pytest.raises(ValueError, match=says):
    ops.RopeFrequencies(*arguments)


def test_frequencies_of_a_width_are_checked():
  widths: Any = (7, 0, -2, 4.0)
  for width in widths:
    with pytest.raises(
      ValueError, match=f"head_dim = {width} must be a positive, even"
    ):
      ops.RopeFrequencies.create(width, 1e4, None)
  with pytest.raises(ValueError, match="angle_dtype = 'abc'"):
    ops.RopeFrequencies.create(8, 1e4, None, "abc")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("op", ["rope", "rope_keys", "rope_queries"])
def test_frequencies_of_other_tables_are_refused(op: str):
  for dtype in ("float64", "float32"):
    mine = ops.RopeFrequencies.create(8, 1e4, None, dtype)
    same(call(op), call(op, frequencies=mine))
  values = ops.RopeFrequencies.create(8, 1e4, None).values
  arrays = {name: jnp.asarray(ROPE[name]) for name in ("cos", "sin")}
  for other in (
    ops.RopeFrequencies.create(8, 5e4, None),
    ops.RopeFrequencies.create(8, 1e4, None, amplitude=0.5),
    ops.RopeFrequencies((*values[:3], values[3] * 1.001)),
  ):
    with pytest.raises(ValueError, match="frequencies are not those of the tables: "):
      call(op, frequencies=other)
    with pytest.raises(ValueError, match="frequencies are not those of the tables: "):
      call(op, frequencies=other, **arrays)
    with pytest.raises(ValueError, match="frequencies are not those of the tables: "):
      jax.jit(lambda o=other: call(op, frequencies=o, **arrays))()  # Constants.
    jax.jit(lambda t, o=other: call(op, frequencies=o, **t)).trace(arrays)
  short = {name: ROPE[name][:1] for name in ("cos", "sin")}
  call(op, frequencies=ops.RopeFrequencies(values), **short)
  with pytest.raises(ValueError, match=r"tables: cos\[0, 0\] is 1.0, .* would be 0.5"):
    call(op, frequencies=ops.RopeFrequencies(values, amplitude=0.5), **short)
