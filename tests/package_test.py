"""The package's front: nothing happens at import, and names resolve lazily."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

import kdtree_jax

HEAVY = ("jax", "jaxlib", "flax", "numpy", "matplotlib", "absl")


def loaded_after(statement: str) -> set[str]:
  """Names of the top-level modules in `sys.modules` after a statement ran."""
  program = f"{statement}\nimport sys\nprint(*{{m.split('.')[0] for m in sys.modules}})"
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  return set(done.stdout.split())


def test_import_does_nothing() -> None:
  loaded = loaded_after("import kdtree_jax; dir(kdtree_jax)")
  assert "kdtree_jax" in loaded
  assert loaded.isdisjoint(HEAVY)


def test_configurations_need_no_jax() -> None:
  loaded = loaded_after("import kdtree_jax; kdtree_jax.ModelConfig")
  assert loaded.isdisjoint(HEAVY)


def test_reference_needs_no_jax() -> None:
  loaded = loaded_after(
    "import importlib, pkgutil, kdtree_jax.reference as package\n"
    "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
    "  importlib.import_module(module.name)"
  )
  assert "numpy" in loaded
  assert loaded.isdisjoint({"jax", "jaxlib", "flax"})


@pytest.mark.parametrize("name", kdtree_jax.__all__)
def test_name_resolves(name: str) -> None:
  module = kdtree_jax._MODULES[name]
  value = getattr(kdtree_jax, name)
  if module == f"kdtree_jax.{name}":
    assert value is sys.modules[module]
  else:
    assert value is getattr(sys.modules[module], name)


def test_all_lists_exactly_the_lazy_names() -> None:
  assert list(kdtree_jax._MODULES) == kdtree_jax.__all__ == sorted(kdtree_jax.__all__)


def test_dir_lists_public_names_before_they_are_used() -> None:
  program = "import kdtree_jax; print(*dir(kdtree_jax))"
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert {*kdtree_jax.__all__, "__version__"} <= set(done.stdout.split())


def test_unknown_name_is_an_attribute_error() -> None:
  with pytest.raises(AttributeError, match="'kdtree_jax' has no attribute 'deocde'"):
    kdtree_jax.deocde  # noqa: B018
  assert not hasattr(kdtree_jax, "deocde")


def test_public_name_does_not_hide_a_submodule() -> None:
  """Importing a submodule rebinds its name, so it may not be a function's name."""
  for name, module in kdtree_jax._MODULES.items():
    if module != f"kdtree_jax.{name}":
      assert importlib.util.find_spec(f"kdtree_jax.{name}") is None


def test_version_is_the_installed_one() -> None:
  try:
    installed = importlib.metadata.version("kdtree_jax")
  except importlib.metadata.PackageNotFoundError:
    pytest.skip("kdtree_jax runs from the source tree, not installed")
  assert installed == kdtree_jax.__version__
