"""`--config=FILE` with `--config.field=value` overrides, over typed dataclasses."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from kdtree_jax.training.config import Experiment

# What `--config.a.b=value` asks for: {"a": {"b": "value"}}.
Overrides = dict[str, Any]


def load_experiment(path: str | Path) -> Experiment:
  """Runs a configuration file and returns what its `get_config()` gives.

  Raises:
    ValueError: no such file, one that fails, or one that does not return an
      Experiment.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"--config={path}: no such file (see configs/)")
  spec = importlib.util.spec_from_file_location("kdtree_jax_config_file", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"--config={path}: not a Python file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
      raise ValueError("the file defines no get_config()")
    experiment = module.get_config()
  except Exception as error:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    raise ValueError(f"--config={path}: {kind}{error}") from error
  if not isinstance(experiment, Experiment):
    raise ValueError(
      f"--config={path}: get_config() must return an Experiment, "
      f"not {type(experiment).__name__}"
    )
  return experiment


def check_folder(flag: str, folder: Path) -> None:
  """Raises where a flag's folder is none and cannot be made; makes none itself.

  Raises:
    ValueError: names the flag, and the file or folder that is in the way.
  """
  path = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  if not path.is_dir() or not os.access(path, os.W_OK):
    why = "may not be written to" if path.is_dir() else "is a file"
    raise ValueError(
      f"--{flag}={folder} is not allowed: {path} {why}; give a folder, or where one "
      "can be made"
    )


def run(
  main: Callable[[list[str], Experiment | None], int | None],
  argv: list[str],
  default: Callable[[], Experiment | None] = lambda: None,
) -> None:
  """Parses flags and calls `main(positional arguments, experiment)`; exits.

  `default` gives the configuration where no --config is given, once flags are known.
  Errors that name a bad argument end the program with one line and status 2.
  """
  if "config" not in flags.FLAGS:
    flags.DEFINE_string(
      "config",
      None,
      "Configuration file, see configs/; --config.FIELD=VALUE overrides one of its "
      "fields, as in --config.decode.budget=31. 'none' stands for no value.",
    )
  if any(a in ("--help", "-help", "-h") for a in argv[1:]):
    print(_help(main))
    sys.exit(0)
  overrides, rest = _take_overrides(argv)

  def with_config(positional: list[str]) -> int | None:
    # JAX tells at level INFO which accelerators it did not find.
    logging.set_verbosity(logging.WARNING)
    try:
      file = flags.FLAGS.config
      experiment = default() if file is None else load_experiment(file)
      if experiment is not None:
        experiment = override(experiment, overrides)
      elif overrides:
        raise ValueError("--config.field=value needs --config=FILE")
      return main(positional, experiment)
    except (ValueError, OSError, NotImplementedError) as error:
      _print_error(error)
      return 2
    except RuntimeError as error:
      # What the device cannot do (no memory for so many slots, say).
      if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError"):
        raise
      _print_error(error)
      return 2
    except KeyboardInterrupt:
      print("stopped", file=sys.stderr)
      sys.stdout.flush()
      sys.stderr.flush()
      # Without Python's own end, which crashes where a thread of XLA's still compiles.
      os._exit(130)

  app.run(with_config, argv=rest, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
  """absl's parser; an unknown flag or value is one line, not a traceback."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _print_error(error)
    sys.exit(2)


def _help(main: Callable[..., int | None]) -> str:
  """The program's own flags; absl finds none of a console script's."""
  description = (sys.modules[main.__module__].__doc__ or "").strip()
  lines = [description, "", "flags:"]
  by_module = flags.FLAGS.flags_by_module_dict()
  own = [f for m, fs in by_module.items() if not m.startswith("absl") for f in fs]
  for flag in sorted(own, key=lambda f: f.name):
    default = "" if flag.default is None else f" (default: {flag.default})"
    lines.append(f"  --{flag.name}: {' '.join((flag.help or '').split())}{default}")
  return "\n".join([*lines, "", "--helpfull also lists absl's own flags."])


def _print_error(error: Exception) -> None:
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def _take_overrides(argv: list[str]) -> tuple[Overrides, list[str]]:
  """Splits `--config.a.b=value` and `--config.a.b value` off from absl's flags."""
  overrides: Overrides = {}
  rest, arguments = [], iter(argv)
  for argument in arguments:
    name, equals, value = argument.partition("=")
    path = name.removeprefix("-").removeprefix("-")
    if argument == "--":
      rest += [argument, *arguments]
    elif not name.startswith("-") or not path.startswith("config."):
      rest.append(argument)
    else:
      *parents, field = path.split(".")[1:]
      inner = overrides
      for parent in parents:
        if not isinstance(inner.get(parent), dict):
          inner[parent] = {}
        inner = inner[parent]
      inner[field] = value if equals else next(arguments, "")
  return overrides, rest


def override(config: Any, changes: Overrides, path: str = "--config") -> Any:
  """A copy of a dataclass with fields replaced by values given as text.

  Args:
    config: a dataclass whose fields may be dataclasses in turn.
    changes: field to text, or to the changes of a nested dataclass. Tuples are
      comma-separated, "none" stands for None where a field allows it.
    path: of `config`, for messages.

  Raises:
    ValueError: no such field, a text that does not fit its type, or a value that
      the dataclass refuses.
  """
  hints = typing.get_type_hints(type(config))
  values = {}
  for name, change in changes.items():
    where = f"{path}.{name}"
    if name not in hints:
      raise ValueError(f"{where}: no such field; {path} has {', '.join(sorted(hints))}")
    old = getattr(config, name)
    if isinstance(change, str):
      values[name] = _value(hints[name], change, where)
    elif dataclasses.is_dataclass(old):
      values[name] = override(old, change, where)
    else:
      raise ValueError(f"{where}.{next(iter(change))}: {where} is {old!r}")
  return dataclasses.replace(config, **values)


def _value(hint: Any, text: str, where: str) -> Any:
  """Text as a value of a field's type."""
  origin, options = typing.get_origin(hint), typing.get_args(hint)
  if type(None) in options:
    if text.lower() == "none":
      return None
    return _value(next(o for o in options if o is not type(None)), text, where)
  if origin is tuple:
    items = [item.strip(" \"'") for item in text.strip(" ()[]").split(",")]
    return tuple(_value(options[0], item, where) for item in items if item)
  if hint is str or origin is typing.Literal:
    return text
  if hint is bool and text.lower() in ("true", "false"):
    return text.lower() == "true"
  if hint in (int, float):
    try:
      return hint(text)
    except ValueError:
      pass
  kind = "" if dataclasses.is_dataclass(hint) else f" of type {hint.__name__}"
  raise ValueError(f"{where}={text}: not a value{kind}")


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
