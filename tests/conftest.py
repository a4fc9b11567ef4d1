"""What every test runs under: compilation cache, hypothesis profile, gpu marker."""

from __future__ import annotations

import functools
import os

import hypothesis
import pytest

from kdtree_jax.environment import compilation_cache_dir

# Read by JAX when it is imported, which tests do after this file; subprocesses
# inherit them. The default threshold of 1 s would leave most programs out.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache_dir()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

# No deadline: the first example of a shape compiles. Derandomised: a failure in CI
# is a failure everywhere.
hypothesis.settings.register_profile(
  "kdtree_jax", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("kdtree_jax")


@functools.cache
def _why_no_gpu() -> str | None:
  import jax  # Here, so that a run without gpu tests does not pay for the backend.

  try:
    jax.devices("gpu")
  except RuntimeError as error:
    return f"needs an NVIDIA GPU that JAX sees: {error}"
  return None


def pytest_runtest_setup(item: pytest.Item) -> None:
  if item.get_closest_marker("gpu") is not None and (reason := _why_no_gpu()):
    pytest.skip(reason)
