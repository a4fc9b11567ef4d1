from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kdtree_jax.model import Target, target_from_state_dict, target_to_state_dict
from tests.model.families import (
  FAMILIES,
  family_config,
  family_target,
  family_weights,
)

BF16 = ml_dtypes.bfloat16


def assert_same_weights(got, want) -> None:
  assert list(got) == list(want)
  for name, array in want.items():
    assert got[name].dtype == np.float32, name
    # Bits, so that the sign of a zero counts.
    assert np.array_equal(got[name].view(np.uint32), array.view(np.uint32)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_exact(family):
  weights = {name: array.copy() for name, array in family_weights(family).items()}
  for array in weights.values():
    array.flat[0] = -0.0
  target = target_from_state_dict(family_config(family), weights)
  got = target_to_state_dict(target)
  assert_same_weights(got, {name: weights[name] for name in got})
  assert set(got) == set(weights)


def is_router(name: str) -> bool:
  return ".mlp.gate." in name


@pytest.mark.parametrize("family", ["kimi", "deepseek_v3"])
def test_bf16_rounds_once_and_leaves_the_router_alone(family):
  target = family_target(family, "bfloat16")
  weights = family_weights(family)
  for name, array in target_to_state_dict(target).items():
    want = weights[name]
    if not is_router(name):
      want = want.astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(array, want, err_msg=name)
  gate = target.layers[-1].mlp.gate
  assert gate.kernel.dtype == gate.e_score_correction_bias.dtype == jnp.float32
  dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(target, nnx.Param))}
  assert dtypes == {"bfloat16", "float32"} and target.dtype == jnp.bfloat16


def test_a_bf16_model_comes_back_as_it_is():
  once = target_to_state_dict(family_target("kimi", "bfloat16"))
  again = target_from_state_dict(family_config("kimi"), once, dtype=jnp.bfloat16)
  assert_same_weights(target_to_state_dict(again), once)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_targets_have_the_names_and_the_shapes_of_a_checkpoint(family):
  target = nnx.eval_shape(lambda: Target(family_config(family), rngs=nnx.Rngs(0)))

  def table(target: Target):
    return {
      path: (variable.shape, variable.dtype)
      for path, variable in nnx.to_flat_state(nnx.state(target))
    }

  assert table(target) == table(family_target(family))


def test_halves_of_fused_tensors_land_where_they_belong():
  """One number in one published tensor moves one number of the module."""
  config, weights = family_config("kimi"), family_weights("kimi")
  base = target_from_state_dict(config, weights)
  C, E, R = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
  prefix, ahead = "model.layers.1", base.layers[1]

  def moved(name: str, index: tuple[int, ...], variable) -> list[list[int]]:
    changed = weights[name].copy()
    changed[index] += 1
    layer = target_from_state_dict(config, weights | {name: changed}).layers[1]
    difference = np.asarray(variable(layer)[...] - variable(ahead)[...])
    return np.argwhere(difference != 0).tolist()

  # Row (head 2, value 3), column 5 of kv_b_proj: [H * (C + E), R].
  row = 2 * (C + E) + C + 3
  kv_b = f"{prefix}.self_attn.kv_b_proj.weight"
  assert weights[kv_b].shape == (4 * (C + E), R)
  assert moved(kv_b, (row, 5), lambda m: m.self_attn.v_up) == [[2, 5, 3]]
  assert moved(kv_b, (row, 5), lambda m: m.self_attn.k_up) == []
  assert moved(kv_b, (2 * (C + E) + 3, 5), lambda m: m.self_attn.k_up) == [[2, 3, 5]]
  up = f"{prefix}.mlp.experts.6.up_proj.weight"  # [F, D]; gate and up are joined
  assert moved(up, (4, 9), lambda m: m.mlp.experts.gate_up) == [[9, 6, 24 + 4]]
  shared = f"{prefix}.mlp.shared_experts.gate_proj.weight"
  assert moved(shared, (4, 9), lambda m: m.mlp.shared_experts.gate_up.kernel) == [
    [9, 4]
  ]


@pytest.mark.parametrize(
  "name",
  [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.self_attn.kv_b_proj.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.1.mlp.experts.7.up_proj.weight",
  ],
)
def test_a_missing_tensor_is_named(name):
  weights = {k: v for k, v in family_weights("kimi").items() if k != name}
  with pytest.raises(ValueError, match=f"'{name}' is missing"):
    target_from_state_dict(family_config("kimi"), weights)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  "name",
  [
    "model.norm.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.self_attn.kv_b_proj.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.1.mlp.experts.7.up_proj.weight",
  ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused(name, value, dtype):
  weights = dict(family_weights("kimi"))
  weights[name] = weights[name].copy()
  weights[name][..., -1] = value
  with pytest.raises(ValueError, match=f"tensor '{name}': holds NaN or infinite"):
    target_from_state_dict(family_config("kimi"), weights, dtype=dtype, finite=True)


@pytest.mark.parametrize(
  ("family", "name"),
  [
    ("other", "lm_head.weight"),  # tied
    ("other", "model.layers.1.mlp.shared_experts.up_proj.weight"),
    ("v2_lite", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("moonlight", "model.layers.0.self_attn.q_b_proj.weight"),
    ("kimi", "model.layers.2.input_layernorm.weight"),
    ("kimi", "model.layers.1.mlp.experts.8.up_proj.weight"),
  ],
)
def test_an_unexpected_tensor_is_named(family, name):
  weights = family_weights(family) | {name: np.zeros((2, 2), np.float32)}
  with pytest.raises(ValueError, match=f"unexpected tensor '{name}'"):
    target_from_state_dict(family_config(family), weights)


@pytest.mark.parametrize(
  "name",
  [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.self_attn.kv_b_proj.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.experts.3.down_proj.weight",
    "model.layers.1.mlp.experts.3.gate_proj.weight",
  ],
)
@pytest.mark.parametrize("how", ["longer", "transposed", "flat"])
def test_a_misshapen_tensor_is_named(name, how):
  array = family_weights("kimi")[name]
  if how == "transposed" and array.ndim == 1:
    array = array[None]
  changed = {
    "longer": np.concatenate([array, array[:1]]),
    "transposed": array.T,
    "flat": array.reshape(-1) if array.ndim > 1 else array[None],
  }[how]
  with pytest.raises(ValueError, match=f"tensor '{name}'"):
    target_from_state_dict(
      family_config("kimi"), family_weights("kimi") | {name: changed}
    )
