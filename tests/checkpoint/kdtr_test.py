"""The KDTR container: round trips, layout, atomicity, and each rule's error."""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kdtree_jax.checkpoint import kdtr
from kdtree_jax.checkpoint.int4 import pack_int4, quantize
from kdtree_jax.checkpoint.kdtr import KdtrError
from tests.checkpoint.kdtr_bytes import assemble, parse

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
  "f64": np.dtype(np.float64),
  "f32": np.dtype(np.float32),
  "f16": np.dtype(np.float16),
  "bf16": BF16,
  "i64": np.dtype(np.int64),
  "i32": np.dtype(np.int32),
  "i16": np.dtype(np.int16),
  "i8": np.dtype(np.int8),
  "u8": np.dtype(np.uint8),
  "u32": np.dtype(np.uint32),
  "bool": np.dtype(np.bool_),
}


def random_array(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
  """Every bit pattern, NaNs included (bools: 0 and 1)."""
  rng = np.random.default_rng(len(shape) + dtype.itemsize)
  raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
  if dtype == np.bool_:
    raw &= 1
  return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("verify", ["read", "open"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4), (0,), (3, 0, 2)])
@pytest.mark.parametrize("name", DTYPES)
def test_round_trip(tmp_path: Path, name: str, shape: tuple[int, ...], verify):
  array = random_array(DTYPES[name], shape)
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"x": array, "after": np.ones(3)}, {})
  with kdtr.open_kdtr(path, verify=verify) as file:
    assert file.names == ("x", "after")
    assert file.info("x").dtype == name
    assert file.info("x").shape == shape
    assert same_bits(file.read("x"), array)
    assert same_bits(file.read("after"), np.ones(3))


@pytest.mark.parametrize("shape", [(2,), (3, 6), (2, 3, 4), (0,), (4, 0), (0, 4)])
def test_round_trip_int4(tmp_path: Path, shape: tuple[int, ...]):
  values = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"x": values.astype(ml_dtypes.int4)}, {})
  with kdtr.open_kdtr(path) as file:
    assert file.info("x").dtype == "int4"
    assert file.info("x").shape == shape
    assert file.info("x").nbytes == values.size // 2
    assert same_bits(file.read("x"), values)
    assert same_bits(file.read_packed("x"), pack_int4(values))
    assert not file.read_packed("x").flags.writeable


def test_int4_tensor_becomes_nibbles_and_scales(tmp_path: Path):
  tensor = quantize(np.random.default_rng(0).standard_normal((4, 64)))
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"a": np.ones(2), "w": tensor, "z": np.ones(2)}, {})
  with kdtr.open_kdtr(path) as file:
    assert file.names == ("a", "w", "w_scale", "z")
    assert file.info("w").shape == (4, 64)
    assert same_bits(file.read_packed("w"), tensor.packed)
    assert same_bits(file.read("w_scale"), tensor.scales)
    with pytest.raises(KdtrError, match="only int4 is packed"):
      file.read_packed("a")


def test_arrays_of_any_memory_order(tmp_path: Path):
  base = np.arange(24, dtype=np.float32).reshape(4, 6)
  tensors = {
    "transposed": base.T,
    "fortran": np.asfortranarray(base),
    "strided": base[::2, ::-1],
    "strided_row": base[1, ::2],
    "big_endian": base.astype(">f4"),
    "scalar": np.float32(3),
  }
  path = tmp_path / "x.kdtr"
  kdtr.write(path, tensors, {})
  with kdtr.open_kdtr(path) as file:
    for name, array in tensors.items():
      np.testing.assert_array_equal(file.read(name), array)
      assert file.read(name).dtype == np.dtype("<f4")


def test_config_and_metadata_round_trip(tmp_path: Path):
  config = {
    "int": 2**63 - 1,
    "float": 1e-6,
    "none": None,
    "text": 'quote " \\ new\nline \u4e2d \U0001f600 \x00',
    "list": [1, 2.5, "x", True, [], {}],
    "nested": {"": {"rope": {"theta": 50000.0}}},
  }
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {}, config | {"tuple": (1, 2)}, {"tokenizer": "x" * 100_000})
  with kdtr.open_kdtr(path) as file:
    assert file.config == config | {"tuple": [1, 2]}
    assert file.metadata == {"tokenizer": "x" * 100_000}
    assert file.names == ()


def test_layout_by_the_page(tmp_path: Path):
  tensors = {
    "a": np.arange(5, dtype=np.float64),
    "b": np.zeros((0, 3), np.int8),
    "c": np.arange(33, dtype=np.int16),
    "d": np.array(True),
  }
  path = tmp_path / "x.kdtr"
  kdtr.write(path, tensors, {"k": 1})
  contents = path.read_bytes()
  raw, data = parse(contents)
  header = json.loads(raw)
  assert contents == assemble(raw, data)
  assert [r["offset"] for r in header["tensors"]] == [0, 64, 64, 192]
  assert len(data) == 256
  for r, array in zip(header["tensors"], tensors.values(), strict=True):
    assert data[r["offset"] :][: r["bytes"]] == array.tobytes()
    assert r["crc32"] == zlib.crc32(array.tobytes())
  used = sum(r["bytes"] for r in header["tensors"])
  assert used == 40 + 0 + 66 + 1


