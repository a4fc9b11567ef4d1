"""Writes the tables of a Markdown page from the JSON of the reports.

A page marks where a table belongs, with the file it comes from:

    <!-- figures: figures/kernels.json -->
    <!-- end of figures -->

`python -m kdtree_jax.bench.markdown docs/kernels.md` fills in what lies between the
two lines. So every figure on the page is one that a command has written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdtree_jax.bench import decode, kernels, slice_exact
from kdtree_jax.bench import slice as slice_suite

_BEGIN = "<!-- figures: "
_BLOCK = re.compile(
  r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL
)
NOT_MEASURED = "Nothing has been measured for this table yet.\n"


def table(report: dict[str, Any]) -> str:
  """A report as a Markdown table, with where it was made.

  Raises:
    ValueError: a suite that has no Markdown form.
  """
  forms = {
    "kernels": kernels.markdown,
    "decode": decode.markdown,
    "slice": slice_suite.markdown,
    "slice_exact": slice_exact.markdown,
  }
  if report["suite"] not in forms:
    raise ValueError(
      f"suite = {report['suite']!r} has no Markdown form; {sorted(forms)} have"
    )
  return forms[report["suite"]](report) + "\n"


def fill(page: Path) -> str:
  """The page's text with its tables as their files have them now.

  Raises:
    ValueError: a file is missing whose table is on the page, a file that is no
      report, or marks that do not fit together.
    OSError: the page cannot be read.
  """

  def block(match: re.Match[str]) -> str:
    begin, name, old, end = match.groups()
    path = page.parent / name
    if _BEGIN in old:
      raise ValueError(f"{page}: the table of {name} has no end")
    if path.is_file():
      text = _table_of(path)
    elif old.strip() in ("", NOT_MEASURED.strip()):
      text = NOT_MEASURED
    else:
      raise ValueError(f"{page}: {path} is missing, and its table would be lost")
    return f"{begin}\n{text}\n{end}"

  old = page.read_text()
  new, count = _BLOCK.subn(block, old)
  if count != old.count(_BEGIN):
    raise ValueError(f"{page}: a table has no end, or names no file")
  return new


def _table_of(path: Path) -> str:
  try:
    return table(json.loads(path.read_text()))
  except KeyError as error:
    raise ValueError(f"{path} is no report: it lacks {error}") from error
  except (ValueError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} is no report: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
  """Fills in the pages that are named on the command line, all of them or none."""
  parser = argparse.ArgumentParser(
    prog="python -m kdtree_jax.bench.markdown",
    description="Fills in the tables of Markdown pages from the JSON of reports.",
  )
  parser.add_argument("page", nargs="+", type=Path, help="Markdown file")
  pages = parser.parse_args(argv).page
  try:
    texts = [fill(page) for page in pages]
    for page, text in zip(pages, texts, strict=True):
      if _BEGIN not in text:
        raise ValueError(f"{page} has no line {_BEGIN}FILE -->")
    for page, text in zip(pages, texts, strict=True):
      page.write_text(text)
  except OSError as error:
    parser.error(f"{error.filename}: {error.strerror}")
  except ValueError as error:
    parser.error(str(error))
  return 0


if __name__ == "__main__":
  sys.exit(main())
