"""Writes golden cases to a KDTR file, for the checker of the CUDA kernels.

  python -m kdtree_jax.checkpoint.golden --out=golden.kdtr

The layout is described in docs/kdtr_check.md.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from kdtree_jax.checkpoint import kdtr_writer
from kdtree_jax.checkpoint.kdtr_format import KdtrError, StrPath
from kdtree_jax.reference.golden import GoldenCase, golden_cases

FORMAT_VERSION = 1


def write_golden(path: StrPath, cases: Sequence[GoldenCase], seed: int) -> str:
  """Writes cases to a KDTR file.

  Args:
    path: file to create or replace.
    cases: what it is to hold; case i's tensors are named `case/<i>/<op>/...`.
    seed: that the cases came from, for the record.

  Returns:
    The fingerprint of the tensors.

  Raises:
    KdtrError: a case holds what the format does not.
    OSError: the folder cannot be written.
  """
  tensors: dict[str, np.ndarray] = {}
  listed = []
  for i, case in enumerate(cases):
    parts = {"in": case.inputs, "out": case.outputs, "bound": case.bounds}
    for part, arrays in parts.items():
      for name, array in arrays.items():
        tensors[f"case/{i}/{case.op}/{part}/{name}"] = array
    listed.append(
      {
        "op": case.op,
        "name": case.name,
        "attributes": dict(case.attributes),
        "compare": {
          name: rule if isinstance(rule, str) else dict(rule)
          for name, rule in case.compare.items()
        },
      }
    )
  config = {
    "kind": "golden",
    "format_version": FORMAT_VERSION,
    "seed": seed,
    "cases": listed,
  }
  return kdtr_writer.write(path, tensors, config)


def main(argv: Sequence[str] | None = None) -> int:
  """The command."""
  parser = argparse.ArgumentParser(
    prog="python -m kdtree_jax.checkpoint.golden",
    description="Writes golden cases of the kernels' ops, for kdtr_check.",
  )
  parser.add_argument("--out", required=True, help="KDTR file to write")
  parser.add_argument(
    "--seed", type=int, default=0, help="of the random inputs, 0 .. 2**63 - 1"
  )
  parser.add_argument(
    "--small",
    action="store_true",
    help="few and small cases, for runs under compute-sanitizer",
  )
  parser.add_argument(
    "--op", action="append", help="only cases of this op; may be repeated"
  )
  flags = parser.parse_args(argv)
  if not 0 <= flags.seed < 2**63:  # The format's integers have 64 bits and a sign.
    parser.error(f"--seed={flags.seed}: must lie in 0 .. {2**63 - 1}")
  if not flags.out or pathlib.Path(flags.out).is_dir():
    parser.error(f"--out={flags.out}: must name a file, not a folder")
  cases = golden_cases(flags.seed, small=flags.small)
  known = sorted({case.op for case in cases})
  for op in flags.op or ():
    if op not in known:
      parser.error(f"--op={op}: no such op; there are {', '.join(known)}")
  if flags.op:
    cases = [case for case in cases if case.op in flags.op]
  try:
    fingerprint = write_golden(flags.out, cases, flags.seed)
  except OSError as error:
    parser.error(f"--out={flags.out}: {error.strerror}")
  except KdtrError as error:
    parser.error(str(error))
  print(f"{flags.out}: {len(cases)} cases, fingerprint {fingerprint}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
