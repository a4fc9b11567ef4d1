"""Checkpoints as Hugging Face publishes them: a directory of safetensors."""

from __future__ import annotations

from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.safetensors import SafetensorsDirectory
from kdtree_jax.checkpoint.hf.target import HfWeights, read_hf_target

__all__ = ["CheckpointError", "HfWeights", "SafetensorsDirectory", "read_hf_target"]
