"""`--config=FILE` with `--config.field=value` overrides, over typed dataclasses."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from kdtree_jax.training.config import Experiment

_PREFIX = "--config="


def load_experiment(path: str | Path) -> Experiment:
  """Runs a configuration file and returns what its `get_config()` gives.

  Raises:
    ValueError: no such file, or it does not return an Experiment.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"--config={path}: no such file (see configs/)")
  spec = importlib.util.spec_from_file_location("kdtree_jax_config_file", path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ValueError(f"--config={path}: the file defines no get_config()")
  experiment = module.get_config()
  if not isinstance(experiment, Experiment):
    raise ValueError(
      f"--config={path}: get_config() must return an Experiment, "
      f"not {type(experiment).__name__}"
    )
  return experiment


def run(
  main: Callable[[list[str], Experiment | None], int | None], argv: list[str]
) -> None:
  """Parses flags and calls `main(positional arguments, experiment)`; exits.

  The configuration file is read before absl parses, because its fields become
  flags. Errors that name a bad argument end the program with one line and
  status 2.
  """
  files = [a.removeprefix(_PREFIX) for a in argv if a.startswith(_PREFIX)]
  rest = [a for a in argv if not a.startswith(_PREFIX)]
  try:
    base = load_experiment(files[-1]) if files else None
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  holder = None
  if base is not None:
    holder = config_flags.DEFINE_config_dict(
      "config", _to_config_dict(base), sys_argv=rest
    )
  elif any(a.startswith("--config.") for a in rest):
    print("error: --config.field=value needs --config=FILE", file=sys.stderr)
    sys.exit(2)

  def with_config(positional: list[str]) -> int | None:
    try:
      experiment = base
      if base is not None and holder is not None:
        experiment = _from_config_dict(base, holder.value)
      return main(positional, experiment)
    except (ValueError, OSError) as error:
      print(f"error: {error}", file=sys.stderr)
      return 2

  app.run(with_config, argv=rest, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
  """absl's parser; an unknown flag or value is one line, not a traceback."""
  try:
    return flags.FLAGS(argv)
  except (flags.Error, KeyError, AttributeError, TypeError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def _to_config_dict(config: Any) -> ConfigDict:
  values = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    values[field.name] = _to_config_dict(value) if _nested(value) else value
  return ConfigDict(values, type_safe=False)


def _from_config_dict(base: Any, values: Any) -> Any:
  """`base` with the fields that were overridden; validates again."""
  changes = {}
  for field in dataclasses.fields(base):
    old, new = getattr(base, field.name), values[field.name]
    if _nested(old):
      changes[field.name] = _from_config_dict(old, new)
    elif new != old:
      changes[field.name] = tuple(new) if isinstance(old, tuple) else new
  return dataclasses.replace(base, **changes)


def _nested(value: Any) -> bool:
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def enable_compilation_cache() -> None:
  """Keeps compiled programs on disk, so that a second start does not compile.

  The folder is `$JAX_COMPILATION_CACHE_DIR`, else the one that
  `kdtree_jax.environment.compilation_cache_dir` names.
  """
  import jax

  from kdtree_jax.environment import compilation_cache_dir

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(compilation_cache_dir()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
