"""What configurations share: reading from plain values, and context extension."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from kdtree_jax._validation import ConfigError, check, positive


class DictMixin:
  """Reads a configuration from a plain mapping, and writes it back."""

  @classmethod
  def from_dict(cls, data: Mapping[str, Any]) -> Self:
    """Builds the configuration from a mapping of its field names.

    Args:
      data: field names to values; nested configurations as mappings, tuples
        as lists.

    Raises:
      ConfigError: a field without default is missing, or a name is unknown.
    """
    if not isinstance(data, Mapping):
      raise ConfigError(
        f"{cls.__name__} is read from a mapping, not from {type(data).__name__}"
      )
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
      raise ConfigError(
        f"{cls.__name__} has no field {unknown[0]!r}; its fields are {sorted(fields)}"
      )
    missing = [
      name
      for name, f in fields.items()
      if f.default is dataclasses.MISSING
      and f.default_factory is dataclasses.MISSING
      and name not in data
    ]
    if missing:
      raise ConfigError(
        f"{cls.__name__} needs the field {missing[0]!r}, which is missing "
        "(it changes the model's numbers, so there is no default)"
      )
    values = dict(data)
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping):
      values["rope_scaling"] = YarnConfig.from_dict(scaling)
    eos = values.get("eos_token_id", ())
    if isinstance(eos, int) or eos is None:  # Hugging Face writes one id, or null
      values["eos_token_id"] = () if eos is None else (eos,)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return cls(**values)

  def to_dict(self) -> dict[str, Any]:
    """The inverse of `from_dict`: plain values that JSON can hold."""
    return dataclasses.asdict(self)  # type: ignore[call-overload]


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig(DictMixin):
  """YaRN context extension (arXiv 2309.00071), as DeepSeek-V3 uses it.

  Attributes:
    factor: context extension factor.
    original_max_position_embeddings: context length before extension, tokens.
    beta_fast: rotations at and above which a frequency is left as it is.
    beta_slow: rotations at and below which it is divided by `factor`.
    mscale: amplitude numerator; cos and sin are multiplied by
      `yarn(mscale) / yarn(mscale_all_dim)`, 1 for every published model.
    mscale_all_dim: its square, as `0.1 * mscale_all_dim * ln(factor) + 1`,
      multiplies the softmax scale of the target; 0 means no change.
  """

  factor: float
  original_max_position_embeddings: int
  beta_fast: float
  beta_slow: float
  mscale: float
  mscale_all_dim: float

  def __post_init__(self) -> None:
    positive(self, "original_max_position_embeddings")
    check(self.factor >= 1, "rope_scaling.factor", self.factor, "it must be 1 or more")

  def amplitude(self, mscale: float) -> float:
    """`0.1 * mscale * ln(factor) + 1` (modeling_deepseek.py, yarn_get_mscale)."""
    if self.factor <= 1 or mscale == 0:
      return 1.0
    return 0.1 * mscale * math.log(self.factor) + 1.0
