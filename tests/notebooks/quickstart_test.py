"""The notebook runs from top to bottom, and draws its pictures."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def test_quickstart_runs_and_draws():
  notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
  # Outputs are not kept in the repository: what is checked was made just now.
  assert not any(cell.get("outputs") for cell in notebook.cells)
  NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
  outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
  text = "".join(o.get("text", "") for o in outputs)
  assert "identical: " in text
  pictures = [o for o in outputs if "image/png" in o.get("data", {})]
  assert len(pictures) == 3
