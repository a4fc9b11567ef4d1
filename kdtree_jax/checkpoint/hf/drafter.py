"""DFlash drafters as z-lab and NVIDIA publish them.

A directory holds `config.json`, which is a Qwen3 configuration with a `dflash_config`,
and safetensors with the flat names of z-lab/dflash's `dflash/model.py`: 11 tensors per
layer and `fc`, `hidden_norm`, `norm`. Embedding and head are the target's.

Relatives (DFlash2, Domino, DSpark, EAGLE) look alike, load into the same layers and
then propose nonsense, which only the speed shows. So every field is read, or must have
the value that a DFlash drafter has, or is refused; and so is every further tensor.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import logging

from kdtree_jax._validation import is_integer
from kdtree_jax.checkpoint.file_names import CONFIG_FILE
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.fields import Fields
from kdtree_jax.checkpoint.hf.rope import read_rope
from kdtree_jax.checkpoint.hf.safetensors import (
  INDEX_FILE,
  SINGLE_FILE,
  SafetensorsDirectory,
  load_json,
)
from kdtree_jax.checkpoint.kdtr_format import TensorInfo
from kdtree_jax.checkpoint.kdtr_writer import fingerprint
from kdtree_jax.checkpoint.size import check_layers
from kdtree_jax.config import ConfigError, DrafterConfig
from kdtree_jax.reference.weights import drafter_weight_shapes

ARCHITECTURE = "DFlashDraftModel"
Causal = Literal["none", "sliding", "all"]

# Dtypes of weights, and KDTR's names of them.
_CODES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}

# What changes nothing here: how the drafter was trained or saved, and what the target
# decides (start and stop tokens; the embedding and whether the head is tied to it).
_IRRELEVANT = frozenset(
  """
  _name_or_path attention_dropout auto_map bos_token_id dtype eos_token_id
  initializer_range pad_token_id tie_word_embeddings torch_dtype transformers_version
  use_cache
  """.split()
)
# Fields of relatives of DFlash and of variants of its layers, beside `dflash_config` or
# in it, and the values under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "attention_bias": (False,),
  "attention_mode": ("gqa",),
  "final_logit_softcapping": (None,),
  "input_embedding_scale": (1.0, 1),
  "output_multiplier": (1.0, 1),
  "projector_type": ("dflash", None),
  "quantization_config": (None,),
  "sample_from_anchor": (False,),
  "shift_label": (False,),
  "use_confidence_head": (False,),
  "use_qk_norm": (True,),
}
_SIZES = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "max_position_embeddings",
)


def is_drafter(config: Mapping[str, Any]) -> bool:
  """Whether a `config.json` is a drafter's, of DFlash or of a relative.

  Args:
    config: the contents of the file.
  """
  names = config.get("architectures")
  names = names if isinstance(names, list) else []
  return "dflash_config" in config or any(
    isinstance(name, str) and ("draft" in name.lower() or "dflash" in name.lower())
    for name in names
  )


def read_hf_drafter(
  directory: str | os.PathLike[str],
  rope_amplitude: float | None = None,
  causal: Causal | None = None,
) -> tuple[DrafterConfig, HfDrafterWeights, str]:
  """As `open_hf_drafter`, with the fingerprint of the weights, which reads them all."""
  config, weights = open_hf_drafter(directory, rope_amplitude, causal)
  return config, weights, weights.fingerprint()


def open_hf_drafter(
  directory: str | os.PathLike[str],
  rope_amplitude: float | None = None,
  causal: Causal | None = None,
) -> tuple[DrafterConfig, HfDrafterWeights]:
  """Opens a published DFlash drafter; values are read when they are asked for.

  `check_drafter` compares what is returned with a target.

  Args:
    directory: holds `config.json` and safetensors.
    rope_amplitude: factor on cosines and sines in place of the one that Hugging Face's
      code computes from `rope_scaling`, which is 1.0 for all of Kimi's drafters (some
      servers use 1 + 0.1 ln(factor) there).
    causal: `DrafterConfig.causal` in place of what the field `is_causal` says. Where
      the field is missing, sliding layers are taken to see both sides of their window,
      as those of Kimi-K2.6-DFlash do, and a warning says so; z-lab's code then takes
      "sliding".

  Returns:
    The configuration; read-only arrays in the dtype of the file by name.

  Raises:
    FileNotFoundError: no such directory.
    CheckpointError: naming file, field or tensor, and reason: a damaged or missing
      file, a field that is missing, unknown or not supported, a tensor that is missing,
      unexpected, misshapen or not floating point.
  """
  directory = Path(directory)
  if not directory.is_dir():
    raise FileNotFoundError(f"directory = {directory} does not exist")
  path = directory / CONFIG_FILE
  values = load_json(path)
  files = SafetensorsDirectory(directory)
  config = drafter_config(values, path, rope_amplitude, causal, len(files.entries))
  _check_tensors(config, files)
  return config, HfDrafterWeights(files)


class HfDrafterWeights(Mapping[str, np.ndarray]):
  """A drafter's weights: views of the files, made when they are asked for.

  As of `HfWeights`, a thread's read gives back the memory of the pages of its last one.
  """

  def __init__(self, files: SafetensorsDirectory) -> None:
    self._files = files
    self._last = threading.local()

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._files.entries:
      raise KeyError(name)
    last = getattr(self._last, "name", None)
    if last is not None:
      self._files.release(last)
    self._last.name = name
    return self._files.read(name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._files.entries)

  def __len__(self) -> int:
    return len(self._files.entries)

  def __contains__(self, name: object) -> bool:  # Mapping's own reads the value.
    return name in self._files.entries

  def error(self, name: str, reason: str) -> CheckpointError:
    """That something is wrong with a weight's values."""
    return CheckpointError(self._files.entries[name].file, f"tensor {name!r}", reason)

  def fingerprint(self) -> str:
    """That of a KDTR file with the tensors in these dtypes; reads all of them."""
    rows = []
    for name, entry in self._files.entries.items():
      checksum = zlib.crc32(self._files.bytes_of(name))
      self._files.release(name)
      rows.append(
        TensorInfo(
          name=name,
          dtype=_CODES[entry.dtype],
          shape=entry.shape,
          offset=0,
          nbytes=entry.stop - entry.start,
          crc32=checksum,
        )
      )
    return fingerprint(rows)


