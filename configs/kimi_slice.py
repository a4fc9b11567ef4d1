"""A slice of Kimi K2.6 that one GPU holds: what `kdtree-bench --suite=slice` takes.

The values are in `kdtree_jax/bench/slice_config.py`, so that the suite finds them
wherever it is started.
"""

from __future__ import annotations

from kdtree_jax.bench.slice_config import get_config

__all__ = ["get_config"]
