"""Checkpoints: the KDTR container, int4 experts, and whole models in a file."""

from __future__ import annotations

from kdtree_jax.checkpoint.hf.convert import convert_hf
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.export import export_hf
from kdtree_jax.checkpoint.int4 import Int4Tensor, dequantize, quantize
from kdtree_jax.checkpoint.kdtr import (
  KdtrError,
  KdtrFile,
  TensorInfo,
  open_kdtr,
  write,
)
from kdtree_jax.checkpoint.load import load_checkpoint, load_drafter, load_target
from kdtree_jax.checkpoint.state_dict import (
  expected_shapes,
  read_drafter,
  read_kind,
  read_target,
  read_target_as_stored,
  save_drafter,
  save_target,
)
from kdtree_jax.checkpoint.tokenizer_files import (
  read_tokenizer_files,
  read_tokenizer_json,
)

__all__ = [
  "CheckpointError",
  "Int4Tensor",
  "KdtrError",
  "KdtrFile",
  "TensorInfo",
  "convert_hf",
  "dequantize",
  "expected_shapes",
  "export_hf",
  "load_checkpoint",
  "load_drafter",
  "load_target",
  "open_kdtr",
  "quantize",
  "read_drafter",
  "read_kind",
  "read_target",
  "read_target_as_stored",
  "read_tokenizer_files",
  "read_tokenizer_json",
  "save_drafter",
  "save_target",
  "write",
]
