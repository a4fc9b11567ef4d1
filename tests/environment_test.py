"""What `print_environment` prints, and where compiled programs are cached."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform

import pytest

import kdtree_jax
from kdtree_jax import environment
from kdtree_jax.ops import _implementation, _library
from tests.ops.custom_calls import need_library

OPS = _implementation.CUDA_OPS | {"grouped_matmul"}


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
  kdtree_jax.print_environment()
  lines = capsys.readouterr().out.splitlines()
  return {line[:26].strip(): line[27:] for line in lines}


def test_versions_devices_and_flags(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  import jax

  devices = jax.devices()  # First, so that the backend never sees the flag below.
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  lines = printed(capsys)
  assert lines["kdtree_jax"] == kdtree_jax.__version__
  assert lines["python"].startswith(platform.python_version())
  for package in ("jax", "jaxlib", "flax", "numpy"):
    assert lines[package] == importlib.metadata.version(package)
  for device in devices:
    assert lines[f"device {device.id}"].startswith(device.platform)
  assert lines["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
  assert lines["JAX_PLATFORMS"] == "(not set)"


def test_each_op_is_listed_with_its_active_form(
  capsys: pytest.CaptureFixture[str],
) -> None:
  lines = printed(capsys)
  for op in OPS:
    assert lines[f"op {op}"] == _implementation.active(op)[0]
  assert "op emit" in lines


def test_why_an_op_does_not_run_on_cuda_is_printed_once_per_reason(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  forms = {"rope": ("xla", "no nvcc"), "build_tree": ("xla", "no nvcc")}
  forms["tree_attention"] = ("none", "no code for sm_70")
  monkeypatch.setattr(
    _implementation, "active", lambda op: forms.get(op, ("cuda", None))
  )
  lines = printed(capsys)
  assert lines["op rope"] == lines["op build_tree"] == "xla"
  assert lines["op accept_tree"] == "cuda"
  assert lines["op tree_attention"] == "none"
  assert lines["why xla"] == "build_tree, rope: no nvcc"
  assert lines["why none"] == "tree_attention: no code for sm_70"
  assert "why cuda" not in lines


def test_the_library_says_where_it_is_and_what_it_is_for(
  capsys: pytest.CaptureFixture[str],
) -> None:
  need_library()
  info = _library.build_info()
  lines = printed(capsys)
  assert lines["cuda library"] == str(_library.find())
  assert all(name in lines["cuda library is for"] for name in info.architectures)
  assert f"nvcc {info.cuda}" in lines["cuda library is for"]
  major, minor = info.ffi_api
  assert lines["cuda library's FFI API"].startswith(f"{major}.{minor} (headers")


def test_a_missing_library_is_no_error(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
  monkeypatch.setattr(kdtree_jax, "__path__", [str(tmp_path)])
  _library.build_info.cache_clear()
  lines = printed(capsys)
  assert lines["cuda library"] == "(not built)"
  assert "cuda library is for" not in lines


def test_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
  folder = environment.compilation_cache_dir()
  assert folder == pathlib.Path("/somewhere/kdtree_jax/xla")
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/home/someone")
  folder = environment.compilation_cache_dir()
  assert folder == pathlib.Path("/home/someone/.cache/kdtree_jax/xla")
