from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint.hf import CheckpointError, SafetensorsDirectory
from kdtree_jax.checkpoint.hf.safetensors import weight_files
from tests.checkpoint.hf.directories import (
  CODES,
  INDEX,
  SINGLE,
  safetensors_bytes,
  shard_name,
  with_header,
  write_json,
  write_tensors,
)


def some_tensors() -> dict[str, np.ndarray]:
  """Every dtype, odd sizes, so that most are not aligned."""
  rng = np.random.default_rng(0)
  shapes = [(3,), (5, 7), (), (2, 3, 5), (0, 4), (1, 1), (9,), (4, 3)]
  tensors = {}
  for i, dtype in enumerate(CODES):
    shape = shapes[i % len(shapes)]
    array = rng.integers(0, 2, shape) if dtype == np.bool_ else None
    if array is None:
      array = rng.integers(1, 100, shape)
    tensors[f"tensor.{i}"] = np.asarray(array).astype(dtype)
  return tensors


def assert_same(directory: SafetensorsDirectory, tensors) -> None:
  assert list(directory.entries) == sorted(tensors)
  for name, array in tensors.items():
    got = directory.read(name)
    assert got.dtype == array.dtype and got.shape == array.shape
    assert got.tobytes() == array.tobytes(), name
    assert bytes(directory.bytes_of(name)) == array.tobytes(), name


@pytest.mark.parametrize("shards", [None, 1, 3])
def test_every_dtype_comes_back(tmp_path, shards):
  tensors = some_tensors()
  write_tensors(tmp_path, tensors, shards)
  assert_same(SafetensorsDirectory(tmp_path), tensors)


def test_values_are_read_only_views_that_outlive_the_directory(tmp_path):
  write_tensors(tmp_path, {"a": np.arange(6, dtype=np.float32)})
  directory = SafetensorsDirectory(tmp_path)
  first, second = directory.read("a"), directory.read("a")
  assert np.shares_memory(first, second) and not first.flags.writeable
  del directory, second
  np.testing.assert_array_equal(first, np.arange(6))


def test_an_unknown_tensor_is_named(tmp_path):
  write_tensors(tmp_path, {"a": np.zeros(1, np.float32)})
  with pytest.raises(CheckpointError, match="'b': is missing"):
    SafetensorsDirectory(tmp_path).read("b")


def refused(directory, file: str, what: str, reason: str) -> None:
  with pytest.raises(CheckpointError) as caught:
    SafetensorsDirectory(directory)
  error = caught.value
  assert error.file == str(directory / file if file else directory)
  assert error.what == what
  assert reason in error.reason, error.reason
  assert str(error) == f"{error.file}: {error.what}: {error.reason}"


def test_a_missing_directory():
  with pytest.raises(FileNotFoundError, match="does not exist"):
    SafetensorsDirectory("/no/such/directory")


def test_no_weights(tmp_path):
  refused(tmp_path, "", SINGLE, "no weights here")


def test_both_a_single_file_and_an_index(tmp_path):
  tensors = {"a": np.zeros(1, np.float32)}
  write_tensors(tmp_path, tensors)
  write_tensors(tmp_path, tensors, 1)
  refused(tmp_path, INDEX, SINGLE, "lies beside the index")


@pytest.fixture
def sharded(tmp_path):
  """Three shards of two tensors, a b c a2 b2 c2."""
  names = ["a", "b", "c", "a2", "b2", "c2"]
  tensors = {name: np.full(4, i, np.float32) for i, name in enumerate(names)}
  write_tensors(tmp_path, tensors, 3)
  assert_same(SafetensorsDirectory(tmp_path), tensors)
  return tmp_path


def change_index(directory, change) -> None:
  document = json.loads((directory / INDEX).read_text())
  change(document["weight_map"])
  write_json(directory / INDEX, document)


def test_a_missing_shard(sharded):
  (sharded / shard_name(1, 3)).unlink()
  refused(sharded, shard_name(1, 3), "tensor 'b'", "names this file, which is missing")


def test_a_truncated_shard(sharded):
  path = sharded / shard_name(2, 3)
  path.write_bytes(path.read_bytes()[:-1])
  refused(sharded, path.name, "tensor 'c2'", "the file is truncated")


def test_a_shard_cut_off_in_its_header(sharded):
  path = sharded / shard_name(2, 3)
  path.write_bytes(path.read_bytes()[:20])
  refused(sharded, path.name, "header", "the file is truncated: it ends at byte 20")
  path.write_bytes(b"1234567")
  refused(sharded, path.name, "header", "truncated")
  path.write_bytes(b"")
  refused(sharded, path.name, "header", "truncated")


def test_a_tensor_in_two_shards(sharded):
  path = sharded / shard_name(1, 3)
  tensors = {"b": np.zeros(4, np.float32), "a": np.zeros(4, np.float32)}
  path.write_bytes(safetensors_bytes(tensors))
  refused(sharded, path.name, "tensor 'a'", f"a duplicate: {shard_name(0, 3)} holds it")


def test_an_index_that_points_to_another_shard(sharded):
  change_index(sharded, lambda weight_map: weight_map.update(a=shard_name(1, 3)))
  refused(sharded, shard_name(0, 3), "tensor 'a'", f"says it is in {shard_name(1, 3)}")


