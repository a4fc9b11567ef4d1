"""The demo pair, exported: what transformers makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import kdtree_jax as kd
from kdtree_jax import reference
from kdtree_jax.checkpoint import (
  dequantize,
  expected_shapes,
  read_target_as_stored,
  save_target,
)
from kdtree_jax.checkpoint.hf.export import export_hf
from kdtree_jax.config import YarnConfig
from kdtree_jax.demo import load_prompts
from tests.checkpoint.state_dict_test import TARGET
from tests.parity.oracle import Oracle

DEMO = Path(kd.__file__).parent / "demo"
NEW_TOKENS = 32
# Greedy decoding may choose either of two tokens whose logits lie closer than the
# logits of two float32 implementations do.
TIE = 1e-4


def load(directory: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
  return transformers.AutoModelForCausalLM.from_pretrained(
    directory,
    dtype=dtype,
    attn_implementation="eager",
    experts_implementation="eager",
  ).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
  """The target with its int4 experts as the float32 values that they stand for."""
  folder = tmp_path_factory.mktemp("export") / "target"
  export_hf(DEMO / "target.kdtr", folder, expert_format="float32")
  return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
  _, _, tokenizer = kd.load_demo()
  texts = load_prompts("humaneval")[:10] + load_prompts("gsm_symbolic")[:10]
  return [[0, *tokenizer.encode(p["prompt"]).ids] for p in texts]


@pytest.fixture(scope="module")
def theirs(directory, prompts) -> list[tuple[list[int], np.ndarray]]:
  """Tokens and f32 [NEW_TOKENS, V] logits of each prompt, greedily."""
  model = load(directory, torch.float32)
  texts = []
  for prompt in prompts:
    with torch.no_grad():
      output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
      )
    tokens = output.sequences[0, len(prompt) :].tolist()
    texts.append((tokens, torch.cat(output.logits).numpy()))
  return texts


# The file's own config has angles in float64; the directory's, as every imported one,
# in float32, as transformers forms them.
@pytest.mark.parametrize("angles", ["float64", "float32"])
def test_greedy_text_of_20_prompts(directory, prompts, theirs, angles):
  source = DEMO / "target.kdtr" if angles == "float64" else directory
  target = kd.load_checkpoint(source, "float32", "dequantized")
  assert target.config.rope_angle_dtype == angles
  config = kd.DecodeConfig(
    method="plain", max_new_tokens=NEW_TOKENS, slots=1, return_logits=True
  )
  ours = kd.decode(target, None, prompts, config)
  compared, ties, largest = 0, [], 0.0
  for i, (sequence, (tokens, logits)) in enumerate(zip(ours, theirs, strict=True)):
    found = sequence.tokens.tolist()
    pairs = zip(found, tokens, strict=False)
    different = [n for n, (ours_, their) in enumerate(pairs) if ours_ != their]
    if different:
      step = different[0]  # From there on the texts are different ones.
      second, best = np.sort(logits[step])[-2:]
      ties.append((i, step, tokens[step], found[step], best - second))
    else:
      step = len(tokens) - 1
      assert found == tokens
    compared += step + 1
    error = np.abs(logits[: step + 1] - sequence.logits[: step + 1]).max()
    largest = max(largest, float(error))
  print(f"angles in {angles}: {compared} tokens, logits within {largest:.1e}, ", end="")
  print(f"{len(ties)} ties")
  for i, step, their_token, our_token, gap in ties:
    print(f"prompt {i}, token {step}: {their_token}, here {our_token}, gap {gap:.1e}")
    assert gap < TIE
  assert largest < TIE
  assert compared > 15 * NEW_TOKENS


YARN = YarnConfig(
  factor=40.0,
  original_max_position_embeddings=16,  # Short, so that its ramp shows.
  beta_fast=32.0,
  beta_slow=1.0,
  mscale=1.0,
  mscale_all_dim=1.0,
)
VARIANTS = {
  "yarn": {"rope_scaling": YARN},
  "amplitude": {
    "rope_scaling": dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=0.5)
  },
  "halves": {"rope_interleave": False, "q_lora_rank": None},
  "groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
  "unnormalised": {"norm_topk_prob": False, "tie_word_embeddings": True},
  "no_shared_expert": {"n_shared_experts": 0},
  "v2": {
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": dataclasses.replace(YARN, mscale=0.707, mscale_all_dim=0.707),
  },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_other_configs_are_those_of_the_reference(tmp_path, name):
  defaults = {
    "rope_scaling": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rope_angle_dtype": "float32",
  }
  config = dataclasses.replace(TARGET, **(defaults | VARIANTS[name]))
  rng = np.random.default_rng(1)
  weights = {  # Matrices that keep their input's size, norms about 1, a bias about 0.
    key: rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1])
    + ("norm.weight" in key)
    for key, shape in expected_shapes(config).items()
  }
  save_target(tmp_path / "x", config, weights, dtype="float32", expert_format="float32")
  export_hf(tmp_path / "x", tmp_path / "hf")
  tokens = rng.integers(0, config.vocab_size, 40)
  ours = reference.forward(config, weights, tokens).logits
  oracle = Oracle(load(tmp_path / "hf", torch.float32))
  theirs = oracle.logits(tokens)
  assert oracle.choice_gap > 1e-5  # Else a rounding may choose another expert.
  # As in target_test.py; a wrong formula moves logits by 1e-2 and more.
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
  assert np.abs(theirs).max() > 0.5


def test_int4_experts_are_read_as_they_are(tmp_path):
  pytest.importorskip("compressed_tensors")
  export_hf(DEMO / "target.kdtr", tmp_path / "int4")
  model = load(tmp_path / "int4", torch.bfloat16)
  config, weights, _ = read_target_as_stored(DEMO / "target.kdtr")
  for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
    experts = model.model.layers[layer].mlp.experts
    for e in range(config.n_routed_experts):
      gate, up, down = (
        dequantize(weights[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"])
        for part in ("gate", "up", "down")
      )
      for found, expected in (
        (experts.gate_up_proj[e], np.concatenate([gate, up])),
        (experts.down_proj[e], down),
      ):
        expected = torch.from_numpy(expected).to(torch.bfloat16)
        assert torch.equal(found, expected)


def test_tokenizer_and_stop_tokens(directory):
  _, _, ours = kd.load_demo()
  theirs = transformers.AutoTokenizer.from_pretrained(directory)
  text = load_prompts("humaneval")[0]["prompt"]
  assert theirs(text).input_ids == ours.encode(text).ids
  assert theirs.bos_token == theirs.eos_token == "<|endoftext|>"
  model = load(directory, torch.float32)
  assert model.generation_config.eos_token_id == 0
  assert model.config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
