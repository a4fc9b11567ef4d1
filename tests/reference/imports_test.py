from __future__ import annotations

import subprocess
import sys

from kdtree_jax import reference

SCRIPT = """
import sys
import kdtree_jax.reference as reference
for name in reference.__all__:
  getattr(reference, name)
loaded = {name.split(".")[0] for name in sys.modules}
print(sorted(loaded & {"jax", "jaxlib", "flax"}))
"""


def test_reference_does_not_import_jax():
  command = [sys.executable, "-c", SCRIPT]
  run = subprocess.run(command, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr
  assert run.stdout.strip() == "[]"


def test_public_names_are_sorted_and_unique():
  assert reference.__all__ == sorted(set(reference.__all__))
