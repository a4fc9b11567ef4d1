"""`kdtree-train`: corpus, target, the target's own text, drafter."""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags

from kdtree_jax.cli import flags as cli_flags
from kdtree_jax.training.config import Experiment

STAGES = ("corpus", "target", "samples", "drafter", "all")


def define_flags() -> None:
  """Declares the flags of this program (none exist before `run`)."""
  flags.DEFINE_enum("stage", "all", STAGES, "What to run; 'all' runs each in turn.")
  flags.DEFINE_string("workdir", "build/train", "Folder of checkpoints and metrics.")
  flags.DEFINE_string("corpus", "build/corpus", "Folder of the token files.")
  flags.DEFINE_string(
    "tokenizer",
    None,
    "tokenizer.json that travels inside the target's checkpoint; the default is "
    "the one of the corpus folder, else the demo pair's.",
  )


def main(positional: list[str], experiment: Experiment | None) -> None:
  """Runs the chosen stages in order."""
  from kdtree_jax.training import corpus as corpus_stage
  from kdtree_jax.training import pipeline

  if positional[1:]:
    raise ValueError(f"unexpected argument {positional[1]!r}")
  if experiment is None:
    raise ValueError("--config=FILE is needed, for example --config=configs/demo.py")
  stage = flags.FLAGS.stage
  work, corpus = Path(flags.FLAGS.workdir), Path(flags.FLAGS.corpus)
  cli_flags.check_folder("workdir", work)
  cli_flags.check_folder("corpus", corpus)
  work.mkdir(parents=True, exist_ok=True)
  if stage in ("corpus", "all"):
    corpus_stage.build(out=corpus, demo=corpus, work=corpus / "work")
  if stage in ("target", "all"):
    tokenizer = flags.FLAGS.tokenizer or _default_tokenizer(corpus)
    print("wrote", pipeline.train_target(experiment, corpus, work, Path(tokenizer)))
  if stage in ("samples", "all"):
    print("wrote", pipeline.write_samples(experiment, corpus, work))
  if stage in ("drafter", "all"):
    print("wrote", pipeline.train_drafter(experiment, work))


def _default_tokenizer(corpus: Path) -> Path:
  own = corpus / "tokenizer.json"
  if own.exists():
    return own
  return Path(__file__).parent.parent / "demo" / "tokenizer.json"


def run() -> None:
  """Entry point of the console script."""
  define_flags()
  cli_flags.run(main, sys.argv)


if __name__ == "__main__":
  run()