def drafter_config(
  values: Mapping[str, Any],
  path: str | os.PathLike[str] = CONFIG_FILE,
  rope_amplitude: float | None = None,
  causal: Causal | None = None,
  tensors: int | None = None,
) -> DrafterConfig:
  """The contents of a drafter's `config.json` as ours.

  Args:
    values: the contents.
    path: of the file, for messages.
    rope_amplitude: as in `open_hf_drafter`.
    causal: as there.
    tensors: number of tensors in the files, if known: more layers are refused.

  Raises:
    CheckpointError: a field is missing, unknown, or has a value that is not supported.
  """
  fields = Fields(Path(path), values)
  own = fields.optional("dflash_config")
  if not isinstance(own, dict):
    raise fields.error("dflash_config", "is missing: this is not a DFlash drafter")
  own = fields.inner("dflash_config", own)
  _check_kind(fields, own)
  sizes = {name: _integer(fields, name, fields.required(name)) for name in _SIZES}
  if tensors is not None:
    try:
      check_layers(sizes["num_hidden_layers"], tensors)
    except ConfigError as error:
      raise fields.error("num_hidden_layers", str(error)) from error
  kinds, window = _layers(fields, sizes["num_hidden_layers"])
  said = _causal(fields, own, "sliding_attention" in kinds and causal is None)
  rope = read_rope(fields)
  amplitude = rope_amplitude
  if amplitude is None:
    yarn = rope.yarn
    amplitude = (
      yarn.amplitude(yarn.mscale) / yarn.amplitude(yarn.mscale_all_dim) if yarn else 1.0
    )
  taps = _either(fields, own, "target_layer_ids")
  if not isinstance(taps, list) or not all(map(is_integer, taps)):
    raise own.error(
      "target_layer_ids", f"{taps!r} must be a list of the target's layers"
    )
  more: dict[str, Any] = {
    name: _integer(own, name, _either(fields, own, name))
    for name in ("block_size", "mask_token_id", "num_target_layers")
  }
  own.optional("mask_token")  # The text of mask_token_id.
  draft_vocab = fields.optional("draft_vocab_size")
  if draft_vocab not in (None, sizes["vocab_size"]):
    raise fields.error(
      "draft_vocab_size",
      f"{draft_vocab!r} is not vocab_size = {sizes['vocab_size']}: a vocabulary of the "
      "drafter's own is not supported",
    )
  # z-lab's layout has no such field: there, `fc` reads streams of the drafter's width.
  target_hidden = fields.optional("target_hidden_size", sizes["hidden_size"])
  epsilon = fields.number("rms_norm_eps", fields.required("rms_norm_eps"))
  fields.refuse_others(_IRRELEVANT)
  own.refuse_others(frozenset())
  try:
    return DrafterConfig(
      **sizes,
      **more,
      rms_norm_eps=epsilon,
      rope_theta=rope.theta,
      rope_scaling=rope.yarn,
      rope_amplitude=amplitude,
      rope_angle_dtype="float32",
      target_layer_ids=tuple(taps),
      target_hidden_size=_integer(fields, "target_hidden_size", target_hidden),
      layer_types=kinds,
      sliding_window=window,
      causal=said if causal is None else causal,
    )
  except ConfigError as error:
    raise CheckpointError(path, "configuration", str(error)) from error


