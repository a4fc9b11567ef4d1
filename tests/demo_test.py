"""The demo pair as it ships."""

from __future__ import annotations

from importlib import resources

import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.checkpoint import open_kdtr
from kdtree_jax.demo import load_prompts


@pytest.fixture(scope="module")
def demo():
  return kd.load_demo()


def test_everything_fits_in_16_megabytes():
  folder = resources.files("kdtree_jax.demo")
  size = sum(
    len(f.read_bytes()) for f in folder.iterdir() if f.is_file() and f.name[0] != "_"
  )
  assert size <= 16_000_000


def test_experts_are_stored_int4_and_the_pair_belongs_together(demo):
  target, drafter, _ = demo
  with resources.as_file(resources.files("kdtree_jax.demo") / "target.kdtr") as path:
    with open_kdtr(path) as file:
      experts = [n for n in file.names if ".experts." in n and not n.endswith("_scale")]
      assert len(experts) == 4 * 8 * 3
      assert {file.info(n).dtype for n in experts} == {"int4"}
  assert drafter.config.target_fingerprint == target.fingerprint
  assert drafter.config.mask_token_id != target.config.bos_token_id


def test_tokenizer_is_exact_and_of_the_targets_vocabulary(demo):
  target, _, tokenizer = demo
  assert tokenizer.get_vocab_size() == target.config.vocab_size
  for name, count in (("humaneval", 164), ("gsm_symbolic", 64)):
    prompts = load_prompts(name)
    assert len(prompts) == count
    for p in prompts:
      assert tokenizer.decode(tokenizer.encode(p["prompt"]).ids) == p["prompt"]


def test_the_target_is_a_trained_model(demo):
  """Code costs far fewer nats a token than its words in another order."""
  target, _, tokenizer = demo
  text = "for i in range(len(numbers)):\n    if numbers[i] > 0:\n        return i\n"
  ids = [target.config.bos_token_id, *tokenizer.encode(text).ids]
  shuffled = [ids[0], *np.random.default_rng(0).permutation(ids[1:])]
  tokens = jnp.asarray([ids, shuffled])
  logits = np.asarray(kd.forward(target, tokens))[:, :-1]
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nats = -np.take_along_axis(log_probs, np.asarray(tokens)[:, 1:, None], 2).mean((1, 2))
  assert nats[0] < 3 < nats[1]


def test_dtypes(demo):
  target, drafter, _ = kd.load_demo("bfloat16")
  assert target.dtype == jnp.bfloat16 and drafter.dtype == jnp.bfloat16
  assert demo[0].dtype == jnp.float32
  with pytest.raises(ValueError, match="dtype"):
    kd.load_demo("float16")
