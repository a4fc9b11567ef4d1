"""`kdtree-decode`: continue prompts by plain, chain or tree decoding."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from kdtree_jax.cli import flags as cli_flags
from kdtree_jax.cli import prompts as prompt_files
from kdtree_jax.config import DecodeConfig
from kdtree_jax.training.config import Experiment

if TYPE_CHECKING:
  from kdtree_jax.decoding import DecodeResult, SequenceResult
  from kdtree_jax.drafter import DFlash
  from kdtree_jax.model import Target
  from kdtree_jax.tokenizer import Tokenizer

# Flags that override a field of DecodeConfig when they are given.
_DECODE_FIELDS = (
  "method",
  "budget",
  "rows",
  "slots",
  "max_new_tokens",
  "temperature",
  "top_p",
  "seed",
  "implementation",
  "capture_loop",
)

# Flags that override a field of DrafterConfig.
_DRAFTER_FIELDS = ("drafter_rope_amplitude", "drafter_causal")

_REASONS = {
  "stop": "a stop token",
  "length": "--max_new_tokens",
  "cache": "the last position of the cache (the model's longest text, or cache_len)",
  "error": "logits that were not finite",
}


def define_flags() -> None:
  """Declares the flags of this program (none exist before `run`)."""
  flags.DEFINE_string("prompt", None, "Text to continue.")
  flags.DEFINE_string("prompts", None, "JSON lines with the key 'prompt' (and 'id').")
  flags.DEFINE_integer(
    "humaneval", 3, "Without --prompt(s): so many of HumanEval's prompts.", 1, 164
  )
  flags.DEFINE_bool(
    "chat",
    False,
    "Prompts are what a user says; the tokenizer's chat template applies.",
  )
  flags.DEFINE_string(
    "target",
    None,
    "KDTR file or Hugging Face directory of the target; the demo's if unset.",
  )
  flags.DEFINE_string(
    "drafter", None, "KDTR file or Hugging Face directory of its DFlash drafter."
  )
  flags.DEFINE_string(
    "tokenizer", None, "Hugging Face directory or tokenizer.json; --target's if unset."
  )
  flags.DEFINE_float(
    "drafter_rope_amplitude",
    None,
    "Factor on the drafter's cosines and sines, in place of its configuration's.",
  )
  flags.DEFINE_enum(
    "drafter_causal",
    None,
    ["none", "sliding", "all"],
    "The drafter's layers in which a row sees no later row of its block.",
  )
  flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Compute dtype.")
  flags.DEFINE_enum(
    "expert_dtype",
    None,
    ["as_stored", "int4", "dequantized"],
    "How the target's routed experts are held in memory; unset: as_stored of a "
    "directory, dequantized of a KDTR file and the demo's.",
  )
  flags.DEFINE_enum("method", None, ["plain", "chain", "ddtree"], "How to decode.")
  flags.DEFINE_integer("budget", None, "Tree nodes without the root.")
  flags.DEFINE_integer("rows", None, "Static rows per sequence of the verify step.")
  flags.DEFINE_integer("slots", 1, "Sequences decoded at once.", 1)
  flags.DEFINE_integer("max_new_tokens", None, "Tokens per prompt at most.")
  flags.DEFINE_float("temperature", None, "0 is greedy.")
  flags.DEFINE_float("top_p", None, "Nucleus mass in (0, 1].")
  flags.DEFINE_integer("seed", None, "Seed of the sampling noise.")
  flags.DEFINE_enum("implementation", None, ["auto", "xla", "cuda"], "Of the ops.")
  flags.DEFINE_bool(
    "capture_loop", None, "GPU: the whole loop of rounds as one CUDA graph."
  )
  flags.DEFINE_bool(
    "verify",
    False,
    "Also decode plainly; exit 1 at the first token or logit bit that differs.",
  )
  flags.DEFINE_bool(
    "time_plain", False, "Also time plain decoding at its best width, one row."
  )
  flags.DEFINE_bool("draw", False, "Draw each round's tree, accepted path marked.")
  flags.DEFINE_enum("output", "text", ["text", "json"], "Form of the results.")


def main(positional: list[str], experiment: Experiment | None) -> int:
  """Decodes, prints, and verifies; returns the exit status."""
  if positional[1:]:
    raise ValueError(f"unexpected argument {positional[1]!r}; is a flag misspelt?")
  config = _decode_config(experiment)
  prompts, bad_line = _read_prompts()
  target, drafter, tokenizer = _load_models()
  tokens = [_encode(p["prompt"], target, tokenizer) for p in prompts]
  cli_flags.enable_compilation_cache()
  run = _Run(target, drafter, tokenizer, tokens, config)
  result, seconds = run.decode(config)
  plain_speeds = run.plain_speeds() if flags.FLAGS.time_plain else None
  for i, (prompt, sequence) in enumerate(zip(prompts, result, strict=True)):
    speed = plain_speeds[i] if plain_speeds else None
    if flags.FLAGS.output == "json":
      print(json.dumps(_record(prompt, sequence, config, tokenizer, speed)))
    else:
      _print_text(prompt, sequence, tokenizer, run)
  _note(_summary(result, config, seconds, plain_speeds))
  status = 0
  if flags.FLAGS.verify:
    difference = run.first_difference(result)
    status = 1 if difference else 0
    if difference:
      print(f"DIFFERENT from plain decoding: {difference}", file=sys.stderr)
    else:
      total = sum(len(s.tokens) for s in result)
      _note(f"identical to plain decoding: {total} tokens and the bits of their logits")
  if bad_line:
    print(f"error: {bad_line}", file=sys.stderr)
    status = status or 2
  return status


def _note(line: str) -> None:
  """A line for the reader, kept out of JSON output."""
  print(line, file=sys.stderr if flags.FLAGS.output == "json" else sys.stdout)


def _decode_config(experiment: Experiment | None) -> DecodeConfig:
  config = experiment.decode if experiment else DecodeConfig(budget=15)
  given = {name: flags.FLAGS[name].value for name in _DECODE_FIELDS}
  changes = {name: value for name, value in given.items() if value is not None}
  if changes.get("method", config.method) != config.method:
    # The default budget is the default method's.
    changes.setdefault("budget", None)
  return dataclasses.replace(
    config,
    **changes,
    return_logits=flags.FLAGS.verify,
    return_trees=flags.FLAGS.draw,
  )


def _read_prompts() -> tuple[list[dict[str, Any]], str | None]:
  """The prompts, and what was wrong with the line that ended them, if any."""
  if flags.FLAGS.prompt is not None and flags.FLAGS.prompts is not None:
    raise ValueError("--prompt and --prompts exclude each other")
  if flags.FLAGS.prompt is not None:
    if not flags.FLAGS.prompt:
      raise ValueError("--prompt is empty")
    prompt_files.check_text(flags.FLAGS.prompt)
    return [{"prompt": flags.FLAGS.prompt}], None
  if flags.FLAGS.prompts is not None:
    prompts, bad_line = prompt_files.read_jsonl(flags.FLAGS.prompts)
    if not prompts:
      raise ValueError(bad_line or f"--prompts={flags.FLAGS.prompts} holds no prompt")
    return prompts, bad_line
  from kdtree_jax.demo import load_prompts

  return load_prompts("humaneval")[: flags.FLAGS.humaneval], None


def _load_models() -> tuple[Target, DFlash | None, Tokenizer]:
  from kdtree_jax.checkpoint import load_drafter, load_target
  from kdtree_jax.tokenizer import load_tokenizer

  f = flags.FLAGS
  if f.target is None:
    for name in ("drafter", "tokenizer", *_DRAFTER_FIELDS):
      if f[name].value is not None:
        raise ValueError(f"--{name} needs --target: it belongs to its target")
    return _load_demo()
  # What is quick to find wrong comes first.
  tokenizer = load_tokenizer(f.tokenizer or f.target)
  drafter = None
  given = [name for name in _DRAFTER_FIELDS if f[name].value is not None]
  if f.drafter:
    drafter = load_drafter(
      f.drafter,
      f.dtype,
      rope_amplitude=f.drafter_rope_amplitude,
      causal=f.drafter_causal,
    )
  elif given:
    raise ValueError(f"--{given[0]} needs --drafter")
  # A published model multiplied out is several times as large as its files.
  unset = "as_stored" if Path(f.target).is_dir() else "dequantized"
  target = load_target(f.target, f.dtype, f.expert_dtype or unset)
  tokenizer.check_fits(target.config.vocab_size, f"--target={f.target}")
  return target, drafter, tokenizer


def _load_demo() -> tuple[Target, DFlash, Tokenizer]:
  from kdtree_jax.demo import load_demo
  from kdtree_jax.tokenizer.load import tokenizer_from_json

  target, drafter, tokenizer = load_demo(
    flags.FLAGS.dtype, flags.FLAGS.expert_dtype or "dequantized"
  )
  return target, drafter, tokenizer_from_json(tokenizer.to_str(), "of the demo")


def _encode(prompt: str, target: Target, tokenizer: Tokenizer) -> list[int]:
  """A prompt's tokens, as a text or as what a user says."""
  if flags.FLAGS.chat:
    message = {"role": "user", "content": prompt}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True)
  tokens = tokenizer.encode(prompt)
  bos = target.config.bos_token_id
  if tokenizer.bos is None and bos is not None:
    return [bos, *tokens]  # The tokenizer's files leave it to the model's.
  return tokens


