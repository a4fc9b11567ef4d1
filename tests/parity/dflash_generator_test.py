"""The DFlash generator of transformers on the demo pair, round by round.

transformers has one drafter model of this kind (Muse Glimmer's), with the layers of a
DFlash drafter under other names, and a generator that works with any target.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

import kdtree_jax as kd
from kdtree_jax.checkpoint.hf.drafter import read_hf_drafter
from kdtree_jax.checkpoint.hf.export import export_hf
from kdtree_jax.demo import load_prompts
from kdtree_jax.drafter.dflash import DFlash

generators = pytest.importorskip("transformers.generation.candidate_generator")
if not hasattr(generators, "DFlashTokenCandidateGenerator"):
  pytest.skip("this transformers has no DFlash generator", allow_module_level=True)
muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")

DEMO = Path(kd.__file__).parent / "demo"
NEW_TOKENS = 64
RENAMED = {
  "fc.weight": "encoder.fc.weight",
  "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("pair")
  export_hf(DEMO / "target.kdtr", folder / "target", expert_format="float32")
  export_hf(DEMO / "drafter.kdtr", folder / "drafter", dtype="float32")
  return folder


@pytest.fixture(scope="module")
def target(folder) -> transformers.PreTrainedModel:
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "target",
    dtype=torch.float32,
    attn_implementation="eager",
    experts_implementation="eager",
  ).eval()
  # The demo's drafter taps the last layer, which no published one does: as the stream
  # that leaves it. transformers gives the stream after the final norm in its place.
  streams: dict[str, torch.Tensor] = {}

  def keep(module, inputs, output):
    streams["last"] = output if torch.is_tensor(output) else output[0]

  def replace(module, inputs, output):
    if output.hidden_states is not None:
      output.hidden_states = (*output.hidden_states[:-1], streams["last"])
    return output

  model.model.layers[-1].register_forward_hook(keep)
  model.register_forward_hook(replace)
  return model


@pytest.fixture(scope="module")
def drafter(folder) -> transformers.PreTrainedModel:
  published = json.loads((folder / "drafter" / "config.json").read_text())
  config = muse.MuseGlimmerAssistantConfig(
    **published["dflash_config"],
    **{
      name: published[name]
      for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "layer_types",
        "block_size",
      )
    },
    rope_parameters={"rope_type": "default", "rope_theta": published["rope_theta"]},
    attn_implementation="eager",
  )
  model = muse.MuseGlimmerAssistantModel(config).eval()
  weights = safetensors.torch.load_file(folder / "drafter" / "model.safetensors")
  weights = {RENAMED.get(name, name): value for name, value in weights.items()}
  model.load_state_dict(weights, strict=True)
  return model


def test_the_same_chain_of_accepted_lengths(folder, target, drafter, monkeypatch):
  ours, _, tokenizer = kd.load_demo("float32")
  config, weights, _ = read_hf_drafter(folder / "drafter")
  our_drafter = DFlash.from_state_dict(config, weights)
  texts = load_prompts("humaneval")[:6] + load_prompts("gsm_symbolic")[:2]
  prompts = [[0, *tokenizer.encode(p["prompt"]).ids] for p in texts]
  settings = kd.DecodeConfig(method="chain", max_new_tokens=NEW_TOKENS, slots=1)
  result = kd.decode(ours, our_drafter, prompts, settings)

  matches: list[int] = []
  monkeypatch.setattr(
    generators.DFlashTokenCandidateGenerator,
    "update_candidate_strategy",
    lambda self, ids, scores, count: matches.append(int(count)),
  )
  rounds = 0
  for prompt, sequence in zip(prompts, result, strict=True):
    matches.clear()
    theirs = target.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt)),
      max_new_tokens=NEW_TOKENS,
      do_sample=False,
      pad_token_id=0,
      assistant_model=drafter,
      speculation_type="dflash",
    )
    assert theirs[0, len(prompt) :].tolist() == sequence.tokens.tolist()
    # Their first round has no drafts: it is our prefill. Matches are a round's tokens
    # without the bonus. How the limit cuts the last round is each one's own.
    accepted = [count + 1 for count in matches[1:]]
    lengths = list(sequence.stats.accepted_lengths)
    print(lengths)
    assert accepted[:-1] == lengths[:-1][: len(accepted) - 1]
    assert abs(len(accepted) - len(lengths)) <= 1
    rounds += len(accepted)
  assert rounds > 60