def _check_kind(fields: Fields, own: Fields) -> None:
  """A DFlash drafter of Qwen3 layers, and none of its relatives."""
  architectures = fields.required("architectures")
  if architectures != [ARCHITECTURE]:
    raise fields.error(
      "architectures",
      f"{architectures!r} is not supported: a DFlash drafter has {[ARCHITECTURE]!r}",
    )
  fields.required("model_type")
  fields.must_be("model_type", "qwen3")
  fields.required("hidden_act")
  fields.must_be("hidden_act", "silu")
  for name, allowed in _NEUTRAL.items():
    fields.must_be(name, *allowed)
    own.must_be(name, *allowed)


def _causal(fields: Fields, own: Fields, matters: bool) -> Causal:
  """What `is_causal` says of all layers; NVIDIA's exporter calls it `causal`."""
  found = [
    (where, name, where.optional(name))
    for where in (fields, own)
    for name in ("is_causal", "causal")
  ]
  found = [row for row in found if row[2] is not None]
  for where, name, value in found:
    if not isinstance(value, bool) or value != found[0][2]:
      raise where.error(name, f"{value!r} must be true or false, and so everywhere")
  if found:
    return "all" if found[0][2] else "none"
  if matters:
    logging.warning(
      "%s: is_causal is missing: sliding layers are taken to see both sides of their "
      "window, as Kimi's do; causal='sliding' is for those that do not",
      fields.path,
    )
  return "none"


def _integer(fields: Fields, name: str, value: Any) -> int:
  if not is_integer(value):
    raise fields.error(name, f"{value!r} must be an integer")
  return value


def _either(fields: Fields, own: Fields, name: str) -> Any:
  """A field of `dflash_config`, or the one of its name beside it."""
  inner, outer = own.optional(name), fields.optional(name)
  if inner is None and outer is None:
    own.required(name)
  if inner is not None and outer is not None and inner != outer:
    raise own.error(name, f"is {inner!r}, but {outer!r} beside dflash_config")
  return outer if inner is None else inner


def _layers(fields: Fields, count: int) -> tuple[tuple[str, ...], int | None]:
  """The kind of every layer, and the window of those that slide.

  Raises:
    CheckpointError: the fields leave it open, or contradict each other.
  """
  kinds, slides = fields.optional("layer_types"), fields.optional("use_sliding_window")
  first, window = (
    fields.optional("max_window_layers"),
    fields.optional("sliding_window"),
  )
  if kinds is None:
    # Qwen3's configuration then has all layers slide from max_window_layers on.
    if slides is None:
      raise fields.error("layer_types", "is missing, and so is use_sliding_window")
    first = _integer(fields, "max_window_layers", first) if slides else count
    kinds = [
      "sliding_attention" if layer >= first else "full_attention"
      for layer in range(count)
    ]
  if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
    raise fields.error("layer_types", f"{kinds!r} must be a list of names")
  if "sliding_attention" not in kinds:
    return tuple(kinds), None
  if slides is not True:
    raise fields.error(
      "use_sliding_window",
      f"is {slides!r}, but layer_types has sliding layers: it must be true",
    )
  return tuple(kinds), _integer(fields, "sliding_window", window)


def _check_tensors(config: DrafterConfig, tensors: SafetensorsDirectory) -> None:
  shapes = drafter_weight_shapes(config)
  for name, entry in tensors.entries.items():
    if name not in shapes:
      raise CheckpointError(
        entry.file,
        f"tensor {name!r}",
        f"is unexpected: a DFlash drafter of {config.num_hidden_layers} layers has no "
        "such tensor; is this another kind of drafter?",
      )
    if entry.shape != shapes[name]:
      raise CheckpointError(
        entry.file,
        f"tensor {name!r}",
        f"has shape {list(entry.shape)}; {CONFIG_FILE} means {list(shapes[name])}",
      )
    if entry.dtype not in _CODES:
      raise CheckpointError(
        entry.file,
        f"tensor {name!r}",
        f"has dtype {entry.dtype}; a drafter's weights are one of {list(_CODES)}",
      )
  missing = [name for name in shapes if name not in tensors.entries]
  if missing:
    index = tensors.path / INDEX_FILE
    raise CheckpointError(
      index if index.exists() else tensors.path / SINGLE_FILE,
      f"tensor {missing[0]!r}",
      f"is missing ({len(missing)} of {len(shapes)} tensors are)",
    )
