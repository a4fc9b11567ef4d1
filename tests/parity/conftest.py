"""What the tests against torch need: both packages, no network, one thread.

They compare with the `transformers` package and with plain torch, which the library
itself never imports: `pip install "kdtree_jax[parity]"` has them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

# Read by these packages when they are imported, which tests do after this file.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

PACKAGES = ("torch", "transformers", "safetensors")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

if not MISSING:
  import torch

  torch.set_num_threads(1)  # Tiny models, and a second process may run beside.


class _SkippedModule(pytest.Module):
  """A test file that cannot be imported here."""

  def collect(self) -> Iterable[pytest.Item]:
    pytest.skip(f"needs {', '.join(MISSING)}: pip install 'kdtree_jax[parity]'")


def pytest_pycollect_makemodule(
  module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
  """Skips the files of this folder where a package is missing, and says so."""
  if not MISSING:
    return None
  return _SkippedModule.from_parent(parent, path=module_path)
