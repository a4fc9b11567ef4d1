"""Hugging Face directories to KDTR files, tensor by tensor, resumably."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kdtree_jax.checkpoint.file_names import (
  CONFIG_FILE,
  TOKENIZER,
  TOKENIZER_PARTS,
  VOCABULARIES,
  is_tokenizer_file,
)
from kdtree_jax.checkpoint.hf.drafter import is_drafter, read_hf_drafter
from kdtree_jax.checkpoint.hf.errors import CheckpointError
from kdtree_jax.checkpoint.hf.safetensors import load_json, weight_files
from kdtree_jax.checkpoint.hf.target import HfWeights, read_hf_target
from kdtree_jax.checkpoint.int4 import Int4Tensor
from kdtree_jax.checkpoint.kdtr_format import StrPath
from kdtree_jax.checkpoint.kdtr_resumable import Progress, Row, write_resumable
from kdtree_jax.checkpoint.state_dict import (
  ExpertFormat,
  FloatFormat,
  model_header,
  storage_plan,
  stored_tensor,
)
from kdtree_jax.checkpoint.tokenizer_files import (
  TOKENIZER_FILES,
  TOKENIZER_JSON,
  more_chat_templates,
)
from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.reference.weights import is_routed_expert

# A part that another version of the rules began is not continued.
_RULES = 1


def convert_hf(
  directory: StrPath,
  path: StrPath,
  *,
  dtype: FloatFormat = "bfloat16",
  expert_format: ExpertFormat | Literal["as_stored"] = "as_stored",
  overwrite: bool = False,
  restart: bool = False,
  progress: Callable[[Progress], None] = lambda _: None,
) -> str:
  """Converts a Hugging Face directory to one KDTR file.

  One tensor is in memory at a time. If the process ends early, the same call goes on
  where it was and gives the same bytes, provided that no file of weights has another
  name, size or time of change; what there is of the file is called `<path>.part`, with
  a journal beside it, and gets its name after every tensor has been read back and its
  CRC32 compared.

  Args:
    directory: a target or a DFlash drafter, as `load_checkpoint` takes it.
    path: KDTR file to write.
    dtype: "bfloat16" or "float32", of everything but routed experts and the router
      (always float32). FP8 values are formed in float32, value x scale, and then
      rounded; other floats are rounded once at most.
    expert_format: of a target's routed experts. "as_stored" is int4 if the directory
      has them in int4, as `dtype` if it has floats, and an error if it has both. "int4"
      keeps int4 bit for bit, and quantises floats by the rule of `quantize`.
    overwrite: whether an existing `path` is replaced.
    restart: whether to discard what an earlier call left, rather than go on.
    progress: called after each tensor of each stage.

  Returns:
    The fingerprint of the file.

  Raises:
    FileNotFoundError: no such directory.
    FileExistsError: `path` exists.
    CheckpointError: the directory is damaged, disagrees with itself or is not
      supported; names file, tensor or field, and reason.
    KdtrError: what an earlier call left is of another directory, of files that have
      changed or of other arguments, or the check found damage, which calling again
      repairs.
    ValueError: an argument is not allowed, or a tensor holds what the format does not.
    OSError: a file cannot be written; what has been is kept for a later call.
  """
  path = Path(path)
  if expert_format not in ("as_stored", "int4", "bfloat16", "float32"):
    raise ValueError(
      f"expert_format = {expert_format!r} is not allowed: 'as_stored', 'int4', "
      "'bfloat16' or 'float32'"
    )
  if not Path(directory).is_dir():
    raise FileNotFoundError(f"directory = {directory} does not exist")
  source = _open(Path(directory))
  if path.is_dir():
    raise ValueError(f"path = {path} is a folder; it must name a file")
  if path.exists() and not overwrite:
    raise FileExistsError(
      f"path = {path} exists; overwrite=True (kdtree-convert: --overwrite) replaces it"
    )
  experts = None
  if isinstance(source.config, ModelConfig):
    experts = expert_format
    if experts == "as_stored":
      experts = "int4" if _int4(source) else dtype
  elif expert_format != "as_stored":
    raise ValueError(
      f"expert_format = {expert_format!r} is of targets; the directory holds a drafter"
    )
  header = model_header(source.config, dtype, experts)
  plan = storage_plan(source.config, dtype, experts or dtype, path)
  return write_resumable(
    path,
    [Row(name, code, shape) for name, (code, shape) in plan.items()],
    lambda name: source.read(name, plan[name][0]),
    header,
    {"source_fingerprint": source.fingerprint, **_tokenizer(source)},
    identity={
      "source": source.fingerprint,
      "dtype": dtype,
      "expert_format": experts,
      "rules": _RULES,
      **source.state,
    },
    overwrite=overwrite,
    restart=restart,
    progress=progress,
  )


@dataclasses.dataclass(frozen=True)
class _Source:
  """An open directory.

  Attributes:
    directory: where it is.
    config: of the model.
    weights: by name, read when asked for.
    fingerprint: identifies the model.
    state: of the files of weights, before they were opened.
  """

  directory: Path
  config: ModelConfig | DrafterConfig
  weights: Mapping[str, np.ndarray | Int4Tensor]
  fingerprint: str
  state: Mapping[str, str]

  def read(self, name: str, code: str) -> np.ndarray | Int4Tensor:
    try:
      return stored_tensor(self.weights[name], code)
    except CheckpointError:
      raise
    except ValueError as error:
      raise CheckpointError(self.directory, f"tensor {name!r}", str(error)) from error


def _open(directory: Path) -> _Source:
  drafter = is_drafter(load_json(directory / CONFIG_FILE))
  state = _state_of_files(directory)
  config, weights, fingerprint = (read_hf_drafter if drafter else read_hf_target)(
    directory
  )
  return _Source(directory, config, weights, fingerprint, state)


def _state_of_files(directory: Path) -> dict[str, str]:
  """Size and time of change by file of weights.

  The fingerprint covers only the ends of tensors; a part must not go on with tensors of
  another version of the weights.
  """
  state = {}
  for path in weight_files(directory):
    found = path.stat()
    state[f"weights in {path.name}"] = (
      f"{found.st_size} bytes, changed at {found.st_mtime_ns} ns"
    )
  return state


def _int4(source: _Source) -> bool:
  """Whether routed experts are int4: all of them, or none."""
  assert isinstance(source.weights, HfWeights)
  stored = {
    name: source.weights.describe(name)[1]
    for name in source.weights
    if is_routed_expert(name)
  }
  kinds = set(stored.values())
  if len(kinds) > 1:
    odd = next(name for name, int4 in stored.items() if not int4)
    raise CheckpointError(
      source.directory,
      f"tensor {odd!r}",
      "is of floats, but other routed experts are int4: expert_format='int4', "
      "'bfloat16' or 'float32' makes them all the same",
    )
  return kinds == {True}


def _tokenizer(source: _Source) -> dict[str, Any]:
  """The members of the metadata that hold a target's tokenizer, as text.

  Raises:
    CheckpointError: the tokenizer is damaged, or does not fit the model.
  """
  if not isinstance(source.config, ModelConfig):
    return {}
  names = (*TOKENIZER_PARTS, *more_chat_templates(source.directory))
  found = {name: _text(source.directory / name) for name in names}
  files = {name: text for name, text in found.items() if text is not None}
  if not files.keys() & set(VOCABULARIES):
    return {}
  for name in files:
    if not is_tokenizer_file(name):
      raise CheckpointError(source.directory / name, "name", "has unusual characters")
  from kdtree_jax.tokenizer import load_tokenizer

  load_tokenizer(source.directory)  # Now rather than after the conversion.
  members: dict[str, Any] = {}
  if TOKENIZER in files:
    members[TOKENIZER_JSON] = files.pop(TOKENIZER)
  return members | ({TOKENIZER_FILES: files} if files else {})


def _text(path: Path) -> str | None:
  try:
    return path.read_bytes().decode("utf-8")
  except FileNotFoundError:
    return None
  except UnicodeDecodeError as error:
    raise CheckpointError(path, "text", f"is not UTF-8: {error}") from error
