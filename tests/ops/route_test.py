from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax import ops
from tests.ops.custom_calls import cuda_text

U = 2.0**-24

# Experts, groups, groups kept, experts chosen: Kimi's, DeepSeek-V3's and odd ones.
SHAPES = [
  (384, 1, 1, 8),
  (256, 8, 4, 8),
  (8, 1, 1, 3),
  (1, 1, 1, 1),
  (33, 11, 3, 5),
  (24, 8, 3, 4),
  (32, 32, 7, 7),
  (100, 4, 2, 7),
  (512, 2, 1, 6),
  (1024, 32, 5, 32),
]
# Scoring, whether there is a bias, norm_topk_prob, scaling.
KINDS = [
  ("sigmoid", True, True, 2.827),
  ("softmax", False, False, 1.0),
  ("sigmoid", False, False, 1.0),
  ("softmax", True, True, 0.7),
]


def hard_rows(rng: np.random.Generator, rows: int, experts: int) -> np.ndarray:
  """Generic logits; ties; NaN of either sign and infinities; extremes."""
  x = rng.normal(size=(rows, experts)).astype(np.float32) * np.float32(2)
  kind = np.arange(rows) % 9
  x[kind == 1] = np.round(x[kind == 1])
  x[kind == 2] = 0.5
  x[kind == 3] = np.where(rng.random((sum(kind == 3), experts)) < 0.5, 0.0, -0.0)
  x[kind == 4] *= 60  # beyond where exp overflows, and where a score underflows
  for row in range(rows):
    some = rng.random(experts) < rng.choice([0.02, 0.3, 1])
    if kind[row] == 5:
      x[row, some] = rng.choice([np.nan, -np.nan], some.sum())
    elif kind[row] == 6:
      x[row, some] = rng.choice([np.inf, -np.inf], some.sum())
    elif kind[row] == 7:
      x[row, some] = -np.inf
    elif kind[row] == 8:
      x[row, some] = rng.choice([-1e4, 3e38, -3e38], some.sum())
  return x


def largest(values: np.ndarray, k: int) -> list[int]:
  """Where the k largest are; NaN is the largest, equal ones go to the lowest id."""
  ids = range(len(values))
  return sorted(ids, key=lambda i: (not np.isnan(values[i]), -values[i], i))[:k]


def chosen(
  scores: np.ndarray, bias: np.ndarray | None, k: int, n_group: int, topk_group: int
) -> np.ndarray:
  """Experts [T, k] for given scores, one token at a time."""
  experts = []
  for row in scores:
    with np.errstate(invalid="ignore"):
      choice = row if bias is None else row + bias
      if n_group > 1:
        groups = choice.reshape(n_group, -1)
        best = [np.sum(group[largest(group, 2)]) for group in groups]
      else:
        groups, best = choice[None], [0.0]
    masked = np.full_like(groups, -np.inf)
    kept = largest(np.asarray(best, np.float32), topk_group)
    masked[kept] = groups[kept]
    experts.append(largest(masked.ravel(), k))
  return np.asarray(experts, np.int32)


def weighed(
  scores: np.ndarray, experts: np.ndarray, norm: bool, scaling: float
) -> np.ndarray:
  """Weights [T, k], each operation rounded to float32, sums in slot order."""
  weights = np.take_along_axis(scores, experts, -1)
  if norm:
    total = np.zeros(len(weights), np.float32)
    for slot in range(weights.shape[1]):
      total = total + weights[:, slot]
    with np.errstate(invalid="ignore"):
      weights = weights / (total + np.float32(1e-20))[:, None]
  return weights * np.float32(scaling)


def check_scores(got: Any, logits: np.ndarray, scoring: str) -> None:
  """Holds scores to float64, with u = 2^-24; 2 u for an exponential.

  A sigmoid is that, a sum and a quotient: 4 u, and 0 where the exponential overflows.

  A softmax: d = x - max is rounded, which is |d| u of its exponential. A sum of at most
  32 terms a lane and of 32 lanes adds 37 u to the mean of the terms' own errors, the
  quotient 1 u. Exponentials below 2^-126 have an error of 2^-149.
  """
  x = logits.astype(np.float64)
  have = np.asarray(got).astype(np.float64)
  with np.errstate(invalid="ignore", over="ignore"):
    if scoring == "sigmoid":
      exact = 1 / (1 + np.exp(-x))
      bound = 4.1 * U * exact + np.where(exact <= 2.0**-127, 2.0**-127, 2.0**-148)
    else:
      d = x - np.max(x, -1, keepdims=True)
      terms = np.exp(d)
      off = np.where(terms > 0, np.abs(d) + 2, 0)
      total = np.sum(terms, -1, keepdims=True)
      exact = terms / total
      mean = np.sum(np.where(terms > 0, terms * off, 0), -1, keepdims=True) / total
      bound = 1.01 * U * (off + mean + 38) * exact + 2.0**-148
    assert np.array_equal(np.isnan(have), np.isnan(exact))
    assert np.all(np.isnan(exact) | (np.abs(have - exact) <= bound))


def arguments(kind: tuple[str, bool, bool, float], shape: tuple[int, ...]) -> dict:
  scoring, _, norm, scaling = kind
  _, n_group, topk_group, k = shape
  return {
    "scoring": scoring,
    "norm_topk_prob": norm,
    "scaling": scaling,
    "n_group": n_group,
    "topk_group": topk_group,
    "k": k,
  }


