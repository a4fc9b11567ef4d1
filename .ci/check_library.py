"""Checks that the installed package has the CUDA library, for both architectures.

Exit status: 0 where it has, 1 where it should have, 3 where it was left out because
there is no nvcc or `KDT_CUDA=OFF` says so.
"""

from __future__ import annotations

import os
import sys

from kdtree_jax.ops import _library

obstacle, path = _library.why_not(), _library.find()
if path is None and (
  "no nvcc was found" in str(obstacle) or os.environ.get("KDT_CUDA") == "OFF"
):
  print(obstacle)
  sys.exit(3)
if path is None or obstacle is not None:
  sys.exit(obstacle)
info = _library.build_info()
print(f"{path}, {path.stat().st_size / 1e6:.1f} MB, {info}")
if info.architectures != ("sm_90a", "sm_120") or info.ptx:
  sys.exit("the library is not for sm_90a and sm_120 alone")
