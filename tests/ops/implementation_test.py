from __future__ import annotations

import pytest

from kdtree_jax.ops import _implementation


def test_auto_and_xla_run_the_jax_form():
  assert _implementation.resolve("rope", "auto") == "xla"
  assert _implementation.resolve("rope", "xla") == "xla"


def test_cuda_without_its_library_says_what_runs_instead():
  with pytest.raises(NotImplementedError, match="of rope needs .*'xla' or 'auto'"):
    _implementation.resolve("rope", "cuda")


def test_unknown_names_are_refused_with_the_allowed_ones():
  with pytest.raises(ValueError, match="'triton' of rope .*'auto', 'xla', 'cuda'"):
    _implementation.resolve("rope", "triton")
