"""Draft trees as arrays: the state that builders write and the decode loop reads."""

from __future__ import annotations

from kdtree_jax.tree.tree import NO_PARENT, ROOT, Tree, ancestors

__all__ = ["NO_PARENT", "ROOT", "Tree", "ancestors"]
