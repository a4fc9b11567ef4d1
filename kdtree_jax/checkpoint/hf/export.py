"""KDTR files as Hugging Face directories, for others to load and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kdtree_jax.checkpoint.file_names import (
  CONFIG_FILE,
  GENERATION_FILE,
  TOKENIZER,
  TOKENIZER_CONFIG,
)
from kdtree_jax.checkpoint.hf.drafter import read_hf_drafter
from kdtree_jax.checkpoint.hf.export_config import (
  drafter_config,
  generation_config,
  target_config,
)
from kdtree_jax.checkpoint.hf.safetensors import INDEX_FILE, SINGLE_FILE
from kdtree_jax.checkpoint.hf.safetensors_writer import Tensor, write_safetensors
from kdtree_jax.checkpoint.hf.target import read_hf_target
from kdtree_jax.checkpoint.int4 import GROUP_SIZE, Int4Tensor
from kdtree_jax.checkpoint.kdtr_format import StrPath
from kdtree_jax.checkpoint.state_dict import (
  ExpertFormat,
  FloatFormat,
  Plan,
  StoredModel,
  expected_shapes,
  open_model,
  storage_plan,
  stored_tensor,
)
from kdtree_jax.checkpoint.tokenizer_files import read_tokenizer_files
from kdtree_jax.config import ConfigError, DrafterConfig, ModelConfig

MAX_SHARD_BYTES = 5_000_000_000

_DTYPES = {"bf16": "BF16", "f32": "F32"}


def export_hf(
  path: StrPath,
  directory: StrPath,
  *,
  dtype: FloatFormat | Literal["as_stored"] = "as_stored",
  expert_format: ExpertFormat | Literal["as_stored"] = "as_stored",
  max_shard_bytes: int = MAX_SHARD_BYTES,
  progress: Callable[[int, int], None] | None = None,
) -> None:
  """Writes the model of a KDTR file as a Hugging Face directory.

  A target becomes a `DeepseekV3ForCausalLM` (softmax scores: `DeepseekV2ForCausalLM`)
  that `transformers` loads, a drafter has the published layout of DFlash. One tensor is
  in memory at a time. The directory appears under its name when it is complete and has
  been opened as `load_checkpoint` would.

  `transformers` forms RoPE's angles in float32. A model with
  `rope_angle_dtype = "float64"` therefore differs there in the last bits of cosines and
  sines, by more the later the position; read back, it has "float32".

  Args:
    path: a file written by `save_target` or `save_drafter`.
    directory: to create; it must not exist, or be empty.
    dtype: "bfloat16" or "float32", of everything but router (always float32) and
      routed experts; "as_stored" keeps it.
    expert_format: of the routed experts. "int4" is compressed-tensors'
      `pack-quantized`, as Kimi K2.x has them; from int4, "float32" is exact and
      "bfloat16" rounds once.
    max_shard_bytes: a larger model is split into files of at most so many bytes (or
      of one tensor), with an index.
    progress: called with the bytes done and all bytes, after each tensor.

  Raises:
    KdtrError: the file is damaged or holds no model.
    ConfigError: `transformers` would compute something else; names the field.
    ValueError: an argument is not allowed.
    FileExistsError: the directory holds something.
    OSError: it cannot be written.
  """
  if dtype not in ("as_stored", "bfloat16", "float32"):
    raise ValueError(
      f"dtype = {dtype!r} is not allowed: 'as_stored', 'bfloat16' or 'float32'"
    )
  if expert_format not in ("as_stored", "int4", "bfloat16", "float32"):
    raise ValueError(
      f"expert_format = {expert_format!r} is not allowed: 'as_stored', 'int4', "
      "'bfloat16' or 'float32'"
    )
  if max_shard_bytes < 1:
    raise ValueError(f"max_shard_bytes = {max_shard_bytes} must be at least 1")
  model = open_model(path)
  with model.file:
    if model.kind == "drafter" and expert_format != "as_stored":
      raise ValueError(
        f"expert_format = {expert_format!r} is of targets; the file holds a drafter"
      )
    if dtype == "as_stored":
      dtype = model.dtype
    if expert_format == "as_stored":
      expert_format = model.expert_format
    plan = storage_plan(model.config, dtype, expert_format, path)
    documents = _documents(model, dtype, expert_format, path)
    tensors = list(_tensors(model, plan))
    with _new_directory(Path(directory)) as folder:
      _write_weights(folder, tensors, max_shard_bytes, progress)
      for name, text in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
      _check_read_back(folder, model.config)


def _documents(
  model: StoredModel, dtype: str, experts: str, path: StrPath
) -> dict[str, str]:
  """Names and contents of everything but the weights."""
  torch_dtype = "float32" if "float32" in (dtype, experts) else "bfloat16"
  if not isinstance(model.config, ModelConfig):
    return {CONFIG_FILE: _json(drafter_config(model.config, torch_dtype))}
  documents = {
    CONFIG_FILE: _json(target_config(model.config, torch_dtype, experts == "int4")),
    GENERATION_FILE: _json(generation_config(model.config)),
  }
  files = read_tokenizer_files(path)
  if TOKENIZER in files:
    tokenizer = _tokenizer_config(json.loads(files[TOKENIZER]), model.config)
    documents[TOKENIZER_CONFIG] = _json(tokenizer)
  return documents | files


def _tokenizer_config(tokenizer: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Names the class, and start and stop tokens by their text."""
  texts = {t["id"]: t["content"] for t in tokenizer.get("added_tokens", [])}
  tokens = {"bos_token": config.bos_token_id}
  tokens["eos_token"] = config.eos_token_id[0] if config.eos_token_id else None
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": config.max_position_embeddings,
    "clean_up_tokenization_spaces": False,
    # Texts of our models begin with it; transformers 5 leaves the field unread.
    "add_bos_token": tokens["bos_token"] in texts,
    **{name: texts[token] for name, token in tokens.items() if token in texts},
  }


