"""What a golden case is: an op's inputs, its outputs, and how to compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

# "bits": the same bytes. "bound": within `bounds`, element by element. {"ulp": n} or
# {"max_abs": x}: one limit for all elements.
Rule = Literal["bits", "bound"] | Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class GoldenCase:
  """One call of an op, and what it must return.

  Attributes:
    op: name of the op.
    name: what is special about the case.
    attributes: the op's static arguments.
    inputs: arrays by argument name, batched as the op takes them.
    outputs: arrays by result name; an input of the same name is updated in place.
    compare: a rule for each output.
    bounds: f32 arrays for the outputs under "bound", of the output's shape.
  """

  op: str
  name: str
  attributes: Mapping[str, int | float | bool]
  inputs: Mapping[str, np.ndarray]
  outputs: Mapping[str, np.ndarray]
  compare: Mapping[str, Rule]
  bounds: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def bits(outputs: Mapping[str, np.ndarray]) -> dict[str, Rule]:
  """The rule "bits" for each output."""
  return dict.fromkeys(outputs, "bits")


def rounded_up(bound: np.ndarray) -> np.ndarray:
  """Float32 numbers that are not smaller than these."""
  return np.nextafter(bound.astype(np.float32), np.float32(np.inf))
