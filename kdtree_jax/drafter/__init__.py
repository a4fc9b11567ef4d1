"""Drafters: the interface, DFlash, and two that need no training."""

from __future__ import annotations

from kdtree_jax.drafter.base import Drafter, check_drafter
from kdtree_jax.drafter.dflash import DFlash, DFlashState
from kdtree_jax.drafter.ngram import NGram
from kdtree_jax.drafter.scripted import Scripted

__all__ = ["DFlash", "DFlashState", "Drafter", "NGram", "Scripted", "check_drafter"]
