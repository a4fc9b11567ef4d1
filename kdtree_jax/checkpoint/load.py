"""Checkpoints to models."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from kdtree_jax.checkpoint.file_names import CONFIG_FILE
from kdtree_jax.checkpoint.state_dict import (
  read_drafter_as_stored,
  read_kind,
  read_target_as_stored,
)
from kdtree_jax.drafter.dflash import DFlash
from kdtree_jax.model import Target, target_from_state_dict
from kdtree_jax.model.placement import Placement
from kdtree_jax.model.state_dict import ExpertDtype, check_expert_dtype

DTYPES = ("float32", "bfloat16")
Dtype = Literal["float32", "bfloat16"]
StrPath = str | os.PathLike[str]


def load_checkpoint(
  path: StrPath,
  dtype: Dtype = "bfloat16",
  expert_dtype: ExpertDtype = "as_stored",
  sharding: Placement = None,
) -> Target | DFlash:
  """Loads the target or the drafter that a KDTR file or a directory holds.

  A directory's weights are read tensor by tensor as the parameters are built, so that
  the host holds no more than one of them besides the result.

  Args:
    path: a file written by `save_target` or `save_drafter`, or a directory as Hugging
      Face publishes them: DeepSeek-V3 and R1, DeepSeek-V2-Lite, Moonlight, Kimi K2 to
      K2.6, or a DFlash drafter.
    dtype: of activations and parameters. Stored floats of at most 32 bits, and int4,
      are read exactly under float32 and rounded once under bfloat16; float64 is
      rounded once. FP8 is value x scale, rounded to float32 as torch does, and then
      again under bfloat16.
    expert_dtype: how a target holds its routed experts. "as_stored": int4 if the file
      has them in int4, else as `dtype`. "int4": int4, quantised while loading by the
      rule of `quantize` if the file has floats. "dequantized": as `dtype`, whatever
      the file has; on a CPU, faster than int4 and larger.
    sharding: where parameters go: a `jax.sharding.Sharding` for all of them; a function
      of a parameter's name ("layers.3.mlp.experts.down", ...) and its shape that
      returns one; or None for JAX's default device.

  Raises:
    FileNotFoundError: no such file or directory.
    KdtrError: the file is damaged or does not hold a model.
    CheckpointError: the same of a directory; it names file, tensor or field, reason.
    ValueError: an argument is not one of the allowed values, int4 does not fit the
      sizes of the model, or a weight of a KDTR file is too large for `dtype`.
  """
  check_expert_dtype(expert_dtype)
  if _kind(_existing(path)) == "target":
    return load_target(path, dtype, expert_dtype, sharding)
  return load_drafter(path, dtype, sharding)


def load_target(
  path: StrPath,
  dtype: Dtype = "bfloat16",
  expert_dtype: ExpertDtype = "as_stored",
  sharding: Placement = None,
) -> Target:
  """As `load_checkpoint`, for a file or a directory that holds a target."""
  compute_dtype = _dtype(dtype)
  check_expert_dtype(expert_dtype)
  if _existing(path).is_dir():
    from kdtree_jax.checkpoint.hf.target import read_hf_target

    config, weights, fingerprint = read_hf_target(path)
  else:
    config, weights, fingerprint = read_target_as_stored(path)
  return target_from_state_dict(
    config,
    weights,
    dtype=compute_dtype,
    fingerprint=fingerprint,
    expert_dtype=expert_dtype,
    sharding=sharding,
    finite=True,
  )


def load_drafter(
  path: StrPath,
  dtype: Dtype = "bfloat16",
  sharding: Placement = None,
  rope_amplitude: float | None = None,
  causal: Literal["none", "sliding", "all"] | None = None,
) -> DFlash:
  """As `load_checkpoint`, for a file or a directory that holds a drafter.

  Args:
    path: as in `load_checkpoint`.
    dtype: as there.
    sharding: as there.
    rope_amplitude: replaces `DrafterConfig.rope_amplitude`, over whose value servers
      disagree where a drafter has YaRN; the one that accepts more tokens is right.
    causal: replaces `DrafterConfig.causal`, which the files of drafters with sliding
      layers often leave open.
  """
  compute_dtype = _dtype(dtype)
  if _existing(path).is_dir():
    from kdtree_jax.checkpoint.hf.drafter import open_hf_drafter

    config, weights = open_hf_drafter(path, rope_amplitude, causal)
  else:
    config, weights, _ = read_drafter_as_stored(path)
    given = {"rope_amplitude": rope_amplitude, "causal": causal}
    given = {name: value for name, value in given.items() if value is not None}
    config = dataclasses.replace(config, **given)
  return DFlash.from_state_dict(config, weights, compute_dtype, sharding, finite=True)


def _kind(path: Path) -> Literal["target", "drafter"]:
  if not path.is_dir():
    return read_kind(path)
  from kdtree_jax.checkpoint.hf.drafter import is_drafter
  from kdtree_jax.checkpoint.hf.safetensors import load_json

  return "drafter" if is_drafter(load_json(path / CONFIG_FILE)) else "target"


def _dtype(name: str) -> jnp.dtype:
  if name not in DTYPES:
    raise ValueError(f"dtype = {name!r} is not allowed: it must be one of {DTYPES}")
  return jnp.dtype(name)


def _existing(path: StrPath) -> Path:
  path = Path(path)
  if not path.exists():
    raise FileNotFoundError(f"path = {path} does not exist")
  return path
