"""What every report has in common: where it was made, tables, JSON files."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Log = Callable[[str], None]


def silent(line: str) -> None:
  """A log that keeps nothing."""
  del line


def compile_log(log: Log) -> Callable[[str, float], None]:
  """An `on_compile` callback that logs what took how long."""
  return lambda name, seconds: log(f"compiled {name}: {seconds:.1f} s")


def environment() -> dict[str, Any]:
  """Device, versions, date and command of this process."""
  import jax

  import kdtree_jax

  devices = jax.devices()
  packages = ("jax", "jaxlib", "flax", "numpy")
  return {
    "device": f"{len(devices)} x {devices[0].platform}: {devices[0].device_kind}",
    "host": f"{_processor()}, {os.cpu_count()} cores, {_system()}",
    "versions": {
      "kdtree_jax": kdtree_jax.__version__,
      "python": platform.python_version(),
      **{package: importlib.metadata.version(package) for package in packages},
    },
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "command": _command(),
  }


def _system() -> str:
  """The operating system; of its kernel's release only what is not its builder's."""
  return f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}"


def _command() -> str:
  program = Path(sys.argv[0]).name
  if program == "bench.py":  # python -m kdtree_jax.cli.bench
    program = "kdtree-bench"
  return shlex.join([program, *sys.argv[1:]])


def _processor() -> str:
  """The processor's name; Linux keeps it where `platform` does not look."""
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
      for line in lines:
        if line.startswith("model name"):
          return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


def heading(report: Mapping[str, Any]) -> str:
  """The lines above a report's tables."""
  where = report["environment"]
  versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
  lines = [
    f"suite     {report['suite']}",
    f"command   {where['command']}",
    f"date      {where['date']}",
    f"device    {where['device']}",
    f"host      {where['host']}",
    f"versions  {versions}",
  ]
  if where["xla_flags"]:
    lines.append(f"XLA_FLAGS {where['xla_flags']}")
  lines += [f"{key:<9} {value}" for key, value in report["settings"].items()]
  return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """Right-aligned columns; floats with the digits that `cell` gives them."""
  text = [list(columns), *([cell(value) for value in row] for row in rows)]
  widths = [max(len(row[c]) for row in text) for c in range(len(columns))]
  return "\n".join(
    "  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True))
    for row in text
  )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
  """Lines of a Markdown table."""
  text = [columns, ["---"] * len(columns), *([cell(v) for v in row] for row in rows)]
  return [f"| {' | '.join(line)} |" for line in text]


def markdown_origin(report: Mapping[str, Any]) -> list[str]:
  """Lines of a Markdown list: command, date, device, versions."""
  where = report["environment"]
  versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
  lines = [f"- command: `{where['command']}`", f"- date: {where['date']}"]
  lines += [f"- device: {where['device']}", f"- versions: {versions}"]
  if where["xla_flags"]:
    lines.append(f"- `XLA_FLAGS={where['xla_flags']}`")
  return lines


def cell(value: Any) -> str:
  """A value as a table shows it; "-" stands for None and NaN."""
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return "-"
  return f"{value:.3f}" if isinstance(value, float) else str(value)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
  """Writes a report; NaN becomes null, which every JSON reader knows."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
  """The same values in types that JSON has."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [plain(v) for v in value]
  if isinstance(value, np.ndarray | np.generic):
    return plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
