"""The target model: modules, latent cache, and parameter names."""

from __future__ import annotations

from kdtree_jax.model.cache import LatentCache
from kdtree_jax.model.state_dict import target_from_state_dict, target_to_state_dict
from kdtree_jax.model.target import Target

__all__ = ["LatentCache", "Target", "target_from_state_dict", "target_to_state_dict"]
