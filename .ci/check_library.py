"""Fails unless the installed package has the CUDA library, for both architectures."""

from __future__ import annotations

import sys

from kdtree_jax.ops import _library

if (obstacle := _library.why_not()) is not None:
  sys.exit(obstacle)
path, info = _library.find(), _library.build_info()
print(f"{path}, {path.stat().st_size / 1e6:.1f} MB, {info}")
if info.architectures != ("sm_90a", "sm_120") or info.ptx:
  sys.exit("the library is not for sm_90a and sm_120 alone")
