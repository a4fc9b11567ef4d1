"""The loader: which library it takes, and what it says about one that does not fit."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil

import jax
import ml_dtypes
import pytest

import kdtree_jax
from kdtree_jax.ops import _implementation, _library

SOURCES = pathlib.Path(__file__).parents[2] / "custom_calls"
FITTING = _library.BuildInfo(
  version=kdtree_jax.__version__,
  cuda="13.0.88",
  architectures=("sm_90a", "sm_120"),
  ptx=(),
  jaxlib="0.10.2",
  ffi_api=(0, 3),
  dynamic_shared_memory={},
)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
  """Two folders of the package, as in an editable installation, without a library."""
  both = [tmp_path / "site-packages", tmp_path / "source"]
  for folder in both:
    (folder / "_lib").mkdir(parents=True)
  monkeypatch.setattr(kdtree_jax, "__path__", [str(folder) for folder in both])
  # The real library may have been loaded before, and is to be there afterwards.
  monkeypatch.setattr(_library, "why_not", _library.why_not.__wrapped__)
  monkeypatch.setattr(_library, "build_info", _library.build_info.__wrapped__)
  return [folder / "_lib" for folder in both]


def test_of_two_libraries_the_one_built_last_is_taken(folders):
  paths = [folder / _library.LIBRARY for folder in folders]
  assert _library.find() is None
  for path in paths:
    path.touch()
  for newer, older in (paths, paths[::-1]):
    os.utime(newer, (2, 2))
    os.utime(older, (1, 1))
    assert _library.find() == newer
  paths[1].unlink()
  assert _library.find() == paths[0]


def test_what_kept_the_library_from_being_built_is_told(folders):
  assert "not built: this installation left it out; reinstall" in _library.why_not()
  (folders[0] / "not_built.txt").write_text("nvcc is too old\n")
  assert _library.why_not().endswith("not built: nvcc is too old")


def test_a_file_that_is_no_library_is_named(folders):
  (folders[0] / _library.LIBRARY).write_bytes(b"no such thing")
  assert re.search(r"site-packages/_lib/.* cannot be loaded: ", _library.why_not())


def test_a_library_of_something_else_is_named_with_what_it_lacks(folders):
  other = pathlib.Path(ml_dtypes.__file__).parent.glob("*.so")
  shutil.copy(next(other), folders[0] / _library.LIBRARY)
  obstacle = _library.why_not()
  assert "lacks kdtree_jax_build_info: it was built from other sources" in obstacle
  assert "pip install --force-reinstall" in obstacle


def test_a_missing_handler_is_named(monkeypatch: pytest.MonkeyPatch):
  if _library.why_not() is not None:
    pytest.skip(_library.why_not())
  monkeypatch.setitem(_library.TARGETS, "kdtree_jax.new", "KdtreeNew")
  assert "lacks KdtreeNew: " in _library.why_not.__wrapped__()


def test_a_library_of_another_version_is_refused_with_both_versions():
  with pytest.raises(_library.UnusableError) as error:
    _library._check(dataclasses.replace(FITTING, version="0.0.1"))
  assert f"kdtree_jax 0.0.1, but this is {kdtree_jax.__version__};" in str(error.value)


@pytest.mark.parametrize(
  ("library", "here", "fits"),
  [
    ((0, 3), (0, 3), True),
    ((0, 3), (0, 5), True),
    ((0, 3), None, True),
    ((0, 4), (0, 3), False),
    ((0, 3), (1, 0), False),
    ((1, 0), (0, 9), False),
  ],
)
def test_a_newer_ffi_is_refused_with_both_versions(monkeypatch, library, here, fits):
  monkeypatch.setattr(_library, "ffi_api", lambda: here)
  info = dataclasses.replace(FITTING, ffi_api=library, jaxlib="0.77")
  if fits:
    return _library._check(info)
  with pytest.raises(_library.UnusableError) as error:
    _library._check(info)
  for part in (
    "jaxlib 0.77 (FFI API {}.{})".format(*library),
    "API {}.{};".format(*here),
  ):
    assert part in str(error.value)


def test_the_ffi_version_is_read_from_the_headers(monkeypatch, tmp_path):
  assert _library.ffi_api() >= (0, 3)
  monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
  assert _library.ffi_api() is None
  header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
  header.parent.mkdir(parents=True)
  header.write_text("#define XLA_FFI_API_MAJOR 2\n\n#define XLA_FFI_API_MINOR 17\n")
  assert _library.ffi_api() == (2, 17)
  header.write_text("#define XLA_FFI_API_MAJOR 2\n")
  assert _library.ffi_api() is None


def test_the_installed_library_is_of_this_version():
  try:
    info = _library.build_info()
  except _library.UnusableError as error:
    pytest.skip(str(error))
  assert info.version == kdtree_jax.__version__
  assert info.ffi_api <= _library.ffi_api()
  assert _library.why_not() is None


def test_every_handler_is_registered_and_may_be_captured():
  defined = {}
  for source in SOURCES.glob("*_ffi.cc"):
    text = source.read_text()
    for part in text.split("XLA_FFI_DEFINE_HANDLER_SYMBOL(")[1:]:
      definition = part.split(";")[0]
      defined[definition.split(",")[0]] = "kCmdBufferCompatible" in definition
  assert set(defined) == set(_library.TARGETS.values())
  assert all(defined.values())


def test_targets_lie_in_the_project_s_namespace():
  assert all(target.startswith("kdtree_jax.") for target in _library.TARGETS)
  assert len(set(_library.TARGETS.values())) == len(_library.TARGETS)


@pytest.mark.gpu
def test_this_gpu_has_code_and_auto_takes_it():
  device = jax.devices("gpu")[0]
  assert re.fullmatch(r"\d+\.\d", device.compute_capability)
  assert _library.why_not() is None
  assert _library.why_not_on(device) is None
  with jax.default_device(device):
    assert _implementation.active("accept_tree") == ("cuda", None)