def four(shape: tuple[int, ...], implementation: str) -> Any:
  """A function of logits and bias: `route` of each kind."""

  def run(logits, bias):
    return [
      ops.route(
        logits,
        bias if kind[1] else None,
        implementation=implementation,
        **arguments(kind, shape),
      )
      for kind in KINDS
    ]

  return run


def inputs(shape: tuple[int, ...], rows: int) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(sum(shape))
  bias = 0.3 * rng.normal(size=shape[0]).astype(np.float32)
  return hard_rows(rng, rows, shape[0]), bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choices_and_weights_of_numpy(shape):
  logits, bias = inputs(shape, 45)
  results = jax.device_get(jax.jit(four(shape, "xla"))(logits, bias))
  _, n_group, topk_group, k = shape
  for kind, (experts, weights, scores) in zip(KINDS, results, strict=True):
    scoring, biased, norm, scaling = kind
    assert experts.dtype == np.int32 and weights.dtype == np.float32
    want = chosen(scores, bias if biased else None, k, n_group, topk_group)
    np.testing.assert_array_equal(experts, want)
    # The sum of k scores, in another order: k u at most, and as much again for numpy's.
    np.testing.assert_allclose(
      weights, weighed(scores, want, norm, scaling), rtol=2 * (k + 2) * U
    )
    kernel = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
      if scoring == "softmax":
        kernel = np.exp(kernel - kernel.max(-1, keepdims=True))
        exact = kernel / kernel.sum(-1, keepdims=True)
      else:
        exact = 1 / (1 + np.exp(-kernel))
    # XLA's exp of up to 88 in size; see check_scores.
    np.testing.assert_allclose(scores, exact, rtol=2e-5, atol=2.0**-126)


def test_a_bias_that_is_no_number_takes_part():
  """NaN first, then infinity; what has -inf is as good as masked: the lowest id."""
  bias = np.zeros(9, np.float32)
  bias[[7, 2, 4]] = np.nan, np.inf, -np.inf
  settings = {"k": 9, "scoring": "sigmoid", "n_group": 3, "topk_group": 2}
  experts, weights, _ = jax.jit(lambda x: ops.route(x, bias, **settings))(
    np.zeros((1, 9), np.float32)
  )
  assert experts.tolist() == [[7, 2, 0, 1, 6, 8, 3, 4, 5]]
  np.testing.assert_allclose(weights, np.full((1, 9), 1 / 9), rtol=1e-6)


def test_without_tokens():
  for array in ops.route(np.zeros((0, 8), np.float32), k=2, scoring="softmax"):
    assert array.shape[0] == 0


def test_vmap():
  shape = (24, 8, 3, 4)
  logits, bias = inputs(shape, 18)
  run = four(shape, "auto")
  mapped = jax.jit(jax.vmap(run, (0, None)))(logits.reshape(3, 6, 24), bias)
  for one, other in zip(
    jax.tree.leaves(mapped), jax.tree.leaves(jax.jit(run)(logits, bias)), strict=True
  ):
    np.testing.assert_allclose(
      np.asarray(one).reshape(other.shape), other, rtol=1e-5, atol=1e-30
    )


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"logits": np.zeros((2, 8), np.int32)}, r"logits int32 \(2, 8\) must be float32"),
    ({"logits": np.zeros(8, np.float32)}, r"logits float32 \(8,\) must be float32"),
    ({"logits": np.zeros((2, 0), np.float32)}, "E >= 1"),
    ({"bias": np.zeros(7, np.float32)}, r"bias float32 \(7,\) must be .* \(8,\)"),
    ({"bias": np.zeros(8, np.int32)}, "bias int32"),
    ({"scoring": "tanh"}, "scoring = 'tanh' is unknown; .*'sigmoid', 'softmax'"),
    ({"k": 9}, r"k = 9 is not allowed: it must be 1 \.\. E = 8"),
    ({"k": 0}, "k = 0 is not"),
    ({"n_group": 3}, "n_group = 3 is not allowed: it must divide E = 8"),
    ({"n_group": 0}, "n_group = 0"),
    ({"topk_group": 3, "n_group": 2}, r"topk_group = 3 .* 1 \.\. n_group = 2"),
    ({"topk_group": 0}, "topk_group = 0"),
  ],
)
def test_errors_name_the_argument(changes, says):
  given = {"logits": np.zeros((2, 8), np.float32), "k": 2, "scoring": "sigmoid"}
  with pytest.raises(ValueError, match=says):
    ops.route(**given | changes)


def test_the_program_for_cuda_holds_the_call():
  logits, bias = jnp.zeros((5, 24)), jnp.zeros(24)
  for implementation, expected in (("cuda", 4), ("auto", 4), ("xla", 0)):
    text = cuda_text(four((24, 8, 3, 4), implementation), logits, bias)
    assert text.count("@kdtree_jax.route(") == expected
    if expected:
      for attribute in (
        "n_group = 8 : i64",
        "topk_group = 3 : i64",
        "softmax = 1 : i64",
        "softmax = 0 : i64",
        "norm_topk_prob = 0 : i64",
        "scaling = 2.827000e+00 : f64",
      ):
        assert attribute in text
      assert "tensor<5x4xi32>, tensor<5x4xf32>, tensor<5x24xf32>" in text
