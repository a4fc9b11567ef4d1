"""`kdtree-bench`: acceptance, exactness, speed, kernels, decode, a slice, measured."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from kdtree_jax.bench import slice_config
from kdtree_jax.cli import flags as cli_flags
from kdtree_jax.config import DecodeConfig
from kdtree_jax.training.config import Experiment

if TYPE_CHECKING:
  from kdtree_jax.model.target import Target

_PAIR = (
  "config",
  "target",
  "drafter",
  "dtype",
  "expert_dtype",
  "seed",
  "implementation",
)
_TEXTS = (*_PAIR, "prompt_set", "num_prompts", "max_new_tokens")
_TREES = ("temperatures", "budgets", "slots", "rows")
# What each suite takes besides --output_dir; any other flag is refused.
SUITES = {
  "acceptance": (*_TEXTS, *_TREES),
  "exactness": (*_TEXTS, *_TREES, "scale", "min_tokens", "max_seconds"),
  "speed": (*_TEXTS, *_TREES, "repetitions", "stages"),
  "kernels": ("kernels",),
  "decode": (*_PAIR, "prompt_set", "temperatures", "budgets", "model", "rounds"),
  "slice": (
    *("config", "dtype", "seed", "implementation", "budgets", "contexts", "rounds"),
    *("stages", "exact", "widths", "slots", "max_seconds"),
  ),
}


def define_flags() -> None:
  """Declares the flags of this program (none exist before `run`)."""
  flags.DEFINE_enum("suite", None, list(SUITES), "What to measure.")
  flags.DEFINE_string("output_dir", "build/bench", "Folder of the JSON and the plots.")
  flags.DEFINE_string("target", None, "KDTR file of the target; the demo's if unset.")
  flags.DEFINE_string("drafter", None, "KDTR file of its drafter.")
  flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "Compute dtype; exactness runs both if unset, the others float32.",
  )
  flags.DEFINE_enum(
    "expert_dtype",
    None,
    ["as_stored", "int4", "dequantized"],
    "How the target's routed experts are held in memory; dequantized if unset.",
  )
  flags.DEFINE_enum(
    "prompt_set",
    None,
    ["humaneval", "gsm_symbolic"],
    "Held-out prompts; exactness mixes both if unset, the others take humaneval.",
  )
  flags.DEFINE_integer("num_prompts", None, "The first so many of the set.", 1)
  flags.DEFINE_integer("max_new_tokens", None, "Tokens per prompt at most.", 1)
  flags.DEFINE_list("temperatures", None, "Comma-separated; 0 is greedy.")
  flags.DEFINE_list("budgets", None, "Comma-separated tree nodes without the root.")
  flags.DEFINE_list("slots", None, "Sequences at once; exactness takes several.")
  flags.DEFINE_integer("rows", None, "Static rows per sequence; not for speed.", 1)
  flags.DEFINE_integer("seed", None, "Seed of the sampling noise.")
  flags.DEFINE_enum("implementation", None, ["auto", "xla", "cuda"], "Of the ops.")
  flags.DEFINE_float(
    "scale", 0.1, "exactness: share of its programs to run, 1 for the whole product."
  )
  flags.DEFINE_integer(
    "min_tokens", 200_000, "exactness: tokens of the whole product; --scale applies."
  )
  flags.DEFINE_float(
    "max_seconds",
    None,
    "exactness, slice: begin nothing new after so long; exactness goes on when rerun.",
    0.0,
  )
  flags.DEFINE_integer("repetitions", 3, "speed: decodes per prompt and method.", 1)
  flags.DEFINE_bool(
    "stages", True, "speed, slice: also time each stage of a round alone."
  )
  flags.DEFINE_list("kernels", None, "kernels: ops to measure; all if unset.")
  flags.DEFINE_enum(
    "model",
    "demo",
    ["demo", "kimi_like"],
    "decode: the demo pair, or a random one of Kimi's widths per token and few layers.",
  )
  flags.DEFINE_integer(
    "rounds", 32, "decode, slice: rounds per call of the program.", 1
  )
  flags.DEFINE_list(
    "contexts", None, "slice: comma-separated tokens, 1024 if unset; k counts 1024."
  )
  flags.DEFINE_bool(
    "exact", False, "slice: compare bits over --widths and --slots instead of timing."
  )
  flags.DEFINE_list("widths", None, "slice: rows per sequence that --exact compares.")


def main(positional: list[str], experiment: Experiment | None) -> int:
  """Runs a suite, prints its report and writes it; returns the exit status."""
  if positional[1:]:
    raise ValueError(f"unexpected argument {positional[1]!r}; is a flag misspelt?")
  if flags.FLAGS.suite is None:
    raise ValueError(f"--suite is needed, one of {', '.join(SUITES)}")
  _refuse_other_flags(flags.FLAGS.suite)
  folder = Path(flags.FLAGS.output_dir)
  cli_flags.check_folder("output_dir", folder)
  cli_flags.enable_compilation_cache()
  suites: dict[str, Callable[[Path, DecodeConfig | None], int]] = {
    "acceptance": _acceptance,
    "exactness": _exactness,
    "speed": _speed,
    "kernels": _kernels,
    "decode": _decode,
  }
  if flags.FLAGS.suite == "slice":
    assert experiment is not None, "see _default_experiment"
    return _slice(folder, experiment)
  decode = experiment.decode if experiment else None
  return suites[flags.FLAGS.suite](folder, decode)


def _default_experiment() -> Experiment | None:
  """What stands for --config where it is not given."""
  return slice_config.get_config() if flags.FLAGS.suite == "slice" else None


def _refuse_other_flags(suite: str) -> None:
  """Raises where a flag was given that the suite would not heed."""
  known = {"config", *(name for names in SUITES.values() for name in names)}
  for name in sorted(known - set(SUITES[suite])):
    if flags.FLAGS[name].present:
      takes = ", ".join(f"--{other}" for other in SUITES[suite])
      raise ValueError(f"--{name}: --suite={suite} does not take it; it takes {takes}")


def _acceptance(folder: Path, decode: DecodeConfig | None) -> int:
  from kdtree_jax.bench import acceptance, plots, report

  slots = _numbers("slots", int, (8,))
  if len(slots) != 1:
    raise ValueError(
      f"--slots={','.join(flags.FLAGS.slots)}: acceptance takes one number"
    )
  target, drafter, tokenizer = _load_models(flags.FLAGS.dtype or "float32")
  prompt_set = flags.FLAGS.prompt_set or "humaneval"
  result = acceptance.run(
    target,
    drafter,
    _prompts(target, tokenizer, prompt_set, 40),
    budgets=_numbers("budgets", int, (8, 15, 16, 32, 60)),
    temperatures=_numbers("temperatures", float, (0.0, 0.7)),
    rows=flags.FLAGS.rows,
    base=_base(decode or DecodeConfig(), slots=slots[0]),
    log=_log,
  )
  result["settings"] = {"set": prompt_set} | result["settings"]
  print(acceptance.render(result))
  stem = folder / f"acceptance_{prompt_set}"
  report.write_json(stem.with_suffix(".json"), result)
  plots.acceptance(result, stem.with_suffix(".png"))
  _wrote(stem.with_suffix(".json"), stem.with_suffix(".png"))
  return 0 if result["text_difference"] is None else 1


def _exactness(folder: Path, decode: DecodeConfig | None) -> int:
  from kdtree_jax.bench import exactness, prompts, report
  from kdtree_jax.bench.journal import Journal

  defaults = exactness.Product()
  dtype = flags.FLAGS.dtype
  base = decode or defaults.base
  if decode is not None:
    # Short chunks of rounds, because their ends are part of what is tested.
    base = dataclasses.replace(
      decode,
      method="ddtree",
      budget=None,
      max_new_tokens=defaults.base.max_new_tokens,
      chunk_rounds=defaults.base.chunk_rounds,
    )
  product = dataclasses.replace(
    defaults,
    dtypes=(dtype,) if dtype else defaults.dtypes,
    temperatures=_numbers("temperatures", float, defaults.temperatures),
    budgets=_numbers("budgets", int, defaults.budgets),
    slots=_numbers("slots", int, defaults.slots),
    rows=flags.FLAGS.rows or defaults.rows,
    scale=flags.FLAGS.scale,
    min_tokens=flags.FLAGS.min_tokens,
    base=_base(base),
  )
  target, _, tokenizer = _load_models(product.dtypes[0])
  names = (flags.FLAGS.prompt_set,) if flags.FLAGS.prompt_set else prompts.SETS
  pool = prompts.interleave([_prompts(target, tokenizer, name, None) for name in names])
  result = exactness.run(
    lambda dtype: _load_models(dtype)[:2],
    pool,
    product,
    journal=Journal(folder / "exactness.jsonl"),
    max_seconds=flags.FLAGS.max_seconds,
    log=_log,
  )
  print(exactness.render(result))
  report.write_json(folder / "exactness.json", result)
  _wrote(folder / "exactness.json", folder / "exactness.jsonl")
  return 0 if result["difference"] is None else 1


def _speed(folder: Path, decode: DecodeConfig | None) -> int:
  from kdtree_jax.bench import plots, report, speed

  if flags.FLAGS.rows is not None or list(_numbers("slots", int, (1,))) != [1]:
    raise ValueError("speed decodes one sequence, each method at its own rows")
  temperature = _temperature(0.0)
  target, drafter, tokenizer = _load_models(flags.FLAGS.dtype or "float32")
  prompt_set = flags.FLAGS.prompt_set or "humaneval"
  result = speed.run(
    target,
    drafter,
    _prompts(target, tokenizer, prompt_set, 8),
    budgets=_numbers("budgets", int, speed.BUDGETS),
    temperature=temperature,
    repetitions=flags.FLAGS.repetitions,
    stage_repeats=20 if flags.FLAGS.stages else 0,
    base=_base(decode or DecodeConfig()),
    log=_log,
  )
  result["settings"] = {"set": prompt_set} | result["settings"]
  print(speed.render(result))
  report.write_json(folder / "speed.json", result)
  plots.speed(result, folder / "speed.png")
  _wrote(folder / "speed.json", folder / "speed.png")
  return 0


def _kernels(folder: Path, decode: DecodeConfig | None) -> int:
  del decode  # No --config comes so far.
  import jax

  from kdtree_jax.bench import (
    kernel_cases,
    kernels,
    matmul_cases,
    plots,
    report,
    timing,
  )

  cases = kernel_cases.standard() + matmul_cases.standard()
  known = list(dict.fromkeys(case.op for case in cases))
  asked = flags.FLAGS.kernels or known
  for name in asked:
    if name not in known:
      raise ValueError(f"--kernels={name}: it must be among {', '.join(known)}")
  if jax.default_backend() != "gpu":
    raise ValueError(
      "--suite=kernels needs a CUDA GPU; the default device here is "
      f"{jax.devices()[0].device_kind!r}"
    )
  ceilings = timing.ceilings()
  _log(f"ceilings: {ceilings}")
  chosen = [case for case in cases if case.op in asked]
  result = kernels.run(chosen, ceilings, log=_log)
  print(kernels.render(result))
  report.write_json(folder / "kernels.json", result)
  plots.kernels(result, folder / "kernels.png")
  _wrote(folder / "kernels.json", folder / "kernels.png")
  return 1 if kernels.failed(result) else 0


def _decode(folder: Path, decode: DecodeConfig | None) -> int:
  from kdtree_jax.bench import decode as suite
  from kdtree_jax.bench import plots, report
  from kdtree_jax.bench.kimi_like import kimi_like
  from kdtree_jax.decoding.settings import check_implementation

  name = flags.FLAGS.model
  for flag in ("target", "drafter", "prompt_set"):
    if name != "demo" and flags.FLAGS[flag].present:
      raise ValueError(f"--{flag}: --model={name} makes a pair and a prompt of its own")
  dtype = flags.FLAGS.dtype or "bfloat16"
  base = _base(decode or DecodeConfig(), slots=1)
  base = dataclasses.replace(base, temperature=_temperature(base.temperature))
  check_implementation(base.implementation)
  if name == "demo":
    target, drafter, tokenizer = _load_models(dtype)
    prompt_set = flags.FLAGS.prompt_set or "humaneval"
    (prompt,) = _prompts(target, tokenizer, prompt_set, 1)
  else:
    target, drafter, prompt = kimi_like(dtype)
  result = suite.run(
    target,
    drafter,
    prompt,
    budgets=_numbers("budgets", int, (64,)),
    rounds=flags.FLAGS.rounds,
    base=base,
    log=_log,
  )
  result["settings"] = {"model": name} | result["settings"]
  print(suite.render(result))
  stem = folder / f"decode_{name}"
  report.write_json(stem.with_suffix(".json"), result)
  plots.decode(result, stem.with_suffix(".png"))
  _wrote(stem.with_suffix(".json"), stem.with_suffix(".png"))
  return 0 if suite.host_transfers(result) == 0 else 1


def _slice(folder: Path, experiment: Experiment) -> int:
  # Nearly all of the GPU, read by JAX when it starts its backend.
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
  import jax

  from kdtree_jax.bench import report, timing
  from kdtree_jax.bench import slice as suite

  given = flags.FLAGS
  for name in ("widths", "slots"):
    if given[name].present and not given.exact:
      raise ValueError(f"--{name} needs --exact")
  contexts = _contexts()
  if given.exact:
    return _slice_exact(folder, experiment, contexts)
  settings = suite.Settings(
    contexts=contexts or suite.CONTEXTS,
    budgets=_numbers("budgets", int, suite.BUDGETS),
    rounds=given.rounds,
    base=_base(experiment.decode, slots=1),
    dtype=given.dtype or "bfloat16",
    parts=given.stages,
    max_seconds=given.max_seconds,
  )
  suite.check_settings(experiment, settings)
  on_gpu = jax.default_backend() == "gpu"
  ceilings = timing.ceilings() if on_gpu else timing.ceilings(1 << 24, 512)
  _log(f"ceilings: {ceilings}")
  result = suite.run(experiment, settings, ceilings, _log)
  print(suite.render(result))
  report.write_json(folder / "slice.json", result)
  _wrote(folder / "slice.json")
  return 1 if suite.failed(result) else 0


def _slice_exact(folder: Path, experiment: Experiment, contexts: Sequence[int]) -> int:
  import jax.numpy as jnp

  from kdtree_jax.bench import kimi_slice, report
  from kdtree_jax.bench import slice as suite
  from kdtree_jax.bench import slice_exact as exact
  from kdtree_jax.decoding.settings import check_implementation

  for name in ("budgets", "rounds", "stages"):
    if flags.FLAGS[name].present:
      raise ValueError(f"--{name}: --exact does not take it")
  defaults = exact.Product()
  if len(contexts) > 1:
    raise ValueError("--contexts: --exact takes one number")
  base = _base(experiment.decode, slots=1)
  check_implementation(base.implementation)
  product = dataclasses.replace(
    defaults,
    widths=_numbers("widths", int, defaults.widths),
    batches=_numbers("slots", int, defaults.batches),
    context=contexts[0] if contexts else defaults.context,
    seed=base.seed,
    implementation=base.implementation,
  )
  dtype = jnp.dtype(flags.FLAGS.dtype or "bfloat16")
  alone = dataclasses.replace(experiment, drafter=None)
  suite.check_fits(alone, dtype, product.context)
  target = kimi_slice.random_target(experiment.model, dtype, base.seed)
  result = exact.run(target, product, max_seconds=flags.FLAGS.max_seconds, log=_log)
  print(exact.render(result))
  report.write_json(folder / "slice_exact.json", result)
  _wrote(folder / "slice_exact.json")
  return 1 if exact.failed(result) else 0


def _contexts() -> Sequence[int]:
  """--contexts, where 32k means 32,768."""
  out = []
  for text in flags.FLAGS.contexts or ():
    number, factor = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    if not number.isdecimal() or not int(number):
      raise ValueError(
        f"--contexts={','.join(flags.FLAGS.contexts)} is not allowed: give numbers of "
        "1 or more, separated by commas; k counts 1024"
      )
    out.append(factor * int(number))
  return out


def _base(config: DecodeConfig, slots: int | None = None) -> DecodeConfig:
  """The configuration with the flags that override its fields."""
  changes: dict[str, Any] = {} if slots is None else {"slots": slots}
  for name in ("max_new_tokens", "seed", "implementation"):
    if flags.FLAGS[name].value is not None:
      changes[name] = flags.FLAGS[name].value
  return dataclasses.replace(config, **changes)


def _temperature(default: float) -> float:
  """The one value of --temperatures."""
  temperatures = _numbers("temperatures", float, (default,))
  if len(temperatures) != 1:
    raise ValueError(
      f"--temperatures={','.join(flags.FLAGS.temperatures)}: "
      f"{flags.FLAGS.suite} takes one number"
    )
  return temperatures[0]


def _numbers(
  name: str, kind: Callable[[str], Any], default: Sequence[Any]
) -> Sequence[Any]:
  """A list flag as numbers."""
  texts = flags.FLAGS[name].value
  if texts is None:
    return default
  try:
    values = tuple(kind(text) for text in texts)
  except ValueError:
    values = ()
  if not values or min(values) < 0:
    raise ValueError(
      f"--{name}={','.join(texts)} is not allowed: give numbers of 0 or more, "
      "separated by commas"
    )
  return values


def _load_models(dtype: str) -> tuple[Target, Any, Any]:
  from kdtree_jax.checkpoint import load_drafter, load_target, read_tokenizer_json
  from kdtree_jax.demo import load_demo

  path, drafter_path = flags.FLAGS.target, flags.FLAGS.drafter
  expert_dtype = flags.FLAGS.expert_dtype or "dequantized"
  if path is None and drafter_path is None:
    return load_demo(dtype, expert_dtype)  # type: ignore[arg-type]
  if path is None or drafter_path is None:
    raise ValueError("--target and --drafter need each other: they are a bonded pair")
  from tokenizers import Tokenizer

  text = read_tokenizer_json(path)
  if text is None:
    raise ValueError(f"--target={path} carries no tokenizer")
  return (
    load_target(path, dtype, expert_dtype),  # type: ignore[arg-type]
    load_drafter(drafter_path, dtype),  # type: ignore[arg-type]
    Tokenizer.from_str(text),
  )


def _prompts(target, tokenizer, name: str, default: int | None) -> list[list[int]]:
  from kdtree_jax.bench import prompts

  count = flags.FLAGS.num_prompts or default
  return prompts.held_out(tokenizer, name, target.config.bos_token_id, count)


def _log(line: str) -> None:
  print(f"[{line}]", file=sys.stderr, flush=True)


def _wrote(*paths: Path) -> None:
  print("\nwrote " + ", ".join(map(str, paths)))


def run() -> None:
  """Entry point of the console script."""
  define_flags()
  cli_flags.run(main, sys.argv, _default_experiment)


if __name__ == "__main__":
  run()