class _Run:
  """Decodes one list of prompts in several ways."""

  def __init__(self, target, drafter, tokenizer, tokens, config: DecodeConfig):
    self.target, self.drafter = target, drafter
    self.tokenizer, self.tokens, self.config = tokenizer, tokens, config
    self.compile_seconds = 0.0

  def decode(self, config: DecodeConfig) -> tuple[DecodeResult, float]:
    """The result, and the seconds it took, compilation not counted."""
    from kdtree_jax.decoding import decode

    start, compiled_before = time.perf_counter(), self.compile_seconds
    drafter = None if config.method == "plain" else self.drafter
    result = decode(
      self.target, drafter, self.tokens, config, on_compile=self._on_compile
    )
    compiling = self.compile_seconds - compiled_before
    return result, time.perf_counter() - start - compiling

  def _on_compile(self, name: str, seconds: float) -> None:
    self.compile_seconds += seconds
    print(f"[compiled {name}: {seconds:.1f} s]", file=sys.stderr, flush=True)

  def plain_speeds(self) -> list[float]:
    """Tokens per second of each prompt, decoded plainly and alone at one row."""
    from kdtree_jax.decoding import decode

    config = dataclasses.replace(
      self.config, method="plain", budget=None, rows=1, slots=1, return_trees=False
    )
    speeds = []
    for i, tokens in enumerate(self.tokens):
      result = decode(
        self.target,
        None,
        [tokens],
        config,
        sequence_ids=[i],
        on_compile=self._on_compile,
      )
      speeds.append(tokens_per_second(result[0]))
    return speeds

  def first_difference(self, result: DecodeResult) -> str | None:
    """Decodes plainly at the same rows and slots and compares bit for bit."""
    from kdtree_jax.decoding.compare import first_difference
    from kdtree_jax.decoding.settings import check_prompts, complete

    drafter = None if self.config.method == "plain" else self.drafter
    prompts = check_prompts(self.tokens, self.target.config.vocab_size)
    settings = complete(self.target, drafter, prompts, self.config)
    plain, _ = self.decode(
      dataclasses.replace(
        self.config,
        method="plain",
        budget=None,
        rows=settings.rows,
        slots=settings.slots,
        return_trees=False,
      )
    )
    return first_difference(plain, result)

  def draw(self, sequence: SequenceResult) -> Iterator[str]:
    from kdtree_jax.cli.draw import draw_round

    for i, record in enumerate(sequence.rounds or ()):
      yield f"round {i + 1}:"
      yield draw_round(record, lambda t: self.tokenizer.decode([t]))


