"""The demo pair, exported: what transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import kdtree_jax as kd
from kdtree_jax.checkpoint import dequantize, read_target_as_stored
from kdtree_jax.checkpoint.hf.export import export
from kdtree_jax.demo import load_prompts

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
  export(DEMO / "target.kdtr", folder, expert_format="float32")
  return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
  _, _, tokenizer = kd.load_demo()
  texts = load_prompts("humaneval")[:10] + load_prompts("gsm_symbolic")[:10]
  return [[0, *tokenizer.encode(p["prompt"]).ids] for p in texts]


def test_greedy_text_of_20_prompts(directory, prompts):
  target, _, _ = kd.load_demo("float32")
  config = kd.DecodeConfig(
    method="plain", max_new_tokens=NEW_TOKENS, slots=1, return_logits=True
  )
  ours = kd.decode(target, None, prompts, config)
  model = load(directory, torch.float32)
  compared, ties, largest = 0, [], 0.0
  for i, (prompt, sequence) in enumerate(zip(prompts, ours, strict=True)):
    with torch.no_grad():
      theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
      )
    tokens = theirs.sequences[0, len(prompt) :].tolist()
    for step, logits in enumerate(theirs.logits):
      best, second = torch.topk(logits[0], 2).values.tolist()
      error = np.abs(logits[0].numpy() - sequence.logits[step]).max()
      largest = max(largest, float(error))
      compared += 1
      if tokens[step] != sequence.tokens[step]:
        ties.append((i, step, tokens[step], int(sequence.tokens[step]), best - second))
        break  # From here on the texts are different ones.
    else:
      assert tokens == sequence.tokens.tolist()
  print(f"{compared} tokens, logits differ by at most {largest:.2e}")
  for i, step, theirs, ours_, gap in ties:
    print(f"prompt {i}, token {step}: {theirs} there, {ours_} here, gap {gap:.2e}")
    assert gap < TIE
  assert compared > 15 * NEW_TOKENS


def test_int4_experts_are_read_as_they_are(tmp_path):
  pytest.importorskip("compressed_tensors")
  export(DEMO / "target.kdtr", tmp_path / "int4")
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