def _tensors(model: StoredModel, plan: Plan) -> Iterator[Tensor]:
  """The tensors of the directory in the order of the forward pass."""
  for name in expected_shapes(model.config):
    code, shape = plan[name]
    read = functools.partial(_read, model, name, code)
    if code != "int4":
      yield Tensor(name, _DTYPES[code], shape, read)
      continue
    out_features, in_features = shape
    packed = (out_features, in_features // 8)
    scales = (out_features, in_features // GROUP_SIZE)
    prefix = name.removesuffix(".weight")
    for part, dtype, part_shape, read in (
      ("weight_packed", "I32", packed, lambda read=read: _words(read())),
      ("weight_scale", "BF16", scales, lambda read=read: read().scales),
      ("weight_shape", "I32", (2,), lambda shape=shape: np.array(shape, np.int32)),
    ):
      yield Tensor(f"{prefix}.{part}", dtype, part_shape, read)


def _read(model: StoredModel, name: str, code: str) -> Any:
  return stored_tensor(model.read(name), code)


def _words(tensor: Int4Tensor) -> np.ndarray:
  """Eight nibbles per word, the lowest first: the file's bytes as they are."""
  return np.ascontiguousarray(tensor.packed).view("<i4")


def _write_weights(
  folder: Path,
  tensors: list[Tensor],
  max_shard_bytes: int,
  progress: Callable[[int, int], None] | None,
) -> None:
  total, done = sum(t.nbytes for t in tensors), 0

  def advance(nbytes: int) -> None:
    nonlocal done
    done += nbytes
    if progress is not None:
      progress(done, total)

  shards = _shards(tensors, max_shard_bytes)
  if len(shards) == 1:
    write_safetensors(folder / SINGLE_FILE, tensors, advance)
    return
  weight_map: dict[str, str] = {}
  for i, shard in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    write_safetensors(folder / file, shard, advance)
    weight_map |= dict.fromkeys((t.name for t in shard), file)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (folder / INDEX_FILE).write_text(_json(index), "utf-8")


def _shards(tensors: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
  """Consecutive tensors of at most so many bytes, or one larger tensor."""
  shards: list[list[Tensor]] = [[]]
  size = 0
  for tensor in tensors:
    if shards[-1] and size + tensor.nbytes > max_bytes:
      shards.append([])
      size = 0
    shards[-1].append(tensor)
    size += tensor.nbytes
  return shards


def _check_read_back(folder: Path, config: ModelConfig | DrafterConfig) -> None:
  """Opens the directory, and compares the config except for what it cannot say."""
  if isinstance(config, ModelConfig):
    found = read_hf_target(folder)[0]
    unsaid = ("rope_angle_dtype", "model_type")
  else:
    found = read_hf_drafter(folder)[0]
    unsaid = ("rope_angle_dtype", "target_fingerprint")
  for field in dataclasses.fields(config):
    ours, theirs = getattr(config, field.name), getattr(found, field.name)
    if ours != theirs and field.name not in unsaid:
      raise ConfigError(
        f"{field.name} = {ours!r} cannot be exported: it would be read as {theirs!r}"
      )


@contextlib.contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
  """A folder beside `directory` that takes its name once the block ends well."""
  if directory.exists() and not directory.is_dir():
    raise FileExistsError(f"directory = {directory} exists and is a file")
  if directory.exists() and any(directory.iterdir()):
    raise FileExistsError(f"directory = {directory} exists and is not empty")
  if directory.name in ("", ".."):
    raise ValueError(f"directory = {directory} must end with a name of its own")
  temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
  try:
    temporary.mkdir(parents=True)
    yield temporary
    if directory.exists():
      directory.rmdir()  # An empty one; Windows does not replace it.
    os.rename(temporary, directory)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise


def _json(document: dict[str, Any]) -> str:
  return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
