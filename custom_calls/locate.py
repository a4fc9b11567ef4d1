"""Tells CMake where things lie for the Python that runs this file.

Prints two lines: version and folder of jaxlib's headers, `VERSION;FOLDER`, and the
folder of the CUDA toolkit that `jax[cuda13]` installs; a line is empty where there
is no such thing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import sysconfig


def jaxlib() -> str:
  """Version and header folder of the jaxlib that this Python imports."""
  spec = importlib.util.find_spec("jaxlib")  # Located only: importing takes a second.
  if spec is None or spec.origin is None:
    return ""
  return (
    f"{importlib.metadata.version('jaxlib')};{pathlib.Path(spec.origin).parent}/include"
  )


def toolkit() -> str:
  """Folder of pip's CUDA toolkit: bin/nvcc, include, lib, nvvm."""
  # An isolated build hides the environment that the package will be installed into,
  # but that is where the toolkit is.
  folders = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
  if environment := os.environ.get("VIRTUAL_ENV"):
    folders.append(sysconfig.get_path("purelib", vars={"base": environment}))
  for folder in folders:
    prefix = pathlib.Path(folder, "nvidia", "cu13")
    if (prefix / "bin" / "nvcc").is_file():
      return str(prefix)
  return ""


if __name__ == "__main__":
  print(jaxlib())
  print(toolkit())