def test_an_index_that_points_nowhere(sharded):
  change_index(sharded, lambda weight_map: weight_map.update(d=shard_name(1, 3)))
  refused(sharded, shard_name(1, 3), "tensor 'd'", "says it is here; it is not")
  change_index(sharded, lambda weight_map: weight_map.update(d="elsewhere"))
  refused(sharded, "elsewhere", "tensor 'd'", "which is missing")


def test_an_index_that_names_what_no_file_can_be_called(sharded):
  name = "x" * 300
  change_index(sharded, lambda weight_map: weight_map.update(d=name))
  refused(sharded, name, "tensor 'd'", "which cannot be read: ")


def test_a_folder_of_the_name_of_the_weights(tmp_path):
  (tmp_path / SINGLE).mkdir()
  refused(tmp_path, SINGLE, "file", "cannot be read: ")


def test_weight_files(sharded, tmp_path_factory):
  assert weight_files(sharded) == [sharded / shard_name(i, 3) for i in range(3)]
  folder = tmp_path_factory.mktemp("single")
  write_tensors(folder, some_tensors())
  assert weight_files(folder) == [folder / SINGLE]


def test_a_tensor_that_the_index_does_not_name(sharded):
  change_index(sharded, lambda weight_map: weight_map.pop("b2"))
  refused(sharded, shard_name(1, 3), "tensor 'b2'", "is unexpected")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "", "..", 3, None])
def test_an_index_that_leads_out_of_the_directory(sharded, file):
  change_index(sharded, lambda weight_map: weight_map.update(a=file))
  refused(sharded, INDEX, "tensor 'a'", "is not the name of a file beside the index")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(sharded, weight_map):
  write_json(sharded / INDEX, {"weight_map": weight_map})
  refused(sharded, INDEX, "weight_map", "must map tensor names to files")


def test_damaged_json(sharded):
  (sharded / INDEX).write_text("{")
  refused(sharded, INDEX, "JSON", "is damaged")
  (sharded / INDEX).write_bytes(b"\xff\xfe")
  refused(sharded, INDEX, "file", "cannot be read")
  (sharded / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
  refused(sharded, INDEX, "'a'", "is a duplicate")
  (sharded / INDEX).write_text("[" * 100_000)
  refused(sharded, INDEX, "JSON", "is damaged")


def row(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
  return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
  ("header", "nbytes", "what", "reason"),
  [
    ({"a": row("F4")}, 8, "tensor 'a'", "dtype 'F4' is not supported"),
    ({"a": row(["F32"])}, 8, "tensor 'a'", "dtype ['F32'] is not supported"),
    ({"a": row(shape=[-2])}, 8, "tensor 'a'", "is not a list of sizes"),
    ({"a": row(shape=[2.0])}, 8, "tensor 'a'", "is not a list of sizes"),
    ({"a": row(shape=[True])}, 8, "tensor 'a'", "is not a list of sizes"),
    ({"a": row(shape=3)}, 8, "tensor 'a'", "is not a list of sizes"),
    ({"a": row(offsets=[0])}, 8, "tensor 'a'", "are not two offsets"),
    ({"a": row(offsets=[0, -8])}, 8, "tensor 'a'", "are not two offsets"),
    ({"a": row(offsets=[8, 0])}, 8, "tensor 'a'", "-8 bytes cannot be F32 [2]"),
    ({"a": row(shape=[3])}, 8, "tensor 'a'", "8 bytes cannot be F32 [3]"),
    ({"a": row(shape=[2**40, 2**40])}, 8, "tensor 'a'", "8 bytes cannot be F32"),
    ({"a": row(offsets=[4, 12])}, 12, "tensor 'a'", "follows unused bytes"),
    ({"a": row(), "b": row(offsets=[4, 12])}, 12, "tensor 'b'", "overlaps another"),
    ({"a": row(), "b": row()}, 8, "tensor 'b'", "overlaps another"),
    ({"a": row()}, 9, "header", "1 bytes belong to no tensor"),
    ({"a": row()}, 7, "tensor 'a'", "truncated"),
    ({"a": 3}, 0, "tensor 'a'", "is not an object"),
    ('{"a": 1, "a": 2}', 0, "'a'", "is a duplicate"),
    ("[]", 0, "JSON", "must be an object"),
    ("{", 0, "JSON", "is damaged"),
  ],
)
def test_a_damaged_header(tmp_path, header, nbytes, what, reason):
  (tmp_path / SINGLE).write_bytes(with_header(header, bytes(nbytes)))
  refused(tmp_path, SINGLE, what, reason)


def test_a_header_of_absurd_length(tmp_path):
  (tmp_path / SINGLE).write_bytes(b"\xff" * 8 + b"{}")
  refused(tmp_path, SINGLE, "header", "bytes are more than")


def test_a_header_that_is_no_text(tmp_path):
  (tmp_path / SINGLE).write_bytes((2).to_bytes(8, "little") + b"\xff\xff")
  refused(tmp_path, SINGLE, "header", "is damaged")


def test_fp8_codes_are_the_finite_variant():
  # e4m3fn: 0x7e is 448, and there is no infinity.
  from kdtree_jax.checkpoint.hf.safetensors import DTYPES

  top = np.array([0x7E, 0x7F], np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float32)
  assert top[0] == 448 and np.isnan(top[1])
  assert DTYPES["BF16"] == np.dtype(ml_dtypes.bfloat16)
