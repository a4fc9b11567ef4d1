"""What `print_environment` prints, and where compiled programs are cached."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform

import pytest

import kdtree_jax
from kdtree_jax import environment
from kdtree_jax.ops import _implementation

OPS = ("accept_tree", "build_tree", "grouped_matmul", "rope", "tree_attention")


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
    assert lines[f"op {op}"] == _implementation.resolve(op, "auto")


def test_what_keeps_an_op_from_cuda_is_printed_once(
  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  def resolve(op: str, implementation: str) -> str:
    if implementation == "cuda" and op in ("rope", "build_tree"):
      raise NotImplementedError(f"'cuda' of {op} is not built")
    return "xla" if op in ("rope", "build_tree") else "cuda"

  monkeypatch.setattr(_implementation, "resolve", resolve)
  lines = printed(capsys)
  assert lines["op rope"] == lines["op build_tree"] == "xla"
  assert lines["op accept_tree"] == "cuda"
  assert lines["not on cuda"] == "build_tree, rope: 'cuda' is not built"


def test_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
  folder = environment.compilation_cache_dir()
  assert folder == pathlib.Path("/somewhere/kdtree_jax/xla")
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/home/someone")
  folder = environment.compilation_cache_dir()
  assert folder == pathlib.Path("/home/someone/.cache/kdtree_jax/xla")
