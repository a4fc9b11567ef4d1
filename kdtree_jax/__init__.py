"""Bitwise lossless speculative decoding with draft trees, in JAX.

Public names are resolved at first use (PEP 562), so that importing the package
does nothing: no JAX import, no device query, no flag parsing. The numpy
reference (`kdtree_jax.reference`) can thus be used without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from kdtree_jax import checkpoint, drafter, ops, reference
  from kdtree_jax.checkpoint import CheckpointError, KdtrError, load_checkpoint
  from kdtree_jax.config import (
    ConfigError,
    DecodeConfig,
    DrafterConfig,
    ModelConfig,
    TreeConfig,
    YarnConfig,
  )
  from kdtree_jax.decoding import DecodeResult, decode, stream
  from kdtree_jax.demo import load_demo
  from kdtree_jax.environment import print_environment
  from kdtree_jax.functional import (
    commit,
    draft,
    draft_context,
    forward,
    observe,
    prefill,
    verify,
  )
  from kdtree_jax.tokenizer import Tokenizer, load_tokenizer
  from kdtree_jax.tree import Tree

__version__ = "0.1.0"

__all__ = [
  "CheckpointError",
  "ConfigError",
  "DecodeConfig",
  "DecodeResult",
  "DrafterConfig",
  "KdtrError",
  "ModelConfig",
  "Tokenizer",
  "Tree",
  "TreeConfig",
  "YarnConfig",
  "checkpoint",
  "commit",
  "decode",
  "draft",
  "draft_context",
  "drafter",
  "forward",
  "load_checkpoint",
  "load_demo",
  "load_tokenizer",
  "observe",
  "ops",
  "prefill",
  "print_environment",
  "reference",
  "stream",
  "verify",
]

# Module of each public name. A subpackage is listed under its own name.
_MODULES = {
  "CheckpointError": "kdtree_jax.checkpoint",
  "ConfigError": "kdtree_jax.config",
  "DecodeConfig": "kdtree_jax.config",
  "DecodeResult": "kdtree_jax.decoding",
  "DrafterConfig": "kdtree_jax.config",
  "KdtrError": "kdtree_jax.checkpoint",
  "ModelConfig": "kdtree_jax.config",
  "Tokenizer": "kdtree_jax.tokenizer",
  "Tree": "kdtree_jax.tree",
  "TreeConfig": "kdtree_jax.config",
  "YarnConfig": "kdtree_jax.config",
  "checkpoint": "kdtree_jax.checkpoint",
  "commit": "kdtree_jax.functional",
  "decode": "kdtree_jax.decoding",
  "draft": "kdtree_jax.functional",
  "draft_context": "kdtree_jax.functional",
  "drafter": "kdtree_jax.drafter",
  "forward": "kdtree_jax.functional",
  "load_checkpoint": "kdtree_jax.checkpoint",
  "load_demo": "kdtree_jax.demo",
  "load_tokenizer": "kdtree_jax.tokenizer",
  "observe": "kdtree_jax.functional",
  "ops": "kdtree_jax.ops",
  "prefill": "kdtree_jax.functional",
  "print_environment": "kdtree_jax.environment",
  "reference": "kdtree_jax.reference",
  "stream": "kdtree_jax.decoding",
  "verify": "kdtree_jax.functional",
}


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(_MODULES[name])
  value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
