from __future__ import annotations

import dataclasses
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kdtree_jax.config import ConfigError, ModelConfig
from kdtree_jax.drafter.base import Drafter, check_drafter
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.drafter.ngram import NGram
from kdtree_jax.drafter.scripted import Scripted
from tests.drafter.fake_target import VOCAB, WIDTH, make_config

TARGET = ModelConfig(
  vocab_size=VOCAB,
  hidden_size=WIDTH,
  intermediate_size=32,
  moe_intermediate_size=16,
  num_hidden_layers=6,
  num_attention_heads=2,
  q_lora_rank=None,
  kv_lora_rank=8,
  qk_nope_head_dim=8,
  qk_rope_head_dim=4,
  v_head_dim=8,
  n_routed_experts=4,
  num_experts_per_tok=2,
  n_shared_experts=1,
  n_group=1,
  topk_group=1,
  norm_topk_prob=True,
  routed_scaling_factor=1.0,
  scoring_func="sigmoid",
  topk_method="noaux_tc",
  first_k_dense_replace=1,
  rms_norm_eps=1e-6,
  latent_norm_eps=1e-6,
  rope_theta=1e4,
  rope_scaling=None,
  rope_interleave=True,
  max_position_embeddings=128,
  tie_word_embeddings=True,
)


def _dflash(**overrides) -> DFlash:
  return nnx.eval_shape(lambda: DFlash(make_config(**overrides)))


def _unigram():
  """The example in the protocol's docstring, as a reader would paste it."""
  text = inspect.getdoc(Drafter)
  code = text[text.index("@jax.tree_util") : text.index("Attributes:")]
  names = {"jax": jax, "jnp": jnp, "dataclasses": dataclasses}
  exec(textwrap.dedent("    " + code), names)
  return names["Unigram"](VOCAB)


def test_drafters_that_fit_pass():
  script = np.zeros((1, 8), int)
  for drafter in (_dflash(), NGram(VOCAB), Scripted(script, 0.5, VOCAB), _unigram()):
    assert isinstance(drafter, Drafter)
    check_drafter(drafter, TARGET)
  check_drafter(_dflash(target_fingerprint="abc"), TARGET, "abc")
  check_drafter(_dflash(target_fingerprint="abc"), TARGET)
  check_drafter(_dflash(), TARGET, "abc")


def test_the_example_in_the_docs_works():
  drafter = _unigram()
  state = drafter.init_state(1, 16)
  tokens = np.array([[5, 7, 5, 3]])
  features = np.zeros((1, 4, 0))
  state = jax.jit(type(drafter).observe)(
    drafter, None, state, tokens, features, np.array([0]), np.array([3])
  )
  logits = drafter.draft(None, state, tokens[:, 3], np.array([3]), np.array([0]))
  assert logits.shape == (1, drafter.max_depth, VOCAB)
  assert np.argsort(-logits[0, 0])[:2].tolist() == [5, 7]


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"vocab_size": VOCAB + 1}, "vocab_size = 38 does not fit"),
    ({"hidden_size": 16}, "hidden_size = 16 does not fit"),
    ({"target_hidden_size": 16}, "target_hidden_size = 16 does not fit"),
    ({"num_target_layers": 5}, "num_target_layers = 5 does not fit"),
    (
      {"num_target_layers": 7, "target_layer_ids": (1, 6)},
      r"feature_layers = \(1, 6\) .* the target has layers 0 to 5",
    ),
    ({"target_fingerprint": "of another"}, "target_fingerprint = 'of another'"),
  ],
)
def test_a_drafter_of_another_target_is_refused(overrides, message):
  with pytest.raises(ConfigError, match=message):
    check_drafter(_dflash(**overrides), TARGET, "the fingerprint")


@pytest.mark.parametrize(
  ("attribute", "value", "message"),
  [
    ("draft", None, "has no method draft"),
    ("observe", 3, "has no method observe"),
    ("max_depth", 0, "max_depth = 0 is not allowed"),
    ("max_depth", 2.0, "max_depth = 2.0 is not allowed"),
    ("feature_layers", [1], r"feature_layers = \[1\] is not allowed"),
    ("feature_layers", (-1,), r"feature_layers = \(-1,\) is not allowed"),
    ("vocab_size", 5, "vocab_size = 5 does not fit"),
  ],
)
def test_what_is_no_drafter_is_refused(attribute, value, message):
  class Custom:
    vocab_size, max_depth, feature_layers = VOCAB, 3, ()
    init_state = observe = draft = lambda self, *args: None

  check_drafter(Custom(), TARGET)
  setattr(Custom, attribute, value)
  with pytest.raises(ConfigError, match=message):
    check_drafter(Custom(), TARGET)


def test_a_missing_attribute_is_named():
  class Custom:
    feature_layers = ()
    init_state = observe = draft = lambda self, *args: None

  with pytest.raises(ConfigError, match="drafter Custom has no attribute max_depth"):
    check_drafter(Custom(), TARGET)
