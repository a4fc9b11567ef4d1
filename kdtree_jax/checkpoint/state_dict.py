"""A target or a drafter as one KDTR file: config, weights and tokenizer.

State dicts carry Hugging Face's flat names with linear weights as [out, in].
The config of the file is

  {"kind": "target", "format_version": 1, "dtype": "bfloat16",
   "expert_format": "int4", "model": {...the fields of ModelConfig...}}

or `"kind": "drafter"` without `expert_format`, with the fields of
DrafterConfig. The routed experts of a target take `expert_format`; as int4,
`<name>` holds the nibbles and `<name>_scale` the bfloat16 scales [out, in / 32],
as in Kimi's own files. The router (`mlp.gate.weight` and its correction bias) is
always float32, because rounding it moves tokens to other experts; everything
else takes `dtype`.

Both directions compare names, shapes and dtypes with those that the config
asks for, so a file of another architecture fails with a name, and does not
become a model that is silently wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from kdtree_jax.checkpoint import kdtr
from kdtree_jax.checkpoint.int4 import (
  GROUP_SIZE,
  Int4Tensor,
  check_scales,
  dequantize,
  quantize,
)
from kdtree_jax.checkpoint.kdtr import SCALE_SUFFIX, KdtrError, KdtrFile
from kdtree_jax.checkpoint.kdtr_format import StrPath
from kdtree_jax.checkpoint.size import check_size
from kdtree_jax.checkpoint.tokenizer_files import TOKENIZER_JSON
from kdtree_jax.config import DrafterConfig, ModelConfig
from kdtree_jax.model.rounding import rounded
from kdtree_jax.reference.weights import (
  drafter_weight_shapes,
  is_routed_expert,
  weight_shapes,
)

FORMAT_VERSION = 1

FloatFormat = Literal["bfloat16", "float32"]
ExpertFormat = Literal["int4", "bfloat16", "float32"]
StateDict = dict[str, np.ndarray]

_Config = TypeVar("_Config", ModelConfig, DrafterConfig)
_Tensor = TypeVar("_Tensor")
Plan = dict[str, tuple[str, tuple[int, ...]]]  # name -> KDTR dtype, shape

_CODES = {"int4": "int4", "bfloat16": "bf16", "float32": "f32"}
_NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}


def expected_shapes(config: ModelConfig | DrafterConfig) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor that a model of this config has.

  Args:
    config: of a target (Hugging Face's DeepSeek-V3 names) or of a drafter (the
      flat names of z-lab/dflash).

  Returns:
    Logical shapes; a linear weight is [out, in].
  """
  if isinstance(config, ModelConfig):
    return weight_shapes(config)
  return drafter_weight_shapes(config)


def save_target(
  path: StrPath,
  config: ModelConfig,
  state_dict: Mapping[str, np.ndarray | Int4Tensor],
  *,
  expert_format: ExpertFormat = "int4",
  dtype: FloatFormat = "bfloat16",
  tokenizer_json: str | None = None,
  metadata: Mapping[str, Any] | None = None,
) -> str:
  """Writes a target to one KDTR file, atomically.

  Args:
    path: file to create or replace.
    config: the target's config.
    state_dict: exactly the tensors of `expected_shapes(config)`, of a floating
      point dtype and finite. A routed expert may be an `Int4Tensor` with groups
      of 32, which "int4" stores unchanged.
    expert_format: how routed experts are stored; int4 quantises.
    dtype: how everything but experts and router is stored.
    tokenizer_json: contents of a `tokenizer.json` to travel with the weights.
    metadata: further JSON members of the file's metadata.

  Returns:
    The fingerprint of the stored weights.

  Raises:
    KdtrError: naming a tensor that is missing, unexpected, misshapen, not
      floating point or not finite, or a config that int4 groups do not fit.
    ValueError: a format that does not exist, or a tokenizer that is not JSON.
  """
  header = model_header(config, dtype, expert_format)
  metadata = dict(metadata or {})
  if TOKENIZER_JSON in metadata:
    raise ValueError(f"metadata[{TOKENIZER_JSON!r}] is reserved: use the argument")
  if tokenizer_json is not None:
    try:
      json.loads(tokenizer_json)
    except ValueError as error:
      raise ValueError(f"tokenizer_json is not JSON: {error}") from error
    metadata[TOKENIZER_JSON] = tokenizer_json
  plan = storage_plan(config, dtype, expert_format, path)
  return kdtr.write(path, _convert(config, state_dict, plan, path), header, metadata)