def tokens_per_second(sequence: SequenceResult) -> float:
  """Tokens after the first one per second of rounds."""
  seconds = sequence.stats.decode_seconds
  return (len(sequence.tokens) - 1) / seconds if seconds else float("nan")


def _print_text(prompt: dict, sequence: SequenceResult, tokenizer, run: _Run) -> None:
  stats = sequence.stats
  print(f"=== {prompt.get('id', 'prompt')} ===")
  text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
  print(prompt["prompt"] + ("\n\n" if flags.FLAGS.chat else "") + text)
  if flags.FLAGS.draw:
    for line in run.draw(sequence):
      print(line)
  print(
    f"--- {len(sequence.tokens)} tokens, {stats.rounds} rounds, "
    + (f"{stats.tokens_per_round:.2f} tokens per round, " if stats.rounds else "")
    + f"finished by {_REASONS[sequence.finish_reason]}\n"
  )


def _record(prompt, sequence, config, tokenizer, plain_speed) -> dict[str, Any]:
  stats = sequence.stats
  record = {
    **({"id": prompt["id"]} if "id" in prompt else {}),
    "prompt": prompt["prompt"],
    "text": tokenizer.decode(sequence.tokens, skip_special_tokens=True),
    "tokens": sequence.tokens.tolist(),
    "method": config.method,
    "rounds": stats.rounds,
    "accepted_lengths": list(stats.accepted_lengths),
    "tokens_per_round": stats.tokens_per_round if stats.rounds else None,
    "seconds": stats.prefill_seconds + stats.decode_seconds,
    "finish_reason": sequence.finish_reason,
    "tokens_per_second": tokens_per_second(sequence) if stats.rounds else None,
  }
  if plain_speed is not None:
    record["plain_tokens_per_second"] = plain_speed
  return record


def _summary(result, config, seconds: float, plain_speeds) -> str:
  rounds = sum(s.stats.rounds for s in result)
  total = sum(len(s.tokens) for s in result)
  line = (
    f"{config.method}: {len(result)} prompts, {total} tokens, {rounds} rounds, "
    f"{result.tokens_per_round:.2f} tokens per round (pooled over rounds), "
    f"{seconds:.1f} s"
  )
  if plain_speeds:
    own = sum(tokens_per_second(s) for s in result) / len(result)
    plain = sum(plain_speeds) / len(plain_speeds)
    line += f"; {own:.0f} tokens/s per sequence, plain at one row {plain:.0f}"
  return line


def run() -> None:
  """Entry point of the console script."""
  define_flags()
  cli_flags.run(main, sys.argv)


if __name__ == "__main__":
  run()
