"""A Hugging Face directory as a target: config, weights, fingerprint.

Everything that can be known without reading values is checked when the directory is
opened: names, shapes, dtypes, and whether they are those of the config. Values are read
tensor by tensor, when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from absl import logging

from kdtree_jax.checkpoint.file_names import CONFIG_FILE
from kdtree_jax.checkpoint.hf import formats
from kdtree_jax.checkpoint.hf.config import HfConfig, read_config
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.safetensors import SafetensorsDirectory
from kdtree_jax.checkpoint.int4 import GROUP_SIZE, Int4Tensor, check_scales, dequantize
from kdtree_jax.checkpoint.size import check_size
from kdtree_jax.config import ConfigError, ModelConfig
from kdtree_jax.reference.weights import is_routed_expert, weight_shapes

StrPath = str | os.PathLike[str]

_VISION = ("vision_tower.", "mm_projector.")
_SAMPLE = 64  # Bytes at either end of a tensor that the fingerprint covers.


def read_hf_target(directory: StrPath) -> tuple[ModelConfig, HfWeights, str]:
  """Opens a directory that holds a DeepSeek-V2/V3 or Kimi K2 model.

  Args:
    directory: `config.json`, safetensors with or without an index, and, if there is
      one, `generation_config.json`, whose stop tokens are added.

  Returns:
    The config; its weights by the names of `expected_shapes`, read when asked for; the
    directory's fingerprint, see `HfWeights.fingerprint`.

  Raises:
    FileNotFoundError: no such directory.
    CheckpointError: files are missing or damaged, hold what this version does not
      support, or disagree with each other. The message names file, tensor or field, and
      reason.
  """
  path = Path(directory)
  if not path.is_dir():
    raise FileNotFoundError(f"directory = {path} does not exist")
  config = read_config(path)
  weights = HfWeights(config, SafetensorsDirectory(path))
  return config.model, weights, weights.fingerprint()


class HfWeights(Mapping[str, "np.ndarray | Int4Tensor"]):
  """A directory's weights under the names of `expected_shapes`.

  `weights[name]` reads from the file each time and keeps nothing: a thread's read gives
  back the memory of the pages of its last one. Floats come as views of the file in
  their stored dtype, FP8 as new float32 arrays, int4 routed experts as Int4Tensors
  (views too), other int4 weights as new float32 arrays.
  """

  def __init__(self, config: HfConfig, files: SafetensorsDirectory) -> None:
    """Compares names, shapes and dtypes with those that the config asks for."""
    self._config = config
    self._files = files
    self._last = threading.local()
    try:
      check_size(config.model, len(files.entries))
    except ConfigError as error:
      raise CheckpointError(files.path / CONFIG_FILE, "config", str(error)) from error
    self._shapes = weight_shapes(config.model)
    self._sources = {
      name: self._source(name, shape) for name, shape in self._shapes.items()
    }
    self._account_for_the_rest()

  def __getitem__(self, name: str) -> np.ndarray | Int4Tensor:
    parts = self._sources[name]
    for part in getattr(self._last, "parts", ()):
      self._files.release(part)
    self._last.parts = parts
    try:
      return self._read(name, parts)
    except CheckpointError:
      raise
    except ValueError as error:
      raise self._error(parts[0], str(error)) from error

  def __iter__(self) -> Iterator[str]:
    return iter(self._sources)

  def __len__(self) -> int:
    return len(self._sources)

  def __contains__(self, name: object) -> bool:  # Mapping's own reads the value.
    return name in self._sources

  def describe(self, name: str) -> tuple[tuple[int, ...], bool]:
    """A weight's shape, and whether it is an Int4Tensor; reads nothing."""
    return self._shapes[name], self._is_int4(name) and is_routed_expert(name)

  def error(self, name: str, reason: str) -> CheckpointError:
    """That something is wrong with a weight's values."""
    return self._error(self._sources[name][0], reason)

  def fingerprint(self) -> str:
    """Identifies the model: SHA-256 in hex.

    It covers the config, and of each weight (scales of quantised ones included) name,
    dtype, shape, and the first and last 64 bytes. So it does not depend on how tensors
    are spread over files, and two trainings differ in it; but it is no checksum: a
    change in the middle of a tensor goes unnoticed.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(self._config.model.to_dict(), sort_keys=True).encode())
    for name in sorted(self._sources):
      for part in self._sources[name]:
        entry = self._files.entries[part]
        digest.update(f"\n{part} {entry.dtype} {list(entry.shape)} ".encode())
        contents = self._files.bytes_of(part)
        digest.update(contents[:_SAMPLE])
        digest.update(contents[max(0, len(contents) - _SAMPLE) :])
    return digest.hexdigest()

  def _source(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The tensors that make up a weight, checked."""
    full = self._config.prefix + name
    stem = full.removesuffix(".weight")
    packed = f"{stem}.weight_packed"
    if full in self._files.entries:
      if packed in self._files.entries:
        raise self._error(packed, f"is a duplicate: {full!r} is the same weight")
      self._check_scheme(name, full, None)
      return self._float_source(name, full, shape)
    if packed not in self._files.entries:
      raise CheckpointError(
        self._files.path, f"tensor {full!r}", "is missing; the config needs it"
      )
    self._check_scheme(name, packed, "int4")
    if shape[-1] % GROUP_SIZE:
      raise self._error(
        packed, f"has {shape[-1]} input features, which {GROUP_SIZE} does not divide"
      )
    self._check(packed, ("I32",), (shape[0], shape[1] // 8))
    scales = self._partner(packed, f"{stem}.weight_scale")
    self._check(scales, ("BF16",), (shape[0], shape[1] // GROUP_SIZE))
    sizes = self._partner(packed, f"{stem}.weight_shape")
    self._check(sizes, ("I32", "I64"), (2,))
    if tuple(self._files.read(sizes).tolist()) != shape:
      raise self._error(
        sizes,
        f"says {self._files.read(sizes).tolist()}; the config needs {list(shape)}",
      )
    return packed, scales, sizes

  def _float_source(
    self, name: str, full: str, shape: tuple[int, ...]
  ) -> tuple[str, ...]:
    scales = f"{full}_scale_inv"
    if self._files.entries[full].dtype != "F8_E4M3":
      self._check(full, formats.FLOATS, shape)
      if scales in self._files.entries:
        raise self._error(scales, f"is unexpected: {full!r} is not FP8")
      return (full,)
    if self._config.quantization is None or self._config.quantization.scheme != "fp8":
      raise self._error(full, "is FP8, which the quantization_config does not say")
    if len(shape) != 2:
      raise self._error(full, "is FP8, which only linear weights may be")
    self._check(full, ("F8_E4M3",), shape)
    self._check(
      self._partner(full, scales),
      (*formats.FLOATS, "F8_E8M0"),
      formats.fp8_scales_shape(shape),
    )
    return full, scales

  def _check_scheme(self, name: str, stored: str, found: str | None) -> None:
    """Int4 is where the quantization_config says so, and nowhere else."""
    quantization = self._config.quantization
    module = name.removesuffix(".weight")
    said = None
    if (
      quantization is not None
      and quantization.scheme == "int4"
      and _is_linear(name)
      and not quantization.ignores(module, self._config.prefix + module)
    ):
      said = "int4"
    if said != found:
      raise self._error(
        stored,
        f"is {'packed int4' if found else 'not packed'}, but the quantization_config "
        f"makes it {'packed int4' if said else 'a plain tensor'}",
      )

  def _partner(self, tensor: str, name: str) -> str:
    if name not in self._files.entries:
      raise self._error(tensor, f"{name!r}, which belongs to it, is missing")
    return name

  def _check(self, full: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    entry = self._files.entries[full]
    if entry.shape != shape:
      raise self._error(
        full, f"has shape {list(entry.shape)}; the config needs {list(shape)}"
      )
    if entry.dtype not in dtypes:
      raise self._error(
        full, f"has dtype {entry.dtype}, which is not one of {', '.join(dtypes)}"
      )

  def _account_for_the_rest(self) -> None:
    """Tensors that are no part of the weights are skipped for a reason, or refused."""
    used = {part for parts in self._sources.values() for part in parts}
    skipped: dict[str, int] = {}
    for name in self._files.entries:
      if name in used:
        continue
      reason = self._reason_to_skip(name)
      if reason is None:
        raise self._error(name, "is unexpected; a model of this config has none")
      skipped[reason] = skipped.get(reason, 0) + 1
    for reason, count in skipped.items():
      logging.warning("%s: skipped %d tensors: %s", self._files.path, count, reason)

  def _reason_to_skip(self, name: str) -> str | None:
    config, model = self._config, self._config.model
    if config.prefix and name.startswith(_VISION):
      return "the vision tower and its projector (only the text model is loaded)"
    if not name.startswith(config.prefix):
      return None
    name = name.removeprefix(config.prefix)
    if re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name):
      return "frequencies of RoPE (they follow from the config)"
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    first = model.num_hidden_layers
    if layer and first <= int(layer[1]) < first + config.mtp_layers:
      return "layers for multi-token prediction, which are no part of the model"
    if name == "lm_head.weight" and model.tie_word_embeddings:
      self._check_tied(config.prefix + name)
      return "the head, which is the embedding again"
    return None

  def _check_tied(self, name: str) -> None:
    """A head beside tied embeddings must be the embedding."""
    embedding = f"{self._config.prefix}model.embed_tokens.weight"
    ours, theirs = self._files.entries[name], self._files.entries[embedding]
    same = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    if not same or self._files.bytes_of(name) != self._files.bytes_of(embedding):
      raise self._error(
        name, f"differs from {embedding!r}, but tie_word_embeddings is true"
      )

  def _is_int4(self, name: str) -> bool:
    return self._sources[name][0].endswith("_packed")

  def _read(self, name: str, parts: tuple[str, ...]) -> np.ndarray | Int4Tensor:
    first = self._files.read(parts[0])
    if len(parts) == 1:
      return first
    scales = self._files.read(parts[1])
    if not self._is_int4(name):
      return formats.dequantize_fp8(first, scales)
    tensor = formats.int4_from_words(first, scales)
    check_scales(tensor)
    return tensor if is_routed_expert(name) else dequantize(tensor)

  def _error(self, name: str, reason: str) -> CheckpointError:
    return CheckpointError(self._files.entries[name].file, f"tensor {name!r}", reason)


def _is_linear(name: str) -> bool:
  """Whether the published code has a linear layer for it; the router is none."""
  return name.endswith("_proj.weight") or name.endswith(
    ("kv_a_proj_with_mqa.weight", "lm_head.weight")
  )
