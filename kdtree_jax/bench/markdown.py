"""Writes the tables of a Markdown page from the JSON of the reports.

A page marks where a table belongs, with the file it comes from:

    <!-- figures: figures/kernels.json -->
    <!-- end of figures -->

`python -m kdtree_jax.bench.markdown docs/kernels.md` fills in what lies between the
two lines. So every figure on the page is one that a command has written.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from kdtree_jax.bench import decode, kernels

_BLOCK = re.compile(
  r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
NOT_MEASURED = "Not measured yet.\n"


def table(report: dict[str, Any]) -> str:
  """A report as a Markdown table, with where it was made.

  Raises:
    ValueError: a suite that has no Markdown form.
  """
  forms = {"kernels": kernels.markdown, "decode": decode.markdown}
  if report["suite"] not in forms:
    raise ValueError(
      f"suite = {report['suite']!r} has no Markdown form; {sorted(forms)} have"
    )
  return forms[report["suite"]](report) + "\n"


def fill(page: Path) -> str:
  """The page's text with its tables as their files have them now."""

  def block(match: re.Match[str]) -> str:
    begin, name, end = match.groups()
    path = page.parent / name
    text = table(json.loads(path.read_text())) if path.is_file() else NOT_MEASURED
    return f"{begin}\n{text}\n{end}"

  return _BLOCK.sub(block, page.read_text())


def main() -> None:
  """Fills in the pages that are named on the command line."""
  for name in sys.argv[1:]:
    Path(name).write_text(fill(Path(name)))


if __name__ == "__main__":
  main()
