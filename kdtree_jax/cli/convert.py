"""`kdtree-convert`: a Hugging Face directory to one KDTR file, and back.

--source=DIRECTORY --out=FILE.kdtr converts; stopped or killed, the same command goes on
where it was. --source=FILE.kdtr --out=DIRECTORY writes a directory that `transformers`
loads.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from absl import flags
from tqdm import tqdm

from kdtree_jax.cli import flags as cli_flags
from kdtree_jax.training.config import Experiment

_STAGES = {"resume": "reading again", "write": "writing", "check": "checking"}
_MOST_NOTES = 5  # of damaged tensors, before they are only counted


def define_flags() -> None:
  """Declares the flags of this program (none exist before `run`)."""
  flags.DEFINE_string("source", None, "Hugging Face directory, or KDTR file.")
  flags.DEFINE_string("out", None, "KDTR file, or directory, to write.")
  flags.DEFINE_enum(
    "expert_format",
    "as_stored",
    ["as_stored", "int4", "bfloat16", "float32"],
    "Routed experts of a target. as_stored: int4 if the source has int4, else --dtype "
    "(to a directory: as in the file).",
  )
  flags.DEFINE_enum(
    "dtype",
    None,
    ["bfloat16", "float32"],
    "Everything but routed experts and router; unset: bfloat16 (to a directory: as in "
    "the file).",
  )
  flags.DEFINE_float(
    "max_shard_gb", 5.0, "To a directory: a larger model is split.", 1e-6
  )
  flags.DEFINE_bool("overwrite", False, "Replace a KDTR file of the name of --out.")
  flags.DEFINE_bool("restart", False, "Discard what an earlier run left of --out.")


def main(positional: list[str], experiment: Experiment | None) -> int:
  """Converts in the direction that --source asks for; returns the exit status."""
  if positional[1:]:
    raise ValueError(f"unexpected argument {positional[1]!r}; is a flag misspelt?")
  if experiment is not None:
    raise ValueError("--config is of no use here")
  for name in ("source", "out"):
    if not flags.FLAGS[name].value:
      raise ValueError(f"--{name} is needed")
  source, out = Path(flags.FLAGS.source), Path(flags.FLAGS.out)
  if not source.exists():
    raise FileNotFoundError(f"--source={source}: no such directory or file")
  bar = _Bar()
  # As Ctrl-C, so that what is unfinished is cleaned up.
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    if source.is_dir():
      return _to_kdtr(source, out, bar)
    return _to_directory(source, out, bar)
  except KeyboardInterrupt:
    goes_on = "; the same command goes on from here" if source.is_dir() else ""
    print(f"stopped{goes_on}", file=sys.stderr)
    return 130
  finally:
    signal.signal(signal.SIGTERM, before)
    bar.close()


def _to_kdtr(source: Path, out: Path, bar: _Bar) -> int:
  from kdtree_jax.checkpoint.hf.convert import convert_hf
  from kdtree_jax.checkpoint.kdtr_resumable import Progress

  damaged = 0

  def show(progress: Progress) -> None:
    nonlocal damaged
    damaged += progress.damaged
    if progress.damaged and damaged <= _MOST_NOTES:
      bar.note(f"damaged in the part, written again: {progress.name}")
    elif progress.stage != "resume" and damaged > _MOST_NOTES:
      bar.note(f"damaged in the part, written again: {damaged - _MOST_NOTES} more")
      damaged = 0
    bar.update(_STAGES[progress.stage], progress.done, progress.total)

  fingerprint = convert_hf(
    source,
    out,
    dtype=flags.FLAGS.dtype or "bfloat16",
    expert_format=flags.FLAGS.expert_format,
    overwrite=flags.FLAGS.overwrite,
    restart=flags.FLAGS.restart,
    progress=show,
  )
  bar.close()
  print(f"{out}: {out.stat().st_size} bytes, every CRC32 checked")
  print(f"fingerprint {fingerprint}")
  return 0


def _to_directory(source: Path, out: Path, bar: _Bar) -> int:
  from kdtree_jax.checkpoint.hf.export import export_hf

  for name in ("overwrite", "restart"):
    if flags.FLAGS[name].value:
      raise ValueError(f"--{name} is for --source=DIRECTORY")
  if out.suffix == ".kdtr":
    raise ValueError(
      f"--out={out} must not end in .kdtr: from a file, a directory is written"
    )
  export_hf(
    source,
    out,
    dtype=flags.FLAGS.dtype or "as_stored",
    expert_format=flags.FLAGS.expert_format,
    max_shard_bytes=int(flags.FLAGS.max_shard_gb * 1e9),
    progress=lambda done, total: bar.update(_STAGES["write"], done, total),
  )
  bar.close()
  print(f"{out}: {', '.join(sorted(p.name for p in out.iterdir()))}")
  return 0


class _Bar:
  """A progress bar of bytes, one per stage; none where stderr is no terminal."""

  def __init__(self) -> None:
    self._bar: tqdm | None = None
    self._stage = ""

  def update(self, stage: str, done: int, total: int) -> None:
    if self._bar is None or stage != self._stage:
      self.close()
      self._stage = stage
      self._bar = tqdm(
        desc=stage,
        total=total,
        unit="B",
        unit_scale=True,
        disable=None,
      )
    self._bar.update(done - self._bar.n)

  def note(self, line: str) -> None:
    tqdm.write(line, file=sys.stderr)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def run() -> None:
  """Entry point of the console script."""
  define_flags()
  cli_flags.run(main, sys.argv)


if __name__ == "__main__":
  run()
