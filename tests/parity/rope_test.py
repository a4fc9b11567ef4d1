"""RoPE's angles, cosines and sines against those of the `transformers` package.

That package forms them with torch's float32 functions, whose last bits are not defined:
on a CPU `torch.pow` misses the nearest float32 in one frequency of 32 (theta 50,000),
`torch.cos` and `torch.sin` in one value of 20, and on a GPU in others. So the formulas
are compared to the bit with these functions rounded correctly, and the package as it
is within the last bit that torch leaves open.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
  DeepseekV2RotaryEmbedding,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
  DeepseekV3RotaryEmbedding,
)

from kdtree_jax import reference
from kdtree_jax.config import YarnConfig
from kdtree_jax.ops import rope
from tests.parity.oracle import CorrectlyRounded
from tests.parity.variants import plain, yarn

P = 64
LONGEST = 131072
# Prompts, and places all over the context.
POSITIONS = np.concatenate(
  [np.arange(4096), np.random.default_rng(0).integers(4096, LONGEST, 8192)]
)

FAMILIES = {
  "kimi_k2_6": yarn(64.0),
  "kimi_k2_instruct": yarn(32.0, beta_fast=1.0),
  "kimi_k2_0905": yarn(64.0, beta_fast=1.0),
  "deepseek_v3": yarn(40.0, 10000.0),
  "deepseek_v2_lite": yarn(40.0, 10000.0, mscale=0.707, mscale_all_dim=0.707),
  "moonlight": plain(50000.0),
}
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def theirs(parameters: dict, version: int = 3) -> tuple[np.ndarray, ...]:
  """(frequencies [P/2], cos and sin f32 [positions, P/2]) of the package."""
  sizes = {"qk_rope_head_dim": P, "max_position_embeddings": LONGEST}
  positions = torch.from_numpy(POSITIONS)[None]
  if version == 2:
    config = transformers.DeepseekV2Config(**sizes, rope_parameters=dict(parameters))
    module = DeepseekV2RotaryEmbedding(config)
    out = module(torch.zeros(1), positions)[0]
    cos, sin = out.real, out.imag
  else:
    config = transformers.DeepseekV3Config(**sizes, rope_parameters=dict(parameters))
    module = DeepseekV3RotaryEmbedding(config)
    cos, sin = (x[0, :, : P // 2] for x in module(torch.zeros(1), positions))
  return module.inv_freq.numpy(), cos.numpy(), sin.numpy()


def yarn_config(parameters: dict) -> YarnConfig | None:
  if parameters["rope_type"] == "default":
    return None
  names = YarnConfig.__dataclass_fields__
  return YarnConfig(**{k: v for k, v in parameters.items() if k in names})


@functools.cache
def ours(family: str, angle_dtype: str) -> tuple[np.ndarray, np.ndarray]:
  """(cos, sin) f32 [positions, P/2] as the jitted op applies them.

  Pairs (1, 0) turn into (cos, sin) exactly: their products are exact.
  """
  parameters = FAMILIES[family]
  extension = yarn_config(parameters)
  amplitude = 1.0
  if extension is not None:
    amplitude = extension.amplitude(extension.mscale) / extension.amplitude(
      extension.mscale_all_dim
    )
  table = reference.rope_table(
    P, LONGEST, parameters["rope_theta"], extension, angle_dtype, amplitude
  )
  assert amplitude == 1  # Of all published models.
  pairs = np.zeros((len(POSITIONS), P), np.float32)
  pairs[:, 0::2] = 1
  turn = jax.jit(lambda *x: rope(*x, interleave=True))
  turned = np.asarray(turn(pairs, POSITIONS.astype(np.int32), *table))
  return turned[:, : P // 2], turned[:, P // 2 :]


def steps_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """How many float32 values lie between two, where both have one sign."""
  return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32))


@EACH_FAMILY
@pytest.mark.parametrize("version", [2, 3])
def test_float32_angles_are_those_of_transformers_to_the_bit(family, version):
  parameters = FAMILIES[family]
  with CorrectlyRounded():
    frequencies, cos, sin = theirs(parameters, version)
  got = reference.inverse_frequencies(
    P, parameters["rope_theta"], yarn_config(parameters), "float32"
  )
  assert got.tobytes() == frequencies.tobytes()
  for one, other in zip(ours(family, "float32"), (cos, sin), strict=True):
    np.testing.assert_array_equal(one, other)


@EACH_FAMILY
def test_transformers_as_it_is_differs_in_the_last_bit_only(family):
  """Which torch's float32 functions leave open, in frequencies, cosines and sines."""
  parameters = FAMILIES[family]
  frequencies, cos, sin = theirs(parameters)
  got = reference.inverse_frequencies(
    P, parameters["rope_theta"], yarn_config(parameters), "float32"
  )
  apart = steps_apart(got, frequencies)
  same = apart == 0
  assert apart.max() <= 2 and same.mean() > 0.8
  for one, other in zip(ours(family, "float32"), (cos, sin), strict=True):
    assert steps_apart(one[:, same], other[:, same]).max() <= 1


@EACH_FAMILY
def test_float64_angles_are_numpys_to_the_bit(family):
  """The formulas once more, in float64 from end to end."""
  parameters = FAMILIES[family]
  theta = parameters["rope_theta"]
  frequencies = 1 / theta ** (np.arange(0, P, 2) / P)
  if parameters["rope_type"] == "yarn":
    low, high = reference.yarn_band(P, theta, yarn_config(parameters))
    keep = 1 - np.clip((np.arange(P // 2) - low) / (high - low), 0, 1)
    slow = 1 / (parameters["factor"] * theta ** (np.arange(0, P, 2) / P))
    frequencies = slow * (1 - keep) + frequencies * keep
  angles = POSITIONS[:, None] * frequencies
  got = ours(family, "float64")
  for one, exact in zip(got, (np.cos(angles), np.sin(angles)), strict=True):
    np.testing.assert_array_equal(one, exact.astype(np.float32))
