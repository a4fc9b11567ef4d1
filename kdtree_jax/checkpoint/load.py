"""Checkpoints to models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from kdtree_jax.checkpoint.state_dict import (
  read_drafter,
  read_kind,
  read_target_as_stored,
)
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.model import Target, target_from_state_dict
from kdtree_jax.model.state_dict import ExpertDtype, check_expert_dtype

DTYPES = ("float32", "bfloat16")
Dtype = Literal["float32", "bfloat16"]
StrPath = str | os.PathLike[str]


def load_checkpoint(
  path: StrPath,
  dtype: Dtype = "bfloat16",
  expert_dtype: ExpertDtype = "as_stored",
) -> Target | DFlash:
  """Loads the target or the drafter that a KDTR file holds.

  Args:
    path: a file written by `save_target` or `save_drafter`.
    dtype: of activations and parameters. Stored values, quantised ones too, are
      read exactly under float32 and rounded once under bfloat16.
    expert_dtype: how a target holds its routed experts. "as_stored": int4 if the file
      has them in int4, else as `dtype`. "int4": int4, quantised while loading by the
      rule of `quantize` if the file has floats. "dequantized": as `dtype`, whatever
      the file has; on a CPU, faster than int4 and larger.

  Raises:
    FileNotFoundError: no such file.
    KdtrError: the file is damaged or does not hold a model.
    ValueError: an argument is not one of the allowed values, or int4 does not fit the
      sizes of the model.
  """
  check_expert_dtype(expert_dtype)
  if read_kind(_existing(path)) == "target":
    return load_target(path, dtype, expert_dtype)
  return load_drafter(path, dtype)


def load_target(
  path: StrPath,
  dtype: Dtype = "bfloat16",
  expert_dtype: ExpertDtype = "as_stored",
) -> Target:
  """As `load_checkpoint`, for a file that holds a target."""
  compute_dtype = _dtype(dtype)
  check_expert_dtype(expert_dtype)
  config, weights, fingerprint = read_target_as_stored(_existing(path))
  return target_from_state_dict(
    config,
    weights,
    dtype=compute_dtype,
    fingerprint=fingerprint,
    expert_dtype=expert_dtype,
  )


def load_drafter(path: StrPath, dtype: Dtype = "bfloat16") -> DFlash:
  """As `load_checkpoint`, for a file that holds a drafter."""
  compute_dtype = _dtype(dtype)
  config, weights, _ = read_drafter(_existing(path))
  return DFlash.from_state_dict(config, weights, compute_dtype)


def _dtype(name: str) -> jnp.dtype:
  if name not in DTYPES:
    raise ValueError(f"dtype = {name!r} is not allowed: it must be one of {DTYPES}")
  return jnp.dtype(name)


def _existing(path: StrPath) -> Path:
  path = Path(path)
  if path.is_dir():
    raise ValueError(f"path = {path} is a folder; a KDTR file is expected")
  if not path.exists():
    raise FileNotFoundError(f"path = {path} does not exist")
  return path
