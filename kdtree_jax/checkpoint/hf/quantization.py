"""The `quantization_config` of a `config.json`: which scheme weights are stored in."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from kdtree_jax.checkpoint.hf.fields import Fields
from kdtree_jax.checkpoint.int4 import GROUP_SIZE

BLOCK = 128  # Rows and columns that share a scale in FP8.

_PATTERN = "re:"
_MOST_WAYS = 2**26  # In which an expression may match a name: seconds, at the worst.
_NAME_LENGTH = 64  # Of a module, about.


@dataclasses.dataclass(frozen=True)
class Quantization:
  """How linear weights are stored.

  Attributes:
    scheme: "fp8" (e4m3 with a scale for each 128x128 block) or "int4"
      (compressed-tensors' `pack-quantized`, symmetric, a scale for each 32 input
      features).
    ignore: modules that are not quantised: names, or "re:" and a regular expression.
  """

  scheme: Literal["fp8", "int4"]
  ignore: tuple[str, ...]

  def ignores(self, *modules: str) -> bool:
    """Whether a module, under one of its names, is not quantised."""
    for rule in self.ignore:
      for module in modules:
        if rule.startswith(_PATTERN):
          if re.match(rule.removeprefix(_PATTERN), module):
            return True
        elif module == rule:
          return True
    return False


def read_quantization(fields: Fields, values: Any) -> Quantization:
  """Reads `quantization_config`.

  Raises:
    CheckpointError: a scheme that is not supported; the message names the field.
  """
  name = "quantization_config"
  if not isinstance(values, dict):
    raise fields.error(name, f"{values!r} must be an object")
  inner = fields.inner(name, values)
  method = inner.required("quant_method")
  if method == "fp8":
    return _fp8(inner)
  if method == "compressed-tensors":
    return _compressed_tensors(inner)
  raise inner.error(
    "quant_method", f"{method!r} is not supported: 'fp8' and 'compressed-tensors' are"
  )


def _fp8(inner: Fields) -> Quantization:
  inner.must_be("fmt", "e4m3")
  inner.must_be("activation_scheme", "dynamic")
  # How activations would be rounded; here they are not. Stored scales are floats.
  inner.optional("scale_fmt")
  inner.optional("dequantize")
  block = inner.required("weight_block_size")
  if block != [BLOCK, BLOCK]:
    raise inner.error(
      "weight_block_size", f"{block!r} is not supported: {[BLOCK, BLOCK]} is"
    )
  ignore = _names(inner, "modules_to_not_convert")
  inner.refuse_others(frozenset())
  return Quantization("fp8", ignore)


def _compressed_tensors(inner: Fields) -> Quantization:
  form = inner.required("format")
  if form != "pack-quantized":
    raise inner.error("format", f"{form!r} is not supported: 'pack-quantized' is")
  inner.must_be("quantization_status", "compressed")
  for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
    if inner.optional(name):
      raise inner.error(
        name, f"{inner.optional(name)!r} is not supported: it must be null"
      )
  groups = inner.required("config_groups")
  if not isinstance(groups, dict) or len(groups) != 1:
    raise inner.error("config_groups", "must be an object with one group")
  ((group_name, group),) = groups.items()
  if not isinstance(group, dict):
    raise inner.error(f"config_groups.{group_name}", "must be an object")
  _check_group(inner.inner("config_groups", {}).inner(group_name, group))
  ignore = _names(inner, "ignore")
  inner.refuse_others(frozenset({"global_compression_ratio", "version"}))
  return Quantization("int4", ignore)


def _check_group(group: Fields) -> None:
  for name in ("input_activations", "output_activations"):
    if group.optional(name) is not None:
      raise group.error(name, "is not supported: it must be null")
  targets = group.required("targets")
  if targets != ["Linear"]:
    raise group.error("targets", f"{targets!r} are not supported: ['Linear'] is")
  if group.optional("format") not in (None, "pack-quantized"):
    raise group.error("format", f"{group.optional('format')!r} is not supported")
  values = group.required("weights")
  if not isinstance(values, dict):
    raise group.error("weights", "must be an object")
  weights = group.inner("weights", values)
  for name, wanted in (
    ("num_bits", 4),
    ("type", "int"),
    ("strategy", "group"),
    ("group_size", GROUP_SIZE),
    ("symmetric", True),
  ):
    weights.required(name)
    weights.must_be(name, wanted)
  weights.must_be("dynamic", False)
  for name in ("actorder", "block_structure"):
    if weights.optional(name) is not None:
      raise weights.error(name, f"{weights.optional(name)!r} is not supported")
  # How scales were found, and in which dtypes scales and zero points are.
  weights.refuse_others(
    frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
  )
  group.refuse_others(frozenset())


def _names(inner: Fields, name: str) -> tuple[str, ...]:
  names = inner.optional(name)
  if names is None:
    return ()
  if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
    raise inner.error(name, "must be a list of names")
  for rule in names:
    if rule.startswith(_PATTERN):
      reason = _why_not(rule.removeprefix(_PATTERN))
      if reason is not None:
        raise inner.error(name, f"{rule!r} {reason}")
  return tuple(names)


def _why_not(pattern: str) -> str | None:
  """What is wrong with a regular expression; a hostile one would match for years."""
  try:
    re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as error:
    return f"is not a regular expression: {error}"
  plain = re.sub(r"\\.|\[[^\]]*\]", "x", pattern, flags=re.DOTALL)
  if re.search(r"\)[*+?{]|\(\?[a-zA-Z-]", plain):
    return "is not supported: it repeats a group, or has flags"
  repeats, groups = len(re.findall(r"[*+{]", plain)), plain.count("(") + 1
  ways = _NAME_LENGTH**repeats * (plain.count("|") / groups + 1) ** groups
  return "is not supported: it is too complicated" if ways > _MOST_WAYS else None