def save_drafter(
  path: StrPath,
  config: DrafterConfig,
  state_dict: Mapping[str, np.ndarray],
  dtype: FloatFormat = "bfloat16",
  *,
  metadata: Mapping[str, Any] | None = None,
) -> str:
  """Writes a drafter to one KDTR file, atomically.

  Args:
    path: file to create or replace.
    config: the drafter's config.
    state_dict: exactly the tensors of `expected_shapes(config)`, of a floating
      point dtype and finite.
    dtype: how they are stored.
    metadata: JSON members of the file's metadata.

  Returns:
    The fingerprint of the stored weights.

  Raises:
    KdtrError: naming a tensor that is missing, unexpected, misshapen, not
      floating point or not finite.
    ValueError: a dtype that does not exist.
  """
  header = model_header(config, dtype)
  plan = storage_plan(config, dtype, dtype, path)
  return kdtr.write(path, _convert(config, state_dict, plan, path), header, metadata)


def read_target(path: StrPath) -> tuple[ModelConfig, StateDict, str]:
  """Reads a file that `save_target` wrote.

  Returns:
    The config; read-only float32 arrays by Hugging Face's names, which hold the
    stored values exactly (int4 dequantised: rounding these to bfloat16 is the
    only rounding); the fingerprint of the stored weights.

  Raises:
    KdtrError: a damaged file, one of another kind, a config with a missing or
      wrong field, or tensors that are not those of the config.
  """
  return _read(path, "target", ModelConfig, _load)


def read_target_as_stored(
  path: StrPath,
) -> tuple[ModelConfig, dict[str, np.ndarray | Int4Tensor], str]:
  """As `read_target`, but everything is a read-only view of the file.

  Arrays are in the dtype in which they are stored, int4 routed experts are Int4Tensors;
  the memory that they take is that of the mapped file.
  """
  return _read(path, "target", ModelConfig, _load_as_stored)


def read_drafter(path: StrPath) -> tuple[DrafterConfig, StateDict, str]:
  """Reads a file that `save_drafter` wrote.

  Returns:
    The config; read-only float32 arrays that hold the stored values exactly; the
    fingerprint of the stored weights.

  Raises:
    KdtrError: as `read_target`.
  """
  return _read(path, "drafter", DrafterConfig, _load)


def read_drafter_as_stored(path: StrPath) -> tuple[DrafterConfig, StateDict, str]:
  """As `read_drafter`, but arrays are read-only views of the file in its dtype."""
  return _read(path, "drafter", DrafterConfig, KdtrFile.read)


def read_kind(path: StrPath) -> Literal["target", "drafter"]:
  """What a KDTR file holds.

  Raises:
    KdtrError: a damaged file, or neither a target nor a drafter.
  """
  with kdtr.open_kdtr(path) as file:
    return _member(file, "kind", ("target", "drafter"))


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
  if value not in allowed:
    raise ValueError(f"{name} = {value!r} is not allowed: one of {allowed}")


def model_header(
  config: ModelConfig | DrafterConfig,
  dtype: FloatFormat,
  expert_format: ExpertFormat | None = None,
) -> dict[str, Any]:
  """The config of a file that holds this model.

  Raises:
    ValueError: a format that does not exist.
  """
  _one_of("dtype", dtype, ("bfloat16", "float32"))
  header: dict[str, Any] = {
    "kind": "drafter",
    "format_version": FORMAT_VERSION,
    "dtype": dtype,
  }
  if isinstance(config, ModelConfig):
    _one_of("expert_format", expert_format, ("int4", "bfloat16", "float32"))
    header |= {"kind": "target", "expert_format": expert_format}
  return header | {"model": config.to_dict()}


