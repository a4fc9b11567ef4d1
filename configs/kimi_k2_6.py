"""Kimi K2.6 (the text model) and its published DFlash drafter.

The values are in `kdtree_jax/bench/kimi_k2_6.py`, as `kdtree-bench` needs them where
this folder is not.
"""

from __future__ import annotations

from kdtree_jax.bench.kimi_k2_6 import get_config

__all__ = ["get_config"]
