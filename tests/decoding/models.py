"""One tiny target, its drafters and cached decodes, shared by the tests here.

Compiling a decode program takes seconds, running one milliseconds. So the tests
share a few program shapes, and vary what is a run-time value: weights, drafter,
budget, temperature, seed, stop tokens, capacity and prompts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax import reference as ref
from kdtree_jax.config import DecodeConfig, DrafterConfig, ModelConfig
from kdtree_jax.decoding import DecodeResult, modules
from kdtree_jax.drafter import DFlash, NGram, Scripted
from kdtree_jax.model.state_dict import target_from_state_dict
from kdtree_jax.model.target import Target

VOCAB = 97  # odd, so that rows of logits begin at every SIMD lane
DEPTH = 7
ROWS, SLOTS, NEW, CACHE = 8, 3, 24, 256
# Two prompts whose trees cross the end of attention's first chunk, position 128,
# while the third stays far below it.
LENGTHS = (125, 5, 118)


def model_config(**changes: Any) -> ModelConfig:
  """A target of a dense and a sparse layer."""
  fields = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "latent_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_interleave": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
  }
  return ModelConfig(**(fields | changes))


def drafter_config(**changes: Any) -> DrafterConfig:
  """A drafter of one layer that taps both layers of the target."""
  fields = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "block_size": DEPTH + 1,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": (0, 1),
    "num_target_layers": 2,
    "target_hidden_size": 64,
    "layer_types": ("full_attention",),
    "sliding_window": None,
  }
  return DrafterConfig(**(fields | changes))


CONFIG = model_config()
# Under this seed greedy texts do not loop, and no two best logits lie close together.
WEIGHTS = ref.random_weights(CONFIG, 20)


@functools.cache
def target(dtype: str = "float32") -> Target:
  return target_from_state_dict(CONFIG, WEIGHTS, dtype=jnp.dtype(dtype))


@functools.cache
def dflash(dtype: str = "float32") -> DFlash:
  config = drafter_config()
  weights = ref.random_drafter_weights(config, 2)
  return DFlash.from_state_dict(config, weights, dtype)


def prompt(length: int, seed: int) -> list[int]:
  """Tokens below 60 that repeat themselves, for the n-gram drafter to find."""
  rng = np.random.default_rng(seed)
  return np.resize(rng.integers(0, 60, 30), length).tolist()


PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def script(
  prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> jax.Array:
  """i32 [B, CACHE]: prompts and their continuations, for `Scripted`."""
  out = np.zeros((max(len(prompts), SLOTS), CACHE), np.int32)
  for row, *parts in zip(out, prompts, texts, strict=False):
    whole = np.concatenate(parts)[:CACHE]
    row[: len(whole)] = whole
  return jnp.asarray(out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixed:
  """Several drafters in one program, one of which is used, chosen at run time.

  A number is the accuracy of a scripted one. "broken" proposes noise with rows of
  NaN, +inf and nothing but -inf.
  """

  KINDS = ("dflash", "ngram", "1.0", "0.5", "0.0", "broken")

  parts: tuple[DFlash, NGram, Scripted, Scripted, Scripted]
  kind: jax.Array  # i32 [], index into KINDS

  max_depth = DEPTH
  feature_layers = (0, 1)

  @classmethod
  def create(
    cls, kind: str, dtype: str = "float32", continuations: jax.Array | None = None
  ) -> Mixed:
    if continuations is None:
      continuations = jnp.zeros((SLOTS, CACHE), jnp.int32)
    scripts = (scripted(continuations, float(kind)) for kind in cls.KINDS[2:5])
    return cls(
      (dflash(dtype), NGram(VOCAB, depth=DEPTH), *scripts),
      jnp.asarray(cls.KINDS.index(kind), jnp.int32),
    )

  def init_state(self, slots: int, cache_len: int) -> Any:
    return tuple(part.init_state(slots, cache_len) for part in self.parts)

  def observe(self, target, state, *committed) -> Any:
    return tuple(
      part.observe(target, own, *committed)
      for part, own in zip(self.parts, state, strict=True)
    )

  def draft(self, target, state, *roots) -> jax.Array:
    tables = [
      part.draft(target, own, *roots)
      for part, own in zip(self.parts, state, strict=True)
    ]
    noise = jnp.sin(1e3 * tables[0] + jnp.arange(VOCAB))
    bad = jnp.array([0, jnp.nan, 0, jnp.inf, 0, -jnp.inf, 0])[:, None]
    tables.append(noise + jnp.roll(bad, jnp.sum(roots[0]), axis=0))
    return jnp.stack(tables)[self.kind]


def watch_calls(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
  """Every compiled call of a decode becomes `call(name, run, args, donated index)`."""
  compiled = modules.compiled

  def watched(name, function, static, args, donate, *rest):
    run = compiled(name, function, static, args, donate, *rest)
    return lambda *args: call(name, run, args, donate)

  monkeypatch.setattr(modules, "compiled", watched)


SETTINGS: dict[str, Any] = {
  "rows": ROWS,
  "slots": SLOTS,
  "max_new_tokens": NEW,
  "cache_len": CACHE,
  "prefill_chunk": 32,
  "stop_token_ids": (),
  "return_logits": True,
}


def decode(
  drafter: Any = None,
  prompts: Sequence[Sequence[int]] | None = None,
  *,
  model: Target | None = None,
  sequence_ids: Sequence[int] | None = None,
  **changes: Any,
) -> DecodeResult:
  """`kd.decode` with the shared settings; plain without a drafter."""
  changes = {"method": "plain" if drafter is None else "ddtree"} | changes
  if changes["method"] != "plain":
    changes = {"budget": ROWS - 1} | changes
  return kd.decode(
    target() if model is None else model,
    drafter,
    PROMPTS if prompts is None else prompts,
    DecodeConfig(**(SETTINGS | changes)),
    sequence_ids=sequence_ids,
  )


@functools.cache
def _plain(dtype: str, changes: tuple[tuple[str, Any], ...]) -> DecodeResult:
  return decode(model=target(dtype), **dict(changes))


def plain(dtype: str = "float32", **changes: Any) -> DecodeResult:
  """The plain text of `PROMPTS`, decoded once."""
  return _plain(dtype, tuple(sorted(changes.items())))


def scripted(continuations: jax.Array, accuracy: float = 1.0) -> Scripted:
  """A drafter that reads no features, so that its programs have no taps."""
  return Scripted(continuations, accuracy, VOCAB, depth=DEPTH)


def true_script(dtype: str = "float32", **changes: Any) -> jax.Array:
  return script(PROMPTS, plain(dtype, **changes).tokens)
