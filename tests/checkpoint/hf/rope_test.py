from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdtree_jax.config import YarnConfig
from tests.checkpoint.hf.models import (
  config_refused,
  family,
  kimi,
  read,
  transformers_5,
)

YARN = {
  "factor": 64.0,
  "original_max_position_embeddings": 4096,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
}


def rope_of(directory: Path, **changes: Any) -> YarnConfig | None:
  return read(directory, kimi() | changes).model.rope_scaling


def test_rope_types_in_both_spellings(tmp_path):
  want = YarnConfig(**YARN)
  for kind in (
    {"type": "yarn"},
    {"rope_type": "yarn"},
    {"type": "yarn", "rope_type": "yarn"},
    {"type": "yarn", "rope_theta": 50000.0},
    {"type": "yarn", "attention_factor": None},
    {"type": "yarn", "attention_factor": 1.0},
    {"type": "yarn", "truncate": True},
    {"type": "yarn", "partial_rotary_factor": 1.0},
  ):
    assert rope_of(tmp_path, rope_scaling=YARN | kind) == want, kind
  assert rope_of(tmp_path, rope_scaling=None) is None
  assert rope_of(tmp_path, rope_scaling={"rope_type": "default"}) is None


def test_integers_are_numbers(tmp_path):
  whole = {"factor": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1}
  got = rope_of(
    tmp_path, rope_theta=50000, rope_scaling=YARN | whole | {"type": "yarn"}
  )
  assert got == YarnConfig(**YARN) and isinstance(got.factor, float)


@pytest.mark.parametrize("name", YARN)
def test_a_missing_yarn_value_is_named(tmp_path, name):
  scaling = YARN | {"type": "yarn"}
  del scaling[name]
  config_refused(
    tmp_path, kimi() | {"rope_scaling": scaling}, f"rope_scaling.{name}", "missing"
  )
  document = transformers_5(family("kimi"))
  del document["rope_parameters"][name]
  config_refused(tmp_path, document, f"rope_parameters.{name}", "is missing")


@pytest.mark.parametrize(
  ("changes", "field", "reason"),
  [
    ({"type": None}, "rope_type", "is missing"),
    ({"type": "linear"}, "rope_type", "'linear' is not supported"),
    ({"type": "llama3"}, "rope_type", "'llama3' is not supported"),
    ({"type": "default"}, "beta_fast", "is not known here"),
    ({"rope_type": "default"}, "rope_type", "is 'default', but type is 'yarn'"),
    ({"factor": "64"}, "factor", "is not a number that"),
    ({"factor": 0.5}, "factor", "is not supported"),
    ({"factor": None}, "factor", "is null"),
    ({"beta_fast": 0}, "beta_fast", "is not supported"),
    ({"beta_slow": -1}, "beta_slow", "is not supported"),
    ({"mscale": 0}, "mscale", "is not supported"),
    ({"mscale": 2.0, "mscale_all_dim": 0}, "mscale", "where mscale_all_dim is 0"),
    ({"original_max_position_embeddings": 0}, "original_max_position_embeddings", "0"),
    (
      {"original_max_position_embeddings": 4096.5},
      "original_max_position_embeddings",
      "",
    ),
    ({"attention_factor": 1.4}, "attention_factor", "make it 1.0"),
    ({"truncate": False}, "truncate", "must be True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "must be 1.0"),
    ({"rope_theta": 10000.0}, "rope_theta", "but 50000.0 outside"),
    ({"low_freq_factor": 1.0}, "low_freq_factor", "is not known here"),
  ],
)
def test_a_yarn_value_that_is_not_supported(tmp_path, changes, field, reason):
  scaling = YARN | {"type": "yarn"} | changes
  config_refused(
    tmp_path, kimi() | {"rope_scaling": scaling}, f"rope_scaling.{field}", reason
  )


def test_rope_given_twice(tmp_path):
  document = transformers_5(family("kimi"))
  document["rope_scaling"] = YARN | {"type": "yarn"}
  config_refused(tmp_path, document, "rope_parameters", "stands beside rope_scaling")
  document = kimi() | {"rope_scaling": "yarn"}
  config_refused(tmp_path, document, "rope_scaling", "must be an object")
  document = transformers_5(family("kimi"))
  del document["rope_parameters"]["rope_theta"]
  config_refused(tmp_path, document, "rope_parameters.rope_theta", "is missing")