def storage_plan(
  config: ModelConfig | DrafterConfig, dtype: str, expert_format: str, path: StrPath
) -> Plan:
  """The tensor table that a model of this config and these formats has.

  Raises:
    KdtrError: int4 groups do not fit the sizes of the config.
  """
  plan: Plan = {}
  for name, shape in expected_shapes(config).items():
    if is_routed_expert(name):
      plan[name] = (_CODES[expert_format], shape)
      if expert_format == "int4":
        if shape[-1] % GROUP_SIZE:
          raise KdtrError(
            path,
            f"tensor {name!r}",
            f"has {shape[-1]} input features; int4 experts need hidden_size and "
            f"moe_intermediate_size to be multiples of {GROUP_SIZE}",
          )
        scales = (*shape[:-1], shape[-1] // GROUP_SIZE)
        plan[f"{name}{SCALE_SUFFIX}"] = ("bf16", scales)
    elif ".mlp.gate." in name:
      plan[name] = ("f32", shape)
    else:
      plan[name] = (_CODES[dtype], shape)
  return plan


def _convert(
  config: ModelConfig | DrafterConfig,
  state_dict: Mapping[str, np.ndarray | Int4Tensor],
  plan: Plan,
  path: StrPath,
) -> dict[str, np.ndarray | Int4Tensor]:
  """The tensors to store, after comparison with the config."""
  shapes = expected_shapes(config)
  _compare_names(state_dict, shapes, path)
  stored: dict[str, np.ndarray | Int4Tensor] = {}
  for name, shape in shapes.items():
    value = state_dict[name]
    if tuple(value.shape) != shape:
      raise KdtrError(
        path,
        f"tensor {name!r}.shape",
        f"is {list(value.shape)}, the config needs {list(shape)}",
      )
    code = plan[name][0]
    try:
      stored[name] = stored_tensor(value, code)
    except ValueError as error:
      raise KdtrError(path, f"tensor {name!r}", str(error)) from error
  return stored


def stored_tensor(value: np.ndarray | Int4Tensor, code: str) -> np.ndarray | Int4Tensor:
  """A weight as a file holds it.

  Args:
    value: floats, or int4 with groups of 32.
    code: KDTR dtype, "int4", "bf16" or "f32".

  Raises:
    ValueError: not floating point, not finite, or what int4 does not hold.
  """
  if isinstance(value, Int4Tensor):
    if code != "int4":
      return dequantize(value).astype(_NUMPY[code], copy=False)
    check_scales(value)
    if value.group_size != GROUP_SIZE:
      raise ValueError(f"has int4 groups of {value.group_size}, not of {GROUP_SIZE}")
    return value
  array = np.asarray(value)
  if array.dtype not in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
    raise ValueError(f"has dtype {array.dtype}; a weight must be floating point")
  if code == "int4":
    return quantize(array.astype(np.float32, copy=False))
  result = rounded(array, _NUMPY[code])
  if not np.isfinite(result).all():
    raise ValueError("holds NaN or infinite values, or overflows its dtype")
  return result


@dataclasses.dataclass(frozen=True)
class StoredModel:
  """A file that holds a target or a drafter, open, its table compared.

  Attributes:
    kind: "target" or "drafter".
    config: of the model.
    dtype: of everything but routed experts and router.
    expert_format: of the routed experts; a drafter's is its dtype.
    file: the open file.
  """

  kind: Literal["target", "drafter"]
  config: ModelConfig | DrafterConfig
  dtype: FloatFormat
  expert_format: ExpertFormat
  file: KdtrFile

  def read(self, name: str) -> np.ndarray | Int4Tensor:
    """A tensor of `expected_shapes(config)` as it is stored."""
    if self.file.info(name).dtype == "int4":
      return _load_int4(self.file, name)
    return self.file.read(name)


def open_model(path: StrPath, kind: str | None = None) -> StoredModel:
  """Opens a file that `save_target` or `save_drafter` wrote.

  Args:
    path: the file.
    kind: "target" or "drafter" where the other is an error.

  Raises:
    KdtrError: a damaged file, one of another kind, a config with a missing or
      wrong field, or tensors that are not those of the config.
  """
  file = kdtr.open_kdtr(path)
  found = _member(file, "kind", ("target", "drafter"))
  if kind not in (None, found):
    raise KdtrError(path, "config.kind", f"the file holds a {found}, not a {kind}")
  version = file.config.get("format_version")
  if version != FORMAT_VERSION:
    raise KdtrError(
      path,
      "config.format_version",
      f"is {version!r}; this version reads {FORMAT_VERSION}",
    )
  dtype = _member(file, "dtype", ("bfloat16", "float32"))
  experts = dtype
  if found == "target":
    experts = _member(file, "expert_format", ("int4", "bfloat16", "float32"))
    config = _read_config(file, ModelConfig)
  else:
    config = _read_config(file, DrafterConfig)
  _compare_table(file, storage_plan(config, dtype, experts, path))
  return StoredModel(found, config, dtype, experts, file)


def _read(
  path: StrPath,
  kind: str,
  config_class: type[_Config],
  load: Callable[[KdtrFile, str], _Tensor],
) -> tuple[_Config, dict[str, _Tensor], str]:
  model = open_model(path, kind)
  assert isinstance(model.config, config_class)
  with model.file as file:
    names = expected_shapes(model.config)
    return model.config, {name: load(file, name) for name in names}, file.fingerprint


def _member(file: KdtrFile, key: str, allowed: tuple[str, ...]) -> Any:
  if key not in file.config:
    raise KdtrError(file.path, f"config.{key}", "is missing")
  value = file.config[key]
  if value not in allowed:
    raise KdtrError(
      file.path, f"config.{key}", f"{value!r} is not one of {list(allowed)}"
    )
  return value


def _read_config(file: KdtrFile, config_class: type[_Config]) -> _Config:
  model = file.config.get("model")
  if not isinstance(model, dict):
    raise KdtrError(file.path, "config.model", "must be a JSON object")
  try:
    config = config_class.from_dict(model)
    check_size(config, len(file.names))
  except (TypeError, ValueError) as error:
    raise KdtrError(file.path, "config.model", str(error)) from error
  return config


def _compare_names(found: Mapping[str, Any], expected: Any, path: StrPath) -> None:
  for name in expected:
    if name not in found:
      raise KdtrError(path, f"tensor {name!r}", "is missing; the config needs it")
  for name in found:
    if name not in expected:
      raise KdtrError(
        path, f"tensor {name!r}", "is unexpected; a model of this config has none"
      )


def _compare_table(file: KdtrFile, plan: Plan) -> None:
  _compare_names(dict.fromkeys(file.names), plan, file.path)
  for name, (code, shape) in plan.items():
    info = file.info(name)
    if info.shape != shape:
      raise KdtrError(
        file.path,
        f"tensor {name!r}.shape",
        f"is {list(info.shape)}, the config needs {list(shape)}",
      )
    if info.dtype != code:
      raise KdtrError(
        file.path, f"tensor {name!r}.dtype", f"is {info.dtype}, the config says {code}"
      )


def _load(file: KdtrFile, name: str) -> np.ndarray:
  """The stored values as read-only float32, exactly."""
  if file.info(name).dtype == "int4":
    array = dequantize(_load_int4(file, name))
  else:
    array = file.read(name).astype(np.float32, copy=False)
  # Views of the file are read-only; copies are made so, lest it depend on dtype.
  array.flags.writeable = False
  return array


def _load_as_stored(file: KdtrFile, name: str) -> np.ndarray | Int4Tensor:
  if file.info(name).dtype == "int4":
    return _load_int4(file, name)
  return file.read(name)


def _load_int4(file: KdtrFile, name: str) -> Int4Tensor:
  tensor = Int4Tensor(file.read_packed(name), file.read(f"{name}{SCALE_SUFFIX}"))
  try:
    check_scales(tensor)
  except ValueError as error:
    raise KdtrError(file.path, f"tensor {name!r}", str(error)) from error
  return tensor
