"""Targets with int4 experts: from and to state dicts and files, and their numbers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import kdtree_jax as kd
from kdtree_jax.bench.journal import model_digest
from kdtree_jax.checkpoint import (
  Int4Tensor,
  dequantize,
  load_checkpoint,
  load_target,
  open_kdtr,
  quantize,
  read_target,
  save_target,
)
from kdtree_jax.decoding.compare import first_difference
from kdtree_jax.model import target_from_state_dict, target_to_state_dict
from kdtree_jax.model.moe import Int4Tiles
from kdtree_jax.reference import random_weights
from tests.model.families import family_config, random_tokens, step

BF16 = ml_dtypes.bfloat16

# Few experts, many in groups; sizes that end inside of a tile (32, 96: half a tile of
# K; F = 32: whole tiles).
CONFIGS = {
  "few": family_config("kimi", hidden_size=32, moe_intermediate_size=96),
  "many": family_config("deepseek_v3", hidden_size=64, moe_intermediate_size=32),
}
both = pytest.mark.parametrize("size", CONFIGS)


def is_expert(name: str) -> bool:
  return ".mlp.experts." in name


@functools.cache
def floats(size: str) -> dict[str, np.ndarray]:
  return random_weights(CONFIGS[size], 2)


@functools.cache
def stored(size: str) -> dict[str, np.ndarray | Int4Tensor]:
  """Int4 experts with values that quantising floats never gives, such as -8."""
  rng = np.random.default_rng(3)

  def int4(weight: np.ndarray) -> Int4Tensor:
    scales = quantize(weight).scales
    return Int4Tensor(
      rng.integers(0, 256, quantize(weight).packed.shape, np.uint8), scales
    )

  return {n: int4(w) if is_expert(n) else w for n, w in floats(size).items()}


@functools.cache
def target(size: str, dtype: str, expert_dtype="as_stored") -> kd.model.Target:
  return target_from_state_dict(
    CONFIGS[size], stored(size), dtype=jnp.dtype(dtype), expert_dtype=expert_dtype
  )


def assert_same_int4(got: Int4Tensor, want: Int4Tensor) -> None:
  np.testing.assert_array_equal(got.packed, want.packed)
  np.testing.assert_array_equal(got.scales.view(np.uint16), want.scales.view(np.uint16))


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_dict_round_trip_is_exact(size, dtype):
  model = target(size, dtype)
  assert model.int4_experts
  kept = target_to_state_dict(model, expert_dtype="as_stored")
  values = target_to_state_dict(model)
  assert set(kept) == set(values) == set(stored(size))
  for name, want in stored(size).items():
    if is_expert(name):
      assert_same_int4(kept[name], want)
      np.testing.assert_array_equal(values[name], dequantize(want))
      assert values[name].dtype == np.float32
    elif dtype == "float32":
      np.testing.assert_array_equal(kept[name], want)


@both
def test_as_stored_dequantized_and_int4(size):
  weights = floats(size)
  quantised = {n: quantize(w) if is_expert(n) else w for n, w in weights.items()}
  config = CONFIGS[size]

  def leaves(weights, expert_dtype):
    model = target_from_state_dict(config, weights, expert_dtype=expert_dtype)
    return model.int4_experts, jax.tree.leaves(nnx.state(model))

  def assert_same(got, want):
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)

  values = {n: dequantize(w) if is_expert(n) else w for n, w in quantised.items()}
  assert leaves(quantised, "as_stored")[0] and not leaves(weights, "as_stored")[0]
  assert_same(leaves(weights, "int4"), leaves(quantised, "as_stored"))
  assert_same(leaves(quantised, "int4"), leaves(quantised, "as_stored"))
  assert_same(leaves(quantised, "dequantized"), leaves(values, "as_stored"))
  assert_same(leaves(weights, "dequantized"), leaves(weights, "as_stored"))


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_has_the_bits_of_the_floats(size, dtype):
  """The values are those of the floats, and on a CPU so are the products."""
  models = [target(size, dtype, kind) for kind in ("as_stored", "dequantized")]
  config = CONFIGS[size]
  for N in (1, 6):
    tokens = random_tokens((2, N), 4)
    ancestors = np.tile(
      np.where(np.arange(4) == 0, np.arange(N)[:, None], -1), (2, 1, 1)
    )
    depths, lengths = np.zeros((2, N), np.int32), np.array([5, 9], np.int32)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    shape = (config.num_hidden_layers, 2, 128, width)
    cache = np.random.default_rng(5).normal(size=shape).astype(dtype)
    results = [
      step(m, tokens, ancestors.astype(np.int32), depths, cache, lengths)
      for m in models
    ]
    for got, want in zip(*results, strict=True):
      np.testing.assert_array_equal(
        np.asarray(got, np.float32).view(np.uint32),
        np.asarray(want, np.float32).view(np.uint32),
      )
    assert np.isfinite(results[0][0]).all() and np.std(results[0][0]) > 0.1


@both
def test_whole_sequences_can_be_scored(size):
  tokens = random_tokens((1, 12), 6)
  got = jax.jit(kd.forward)(target(size, "float32"), tokens)
  want = jax.jit(kd.forward)(target(size, "float32", "dequantized"), tokens)
  # Experts are summed in slot order here, in expert order there.
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_nothing_of_it_is_trained_and_its_digest_counts():
  model = target("few", "bfloat16")
  params = nnx.to_flat_state(nnx.state(model, nnx.Param))
  assert all(variable.dtype != jnp.uint8 for _, variable in params)
  assert not [path for path, _ in params if "experts" in path]
  tiles = nnx.to_flat_state(nnx.state(model, Int4Tiles))
  assert {path[-1] for path, _ in tiles} == {"gate_up", "down"}
  changed = dict(stored("few"))
  name = "model.layers.1.mlp.experts.7.up_proj.weight"
  packed = changed[name].packed.copy()
  packed[-1, -1] ^= 0x10
  changed[name] = dataclasses.replace(changed[name], packed=packed)
  other = target_from_state_dict(CONFIGS["few"], changed, dtype=jnp.dtype("bfloat16"))
  again = target_from_state_dict(
    CONFIGS["few"], stored("few"), dtype=jnp.dtype("bfloat16")
  )
  assert model_digest(model) == model_digest(again) != model_digest(other)


@both
def test_a_file_keeps_int4_bit_for_bit(size, tmp_path):
  config, first, second = CONFIGS[size], tmp_path / "first", tmp_path / "second"
  fingerprint = save_target(first, config, stored(size), dtype="float32")
  model = load_checkpoint(first, "float32")
  assert model.int4_experts and model.fingerprint == fingerprint
  again = save_target(
    second,
    config,
    target_to_state_dict(model, expert_dtype="as_stored"),
    dtype="float32",
  )
  assert again == fingerprint and first.read_bytes() == second.read_bytes()
  with open_kdtr(second) as file:
    for name, want in stored(size).items():
      if is_expert(name):
        np.testing.assert_array_equal(file.read_packed(name), want.packed)


@pytest.mark.parametrize("expert_format", ["int4", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_file_loads_in_every_way(expert_format, dtype, tmp_path):
  path, config = tmp_path / "target.kdtr", CONFIGS["few"]
  save_target(path, config, floats("few"), expert_format=expert_format, dtype=dtype)
  values = read_target(path)[1]
  float_dtype = np.dtype(dtype)  # ml_dtypes has registered bfloat16.
  for expert_dtype in ("as_stored", "int4", "dequantized"):
    model = load_target(path, dtype, expert_dtype)
    wanted = expert_dtype == "int4" or (expert_dtype, expert_format) == (
      "as_stored",
      "int4",
    )
    assert model.int4_experts == wanted
    got = target_to_state_dict(model)
    for name, value in values.items():
      if is_expert(name) and wanted:
        quantised = expert_format == "int4"
        want = value if quantised else dequantize(quantize(value))
      elif ".mlp.gate." in name:
        want = value
      else:
        want = value.astype(float_dtype).astype(np.float32)
      np.testing.assert_array_equal(got[name], want, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_decodes_the_same_with_int4_experts(dtype):
  model, drafter, tokenizer = kd.load_demo(dtype)
  int4, _, _ = kd.load_demo(dtype, "as_stored")
  assert int4.int4_experts and not model.int4_experts
  prompt = [model.config.bos_token_id, *tokenizer.encode("def fibonacci(n):\n").ids]
  config = kd.DecodeConfig(
    budget=7, rows=8, max_new_tokens=12, return_logits=True, cache_len=128
  )
  want = kd.decode(model, drafter, [prompt], config)
  got = kd.decode(int4, drafter, [prompt], config)
  assert first_difference(want, got) is None
  assert got.tokens_per_round > 1


def test_what_cannot_be_int4_is_named(tmp_path):
  config, weights = CONFIGS["few"], dict(stored("few"))
  name = "model.layers.1.mlp.experts.3.down_proj.weight"
  with pytest.raises(ValueError, match=f"'{name}' is of floats, but other"):
    target_from_state_dict(config, weights | {name: dequantize(weights[name])})
  other = "model.layers.0.mlp.down_proj.weight"
  wide = np.zeros_like(floats("few")[other])[:, :32]
  with pytest.raises(ValueError, match="only routed experts may be"):
    norm = "model.layers.1.mlp.gate.weight"
    target_from_state_dict(config, weights | {norm: quantize(floats("few")[norm])})
  with pytest.raises(ValueError, match=f"'{other}' has shape"):
    target_from_state_dict(config, weights | {other: quantize(wide)})
  coarse = quantize(dequantize(weights[name]), group_size=96)
  with pytest.raises(ValueError, match=f"'{name}' has int4 groups of 96"):
    target_from_state_dict(config, weights | {name: coarse})
  bad = Int4Tensor(weights[name].packed, weights[name].scales.copy())
  bad.scales[3, 1] = np.nan
  for expert_dtype in ("as_stored", "dequantized"):
    with pytest.raises(ValueError, match=f"'{name}': scales hold NaN"):
      target_from_state_dict(config, weights | {name: bad}, expert_dtype=expert_dtype)
  with pytest.raises(ValueError, match="expert_dtype = 'int8' is not allowed"):
    target_from_state_dict(config, weights, expert_dtype="int8")
  with pytest.raises(ValueError, match="expert_dtype = 'int4' is not allowed"):
    target_to_state_dict(target("few", "float32"), expert_dtype="int4")
  with pytest.raises(ValueError, match="expert_dtype = 'int8' is not allowed"):
    load_checkpoint(tmp_path / "any", expert_dtype="int8")
  with pytest.raises(
    ValueError, match="moe_intermediate_size = 24 does not allow int4"
  ):
    small = family_config("kimi")
    target_from_state_dict(small, random_weights(small, 1), expert_dtype="int4")
  with pytest.raises(ValueError, match="hidden_size = 48 does not allow int4"):
    nnx.eval_shape(
      lambda: kd.model.Target(
        family_config("kimi", hidden_size=48), rngs=nnx.Rngs(0), int4_experts=True
      )
    )
