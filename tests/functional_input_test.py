"""The step functions refuse what they cannot read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd


@pytest.fixture(scope="module")
def target():
  return kd.load_demo()[0]


@pytest.mark.parametrize(
  ("tokens", "lengths", "says"),
  [
    ([[1.5, 2.0]], None, "tokens must be integers"),
    ([[99999]], None, "tokens must lie between 0 and 4095"),
    ([[-1]], None, "tokens must lie between"),
    ([[1, 2]], [0], "lengths must lie between 1 and 2"),
    ([[1, 2]], [3], "lengths must lie between 1 and 2"),
    ([[1, 2]], [1, 1], "lengths must have shape"),
    ([1, 2], None, "tokens must be"),
    ([[]], None, "tokens must be"),
    (np.zeros((1, 9), np.int32), None, "cache_len"),
  ],
)
def test_prefill_names_the_bad_argument(target, tokens, lengths, says):
  with pytest.raises(ValueError, match=says):
    kd.prefill(target, tokens, 8, lengths=lengths)


def test_prefill_can_be_jitted_with_known_and_unknown_values(target):
  # 1e-4: one more rounding per operation than in the fused program, on logits of
  # about 10; a wrong length moves them by whole units.
  tokens = jnp.asarray([[1, 2, 3]])
  wanted = kd.prefill(target, tokens, 8, lengths=jnp.asarray([2]))[1]
  known = jax.jit(lambda t: kd.prefill(target, t, 8, lengths=jnp.asarray([2]))[1])
  unknown = jax.jit(lambda n: kd.prefill(target, tokens, 8, lengths=n)[1])
  np.testing.assert_allclose(known(tokens), wanted, atol=1e-4)
  np.testing.assert_allclose(unknown(jnp.asarray([2])), wanted, atol=1e-4)


def test_decode_names_swapped_and_mistyped_arguments(target):
  with pytest.raises(ValueError, match="config must be a DecodeConfig, not dict"):
    kd.decode(target, None, [[1]], {"method": "plain"})
  with pytest.raises(ValueError, match="target must be a Target, not NoneType"):
    kd.decode(None, target, [[1]])
  plain = kd.DecodeConfig(method="plain")
  with pytest.raises(ValueError, match="sequence_ids"):
    kd.decode(target, None, [[1]], plain, sequence_ids=3)
  with pytest.raises(ValueError, match="sequence_ids holds True"):
    kd.decode(target, None, [[1]], plain, sequence_ids=[True])
  with pytest.raises(ValueError, match="temperature"):
    kd.decode(target, None, [[1]], kd.DecodeConfig(method="plain", temperature=1e300))


@pytest.mark.parametrize(
  "bad",
  [
    {"temperature": "1"},
    {"temperature": None},
    {"top_p": None},
    {"budget": True},
    {"seed": True},
    {"stop_token_ids": 5},
    {"return_logits": "no"},
  ],
)
def test_decode_config_names_the_field(bad):
  with pytest.raises(kd.ConfigError, match=next(iter(bad))):
    kd.DecodeConfig(**bad)


def test_numpy_integers_are_integers():
  config = kd.DecodeConfig(seed=np.int64(3), budget=np.int32(4), rows=np.int64(8))
  assert config == kd.DecodeConfig(seed=3, budget=4, rows=8)
  assert hash(config) == hash(kd.DecodeConfig(seed=3, budget=4, rows=8))


def test_model_config_reads_hugging_faces_forms_of_eos(target):
  data = target.config.to_dict()
  for given, wanted in ((7, (7,)), (None, ()), ([1, 2], (1, 2))):
    config = kd.ModelConfig.from_dict({**data, "eos_token_id": given})
    assert config.eos_token_id == wanted
  with pytest.raises(kd.ConfigError, match="bos_token_id"):
    kd.ModelConfig.from_dict({**data, "bos_token_id": 4096})
  with pytest.raises(kd.ConfigError, match="rope_scaling"):
    kd.ModelConfig.from_dict({**data, "rope_scaling": 3})
  with pytest.raises(kd.ConfigError, match="mapping"):
    kd.ModelConfig.from_dict(None)
