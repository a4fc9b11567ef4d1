"""Damaged files give an error of ours, or what they hold: never another exception."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint.hf import CheckpointError, SafetensorsDirectory
from kdtree_jax.checkpoint.hf.config import read_config
from tests.checkpoint.hf.directories import (
  FP8,
  INDEX,
  INT4,
  SINGLE,
  hub_config,
  kimi_wrapper,
  safetensors_bytes,
  shard_name,
  write_json,
  write_tensors,
)
from tests.checkpoint.hf.models import family, kimi, transformers_5

ODD = [
  None,
  True,
  -1,
  0,
  1,
  2,
  7,
  10**30,
  10**400,
  0.5,
  -0.0,
  1e308,
  "",
  "yarn",
  [],
  [1],
  {},
]
DOCUMENTS = {
  "published": lambda: kimi(),
  "fp8": lambda: hub_config(family("deepseek_v3"), quantization_config=FP8),
  "v2": lambda: hub_config(family("v2_lite")),
  "transformers": lambda: transformers_5(family("kimi")),
  "wrapper": lambda: kimi_wrapper(kimi() | {"quantization_config": INT4}),
}


def changed(document: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
  """The document with one value replaced or left out, for each value at any depth."""
  if not isinstance(document, dict):
    return
  for key, value in document.items():
    rest = {k: v for k, v in document.items() if k != key}
    yield (*path, key), rest
    for odd in ODD:
      yield (*path, key, odd), rest | {key: odd}
    for inner, other in changed(value, (*path, key)):
      yield inner, rest | {key: other}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_config_with_any_value_changed(tmp_path, name):
  refused = read = 0
  for path, document in changed(DOCUMENTS[name]()):
    write_json(tmp_path / "config.json", document)
    try:
      config = read_config(tmp_path)
    except CheckpointError as error:
      refused += 1
      assert error.file == str(tmp_path / "config.json"), path
      assert error.what and error.reason, path
    else:
      read += 1
      assert config.model.num_hidden_layers > 0
  assert refused > 300 and read > 50


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json(tmp_path, text):
  document = json.dumps(kimi()).replace(
    '"rope_theta": 50000.0', f'"rope_theta": {text}'
  )
  assert text in document
  (tmp_path / "config.json").write_text(document)
  with pytest.raises(CheckpointError, match="is no number of JSON"):
    read_config(tmp_path)


def small_file() -> tuple[dict[str, np.ndarray], bytes]:
  rng = np.random.default_rng(0)
  tensors = {
    "a": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16),
    "b": rng.integers(0, 9, 5, dtype=np.int32),
    "c": np.zeros((0, 2), np.float32),
    "d": rng.standard_normal(7),
  }
  return tensors, safetensors_bytes(tensors)


def opens(directory: Path) -> bool:
  try:
    files = SafetensorsDirectory(directory)
  except CheckpointError as error:
    assert Path(error.file).parent in (directory, directory.parent)
    return False
  for name, entry in files.entries.items():
    assert files.read(name).shape == entry.shape
    assert len(files.bytes_of(name)) == entry.stop - entry.start
  return True


def test_every_truncation_is_found(tmp_path):
  _, contents = small_file()
  for length in range(len(contents)):
    (tmp_path / SINGLE).write_bytes(contents[:length])
    assert not opens(tmp_path), length
  (tmp_path / SINGLE).write_bytes(contents)
  assert opens(tmp_path)


def test_headers_with_any_byte_changed(tmp_path):
  _, contents = small_file()
  end = 8 + int.from_bytes(contents[:8], "little")
  rng = np.random.default_rng(1)
  survived = 0
  for _ in range(1500):
    damaged = bytearray(contents)
    for position in rng.integers(0, end, rng.integers(1, 4)):
      damaged[position] = rng.integers(0, 256)
    (tmp_path / SINGLE).write_bytes(damaged)
    survived += opens(tmp_path)
  assert survived > 5  # Names, and what lies in metadata.


def test_indices_with_any_byte_changed(tmp_path):
  tensors, _ = small_file()
  write_tensors(tmp_path, tensors, 2)
  assert (tmp_path / shard_name(1, 2)).exists() and opens(tmp_path)
  contents = (tmp_path / INDEX).read_bytes()
  rng = np.random.default_rng(2)
  for _ in range(1500):
    damaged = bytearray(contents)
    for position in rng.integers(0, len(contents), rng.integers(1, 4)):
      damaged[position] = rng.integers(0, 256)
    (tmp_path / INDEX).write_bytes(damaged)
    opens(tmp_path)