def test_equal_arguments_give_equal_bytes(tmp_path: Path):
  for name in ("x", "y"):
    kdtr.write(tmp_path / name, {"w": np.ones(3)}, {"b": 1, "a": 2})
  assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_tensors_are_aligned_read_only_views_of_the_map(tmp_path: Path):
  path = tmp_path / "x.kdtr"
  arrays = {f"t{i}": random_array(np.dtype(np.float32), (i, 7)) for i in range(1, 9)}
  kdtr.write(path, arrays, {})
  file = kdtr.open_kdtr(path)
  for name in file.names:
    view = file.read(name)
    assert view.ctypes.data % 64 == 0
    assert np.shares_memory(view, file.read(name))
    with pytest.raises(ValueError, match="read-only"):
      view[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
      view.flags.writeable = True


def test_a_tensor_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"x": np.ones(3), "y": np.ones(5)}, {})
  file = kdtr.open_kdtr(path)
  sizes = []
  crc32 = zlib.crc32
  monkeypatch.setattr(zlib, "crc32", lambda b: sizes.append(len(b)) or crc32(b))
  for _ in range(3):
    file.read("x")
  file.verify()
  assert sizes == [24, 40]


def test_views_outlive_close_and_replacement(tmp_path: Path):
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"w": np.arange(1000)}, {})
  with kdtr.open_kdtr(path) as file:
    view = file.read("w")
    kdtr.write(path, {"w": np.zeros(10)}, {})
    assert file.info("w").shape == (1000,)
  np.testing.assert_array_equal(view, np.arange(1000))
  with pytest.raises(KdtrError, match="is closed"):
    file.read("w")


def test_fingerprint_is_of_the_weights_alone(tmp_path: Path):
  rng = np.random.default_rng(0)
  tensors = {"b": rng.standard_normal(5), "a": rng.standard_normal((2, 3))}
  path = tmp_path / "x.kdtr"

  def of(tensors, config=None, metadata=None) -> str:
    written = kdtr.write(path, tensors, config or {}, metadata)
    with kdtr.open_kdtr(path) as file:
      assert file.fingerprint == written
    return written

  base = of(tensors)
  assert re.fullmatch("[0-9a-f]{64}", base)
  assert of(dict(reversed(tensors.items())), {"c": 1}, {"m": 1}) == base
  others = [
    {"a": tensors["a"]},
    {"c": tensors["b"], "a": tensors["a"]},
    {"b": tensors["b"], "a": tensors["a"].T.copy()},
    {"b": tensors["b"], "a": tensors["a"].reshape(3, 2)},
    {"b": tensors["b"], "a": tensors["a"].view(np.int64)},
    {"b": np.nextafter(tensors["b"], 9), "a": tensors["a"]},
  ]
  assert len({base, *map(of, others)}) == 1 + len(others)


class Failing(Mapping[str, np.ndarray]):
  """Tensors of which the last one fails when it is looked up a second time."""

  def __init__(self, failure: BaseException | np.ndarray) -> None:
    self.failure = failure
    self.lookups = 0

  def __getitem__(self, name: str) -> np.ndarray:
    self.lookups += 1
    if self.lookups < 4:
      return np.ones(1000)
    if isinstance(self.failure, BaseException):
      raise self.failure
    return self.failure

  def __iter__(self):
    return iter(("a", "b"))

  def __len__(self) -> int:
    return 2


@pytest.mark.parametrize(
  ("failure", "expected"),
  [
    (RuntimeError("disk"), RuntimeError),
    (KeyboardInterrupt(), KeyboardInterrupt),
    (np.zeros(1000), KdtrError),
    (np.ones(999), KdtrError),
  ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_write_leaves_no_trace(tmp_path: Path, failure, expected, exists):
  path = tmp_path / "x.kdtr"
  before = None
  if exists:
    kdtr.write(path, {"old": np.arange(3)}, {})
    before = path.read_bytes()
  with pytest.raises(expected):
    kdtr.write(path, Failing(failure), {})
  assert os.listdir(tmp_path) == (["x.kdtr"] if exists else [])
  if exists:
    assert path.read_bytes() == before


def test_a_failed_rename_leaves_no_trace(tmp_path: Path, monkeypatch):
  path = tmp_path / "x.kdtr"
  kdtr.write(path, {"old": np.arange(3)}, {})
  before = path.read_bytes()

  def fail(*_: object) -> None:
    raise PermissionError

  monkeypatch.setattr(os, "replace", fail)
  with pytest.raises(PermissionError):
    kdtr.write(path, {"new": np.arange(3)}, {})
  assert os.listdir(tmp_path) == ["x.kdtr"]
  assert path.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_permissions_follow_the_umask(tmp_path: Path):
  before = os.umask(0o027)
  try:
    kdtr.write(tmp_path / "x.kdtr", {}, {})
  finally:
    os.umask(before)
  assert stat.S_IMODE((tmp_path / "x.kdtr").stat().st_mode) == 0o640


def test_missing_and_special_files(tmp_path: Path):
  with pytest.raises(FileNotFoundError):
    kdtr.open_kdtr(tmp_path / "none.kdtr")
  with pytest.raises(KdtrError, match="not a regular file"):
    kdtr.open_kdtr(tmp_path)
  with pytest.raises(ValueError, match="verify"):
    kdtr.open_kdtr(tmp_path, verify="never")  # type: ignore[arg-type]
  with pytest.raises(FileNotFoundError):
    kdtr.write(tmp_path / "none" / "x.kdtr", {}, {})
