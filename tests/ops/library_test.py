"""The loader: which library it takes, and what it says about one that does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

import kdtree_jax
from kdtree_jax import ops
from kdtree_jax.ops import _implementation, _library
from tests.ops.custom_calls import need_library

REAL_LIBRARY = _library.find()
SOURCES = pathlib.Path(__file__).parents[2] / "custom_calls"
FITTING = _library.BuildInfo(
  version=kdtree_jax.__version__,
  interface=_library.INTERFACE,
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
  assert "not built: this installation was made with KDT_CUDA=OFF" in _library.why_not()
  (folders[0] / "not_built.txt").write_text("nvcc is too old\n")
  assert _library.why_not().endswith("not built: nvcc is too old")


def test_a_file_that_is_no_library_is_named(folders):
  (folders[0] / _library.LIBRARY).write_bytes(b"no such thing")
  assert re.search(
    r"site-packages/_lib/.* cannot be loaded: .*reinstall kdtree_jax",
    _library.why_not(),
  )


def test_a_library_that_is_cut_short_is_refused_before_it_is_loaded(folders):
  """The loader maps what is not there, and the process ends at the first touch."""
  if REAL_LIBRARY is None:
    pytest.skip("the library of CUDA custom calls was not built")
  whole = REAL_LIBRARY.read_bytes()
  for size in (64, 1000, len(whole) // 2, len(whole) - 1):
    (folders[0] / _library.LIBRARY).write_bytes(whole[:size])
    why = _library.why_not()
    assert f"is cut short: its {size} bytes" in why and "reinstall" in why


def test_a_library_of_something_else_is_named_with_what_it_lacks(folders):
  other = pathlib.Path(ml_dtypes.__file__).parent.glob("*.so")
  shutil.copy(next(other), folders[0] / _library.LIBRARY)
  obstacle = _library.why_not()
  assert "lacks kdtree_jax_build_info: it was built from other sources" in obstacle
  assert "pip install --force-reinstall" in obstacle


def test_a_missing_handler_is_named(monkeypatch: pytest.MonkeyPatch):
  need_library()
  monkeypatch.setitem(_library.TARGETS, "kdtree_jax.new", "KdtreeNew")
  assert "lacks KdtreeNew: " in _library.why_not.__wrapped__()


@pytest.fixture
def pretend(folders, monkeypatch):
  """Takes a library that says a given text of itself, and has no handlers."""

  def take(text: str | bytes) -> None:
    told = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(
      _library,
      "_open",
      lambda: types.SimpleNamespace(_name="some.so", kdtree_jax_build_info=Told(told)),
    )

  return take


@dataclasses.dataclass
class Told:
  """A function of ctypes, as far as the loader uses it."""

  text: bytes
  restype: object = None

  def __call__(self) -> bytes:
    return self.text


def fields(**changes) -> str:
  told = dataclasses.asdict(FITTING) | changes
  return json.dumps({name: value for name, value in told.items() if value is not None})


@pytest.mark.parametrize(
  ("text", "words"),
  [
    (
      fields(version="0.0.1"),
      f"belongs to kdtree_jax 0.0.1, but this is {kdtree_jax.__version__};",
    ),
    # Another version may tell of other things.
    (fields(version="0.0.1", ptx=None, interface=None, more=[1]), "kdtree_jax 0.0.1,"),
    (fields(interface=None), f"its interface is None, not {_library.INTERFACE}"),
    (
      fields(interface=_library.INTERFACE + 1),
      f"its interface is {_library.INTERFACE + 1}, not {_library.INTERFACE}",
    ),
    (fields(more=1), "unexpected keyword argument 'more'"),
    (fields(jaxlib=None), "missing 1 required positional argument: 'jaxlib'"),
    (fields(ptx=None), "its build information has 'ptx'"),
    (fields(ptx=3), "its build information has 'int' object is not iterable"),
    (fields(version=None), "its build information is b'{"),
    ("{", "its build information is b'{'"),
    ("[]", "its build information is b'[]'"),
    (b"\xff", "its build information is b'\\xff'"),
  ],
)
def test_a_library_of_other_sources_is_refused(pretend, capsys, text, words):
  pretend(text)
  obstacle = _library.why_not()
  assert words in obstacle and obstacle.endswith(_library.REINSTALL)
  with pytest.raises(_library.UnusableError, match="pip install"):
    _library.build_info()
  # And nothing else is disturbed by it.
  values = jnp.array([[[1.0, 3.0, 2.0]]])
  assert ops.best_token(values).tolist() == [[1]]
  with pytest.raises(NotImplementedError, match="pip install"):
    ops.best_token(values, implementation="cuda")
  kdtree_jax.print_environment()
  assert words in capsys.readouterr().out


def test_what_a_library_says_is_read(pretend):
  pretend(fields())
  assert _library.build_info() == FITTING
  assert "some.so lacks Kdtree" in _library.why_not()


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


def test_the_installed_library_is_of_these_sources():
  need_library()
  info = _library.build_info()
  assert info.version == kdtree_jax.__version__
  assert info.interface == _library.INTERFACE
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
