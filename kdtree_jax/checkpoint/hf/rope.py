"""RoPE's values of a `config.json`, in either spelling.

Published files have `rope_theta` and `rope_scaling`; transformers 5 writes both into
`rope_parameters`. The kind of scaling is called `type`, `rope_type` or both.
"""

from __future__ import annotations

import dataclasses

from kdtree_jax._validation import is_integer
from kdtree_jax.checkpoint.hf.fields import Fields
from kdtree_jax.config import YarnConfig


@dataclasses.dataclass(frozen=True)
class RopeValues:
  """Base and scaling of the frequencies.

  Attributes:
    theta: base.
    yarn: YaRN values, or None for plain RoPE.
    new: whether transformers 5 wrote them.
  """

  theta: float
  yarn: YarnConfig | None
  new: bool


def read_rope(fields: Fields) -> RopeValues:
  """Reads and marks as read all fields about RoPE but `rope_interleave`.

  Raises:
    CheckpointError: a value is missing, not supported, or given twice differently.
  """
  scaling, parameters = (
    fields.optional("rope_scaling"),
    fields.optional("rope_parameters"),
  )
  if scaling is not None and parameters is not None:
    raise fields.error(
      "rope_parameters", "stands beside rope_scaling; only one of the two may"
    )
  new = parameters is not None
  name = "rope_parameters" if new else "rope_scaling"
  values = parameters if new else scaling
  if values is None:  # Moonlight: no scaling.
    theta = fields.number("rope_theta", fields.required("rope_theta"))
    return RopeValues(theta, None, False)
  if not isinstance(values, dict):
    raise fields.error(name, f"{values!r} must be an object")
  inner = fields.inner(name, values)
  outer_theta = fields.optional("rope_theta")
  theta = inner.optional("rope_theta", outer_theta)
  if theta is None:
    theta = (inner if new else fields).required("rope_theta")
  if outer_theta not in (None, theta):
    raise inner.error("rope_theta", f"is {theta!r}, but {outer_theta!r} outside")
  yarn = _yarn(inner) if _kind(inner) == "yarn" else None
  inner.must_be("partial_rotary_factor", 1.0, 1)
  inner.refuse_others(frozenset())
  return RopeValues(fields.number("rope_theta", theta), yarn, new)


def _kind(inner: Fields) -> str:
  kinds = [inner.optional(name) for name in ("rope_type", "type")]
  kinds = [kind for kind in kinds if kind is not None]
  if not kinds:
    inner.required("rope_type")
  if kinds[0] not in ("default", "yarn") or kinds[-1] != kinds[0]:
    raise inner.error(
      "rope_type",
      f"{kinds[0]!r} is not supported: 'default' and 'yarn' are"
      if kinds[-1] == kinds[0]
      else f"is {kinds[0]!r}, but type is {kinds[-1]!r}",
    )
  return kinds[0]


def _yarn(inner: Fields) -> YarnConfig:
  names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
  values = {name: inner.number(name, inner.required(name)) for name in names}
  for name, value in values.items():
    # transformers takes a zero for a missing value, in all but mscale_all_dim.
    zero = value == 0 and name != "mscale_all_dim"
    if zero or value < (1 if name == "factor" else 0):
      raise inner.error(name, f"{value!r} is not supported")
  if values["mscale_all_dim"] == 0 and values["mscale"] != 1:
    raise inner.error(
      "mscale",
      f"{values['mscale']!r} is not supported where mscale_all_dim is 0: the published "
      "code applies it and transformers does not",
    )
  context = inner.required("original_max_position_embeddings")
  if not is_integer(context) or context < 1:
    raise inner.error(
      "original_max_position_embeddings", f"{context!r} is not a positive integer"
    )
  yarn = YarnConfig(original_max_position_embeddings=context, **values)
  amplitude = yarn.amplitude(yarn.mscale) / yarn.amplitude(yarn.mscale_all_dim)
  factor = inner.optional("attention_factor")
  if factor not in (None, amplitude):
    raise inner.error(
      "attention_factor",
      f"{factor!r} is not supported: mscale and mscale_all_dim make it {amplitude}",
    )
  inner.must_be("truncate", True)
  return yarn
