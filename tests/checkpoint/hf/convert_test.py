"""Hugging Face directories to KDTR files: values, interruptions, errors."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from kdtree_jax.checkpoint import (
  KdtrError,
  expected_shapes,
  load_checkpoint,
  open_kdtr,
  quantize,
  read_target,
  read_target_as_stored,
  read_tokenizer_files,
  read_tokenizer_json,
  save_drafter,
  save_target,
)
from kdtree_jax.checkpoint.hf import (
  CheckpointError,
  SafetensorsDirectory,
  read_hf_target,
)
from kdtree_jax.checkpoint.hf.convert import convert_hf
from kdtree_jax.checkpoint.hf.export import export_hf
from kdtree_jax.checkpoint.hf.safetensors_writer import Tensor, write_safetensors
from kdtree_jax.checkpoint.kdtr_resumable import Progress
from kdtree_jax.tokenizer import load_tokenizer
from tests.checkpoint.state_dict_test import DRAFTER, TARGET, changed, weights
from tests.tokenizer.files import kimi_config, ranks_file, write

BF16 = ml_dtypes.bfloat16


class Killed(Exception):
  """Stands for the end of the process."""


def directory(folder: Path, **options: Any) -> Path:
  """A directory of a random target."""
  seed = options.pop("seed", 0)
  save_target(folder / "source", TARGET, weights(TARGET, seed), **options)
  export_hf(folder / "source", folder / "hf", max_shard_bytes=20_000)
  (folder / "source").unlink()
  return folder / "hf"


def kill_after(tensors: int):
  """A progress that ends the run after so many tensors."""
  count = 0

  def progress(report: Progress) -> None:
    nonlocal count
    count += report.stage == "write" and report.name is not None
    if report.stage == "write" and count == tensors:
      raise Killed

  return progress


@pytest.mark.parametrize("expert_format", ["int4", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_from_float32_the_file_is_that_of_save_target(tmp_path, dtype, expert_format):
  hf = directory(tmp_path, dtype="float32", expert_format="float32")
  found = convert_hf(hf, tmp_path / "x", dtype=dtype, expert_format=expert_format)
  expected = save_target(
    tmp_path / "y",
    TARGET,
    weights(TARGET),
    dtype=dtype,
    expert_format=expert_format,
  )
  assert found == expected == open_kdtr(tmp_path / "x", verify="open").fingerprint


def test_as_stored_keeps_int4_and_makes_floats_of_floats(tmp_path):
  formats = {}
  for name in ("int4", "bfloat16", "float32"):
    (tmp_path / name).mkdir()
    hf = directory(tmp_path / name, expert_format=name)
    convert_hf(hf, tmp_path / name / "x")
    formats[name] = open_kdtr(tmp_path / name / "x").config["expert_format"]
  assert formats == {"int4": "int4", "bfloat16": "bfloat16", "float32": "bfloat16"}


def test_as_stored_refuses_experts_of_both_kinds(tmp_path):
  """As loading does; asked for one kind, they become it."""
  config = changed(num_hidden_layers=3)
  save_target(tmp_path / "s", config, weights(config))
  for name in ("int4", "bfloat16"):
    export_hf(tmp_path / "s", tmp_path / name, expert_format=name)
  ours, theirs = (SafetensorsDirectory(tmp_path / n) for n in ("int4", "bfloat16"))
  tensors = []
  for files, here in ((ours, False), (theirs, True)):
    for name, entry in files.entries.items():
      if ("layers.2.mlp.experts." in name) == here:
        read = lambda files=files, name=name: files.read(name)  # noqa: E731
        tensors.append(Tensor(name, entry.dtype, entry.shape, read))
  hf = tmp_path / "both"
  hf.mkdir()
  write_safetensors(hf / "model.safetensors", tensors)
  document = json.loads((tmp_path / "int4" / "config.json").read_text())
  document["quantization_config"]["ignore"].append(r"re:model\.layers\.2\..*")
  (hf / "config.json").write_text(json.dumps(document))
  with pytest.raises(ValueError, match="is of floats, but other routed experts"):
    load_checkpoint(hf)
  odd = r"both: tensor 'model.layers.2.mlp.experts.0.\w+.weight': is of floats, but"
  with pytest.raises(CheckpointError, match=odd):
    convert_hf(hf, tmp_path / "x")
  assert not (tmp_path / "x").exists()
  convert_hf(hf, tmp_path / "x", expert_format="int4")
  assert open_kdtr(tmp_path / "x").config["expert_format"] == "int4"
  convert_hf(hf, tmp_path / "y", expert_format="bfloat16")
  assert open_kdtr(tmp_path / "y").config["expert_format"] == "bfloat16"


def test_packed_int4_is_kept_bit_for_bit(tmp_path):
  """Against words put together here: element k in bits 4 (k mod 8) of word k // 8."""
  hf = directory(tmp_path)
  rng = np.random.default_rng(5)
  values: dict[str, np.ndarray] = {}
  scales: dict[str, np.ndarray] = {}

  def replaced(name: str, read) -> Any:
    stem, _, part = name.rpartition(".")
    if ".mlp.experts." not in name:
      return read
    shape = (32, 64) if "down" not in name else (64, 32)
    if stem not in values:
      values[stem] = rng.integers(-8, 8, shape)
      scales[stem] = rng.uniform(1e-4, 0.1, (shape[0], shape[1] // 32)).astype(BF16)
    if part == "weight_packed":
      nibbles = (values[stem] + 8).astype(np.uint64).reshape(shape[0], -1, 8)
      words = (nibbles << (4 * np.arange(8, dtype=np.uint64))).sum(-1)
      return lambda: words.astype(np.uint32).view(np.int32)
    return (lambda: scales[stem]) if part == "weight_scale" else read

  rewrite(hf, replaced)
  convert_hf(hf, tmp_path / "x", expert_format="int4")
  _, stored, _ = read_target_as_stored(tmp_path / "x")
  assert len(values) == 6
  for stem, expected in values.items():
    tensor = stored[f"{stem}.weight"]
    found = np.stack([tensor.packed & 15, tensor.packed >> 4], -1)
    np.testing.assert_array_equal(
      found.reshape(expected.shape).astype(np.int8) - 8, expected
    )
    np.testing.assert_array_equal(
      tensor.scales.view(np.uint16), scales[stem].view(np.uint16)
    )


def rewrite(hf: Path, replaced) -> None:
  """Writes the directory's tensors again, some of them replaced."""
  files = SafetensorsDirectory(hf)
  for path in sorted(hf.glob("*.safetensors")):
    tensors = []
    for name, entry in files.entries.items():
      if entry.file == path:
        read = replaced(name, lambda name=name: files.read(name))
        tensors.append(Tensor(name, entry.dtype, entry.shape, read))
    path.unlink()
    write_safetensors(path, tensors)


def test_fp8_blocks_are_multiplied_out_in_float32_and_then_rounded(tmp_path):
  """A weight of 130 input features: its last block has two."""
  config = changed(intermediate_size=130)
  values = weights(config)
  name = "model.layers.0.mlp.down_proj.weight"
  save_target(tmp_path / "s", config, values, dtype="float32", expert_format="float32")
  export_hf(tmp_path / "s", tmp_path / "hf")
  rng = np.random.default_rng(2)
  quantised = rng.uniform(-400, 400, (64, 130)).astype(ml_dtypes.float8_e4m3fn)
  scales = rng.uniform(1e-4, 1e-2, (1, 2)).astype(np.float32)
  files = _fp8_directory(tmp_path / "hf", name, quantised, scales)
  convert_hf(files, tmp_path / "x")
  _, found, _ = read_target(tmp_path / "x")
  exact = quantised.astype(np.float32)
  exact[:, :128] *= scales[0, 0]
  exact[:, 128:] *= scales[0, 1]
  np.testing.assert_array_equal(found[name], exact.astype(BF16).astype(np.float32))


def _fp8_directory(hf: Path, name: str, values: np.ndarray, scales: np.ndarray) -> Path:
  """The directory with one weight in FP8."""
  raw = (hf / "model.safetensors").read_bytes()
  length = int.from_bytes(raw[:8], "little")
  header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
  del header["__metadata__"]
  tensors = {
    n: (row["dtype"], row["shape"], data[slice(*row["data_offsets"])])
    for n, row in header.items()
  }
  tensors[name] = ("F8_E4M3", list(values.shape), values.tobytes())
  tensors[f"{name}_scale_inv"] = ("F32", list(scales.shape), scales.tobytes())
  header, end = {}, 0
  for n, (dtype, shape, contents) in tensors.items():
    offsets = [end, end + len(contents)]
    header[n] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    end += len(contents)
  text = json.dumps(header).encode()
  (hf / "model.safetensors").write_bytes(
    len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values())
  )
  config = json.loads((hf / "config.json").read_text())
  config["quantization_config"] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
  }
  (hf / "config.json").write_text(json.dumps(config))
  return hf


def test_a_drafter(tmp_path):
  expected = save_drafter(tmp_path / "d", DRAFTER, weights(DRAFTER))
  export_hf(tmp_path / "d", tmp_path / "hf")
  assert convert_hf(tmp_path / "hf", tmp_path / "x") == expected
  with pytest.raises(ValueError, match="expert_format = 'int4' is of targets"):
    convert_hf(tmp_path / "hf", tmp_path / "y", expert_format="int4")
  assert load_checkpoint(tmp_path / "x").config.block_size == 8


def words(count: int) -> str:
  """A tokenizer.json of so many words."""
  vocabulary = {f"w{i}": i for i in range(count)}
  return tokenizers.Tokenizer(models.WordLevel(vocabulary, "w0")).to_str()


def test_metadata_names_the_source_and_carries_the_tokenizer(tmp_path):
  hf = directory(tmp_path, tokenizer_json=words(48))
  (hf / "chat_template.jinja").write_bytes("{{ é }}\r\n".encode())
  convert_hf(hf, tmp_path / "x")
  metadata = open_kdtr(tmp_path / "x").metadata
  assert metadata["source_fingerprint"] == read_hf_target(hf)[2]
  assert read_tokenizer_json(tmp_path / "x") == words(48)
  files = read_tokenizer_files(tmp_path / "x")
  assert sorted(files) == [
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
  ]
  assert load_tokenizer(tmp_path / "x").encode("w3") == [3]
  export_hf(tmp_path / "x", tmp_path / "back")
  for name in files:
    assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes()


def test_chat_templates_of_a_folder_travel_too(tmp_path):
  hf = directory(tmp_path, tokenizer_json=words(48))
  folder = "additional_chat_templates"
  (hf / folder).mkdir()
  for name, text in (("tool_use", "tools"), ("a b.c", "more")):
    (hf / folder / f"{name}.jinja").write_text(text)
  (hf / folder / "notes.txt").write_text("no template")
  convert_hf(hf, tmp_path / "x")
  files = read_tokenizer_files(tmp_path / "x")
  names = {n for n in files if n.startswith(folder)}
  assert names == {f"{folder}/tool_use.jinja", f"{folder}/a b.c.jinja"}
  expected = {"tool_use": "tools", "a b.c": "more"}
  assert load_tokenizer(hf).chat_templates == expected
  assert load_tokenizer(tmp_path / "x").chat_templates == expected
  export_hf(tmp_path / "x", tmp_path / "back")
  assert load_tokenizer(tmp_path / "back").chat_templates == expected
  assert len(list((tmp_path / "back" / folder).iterdir())) == 2
  (hf / folder / "a\\b.jinja").write_text("")
  with pytest.raises(CheckpointError, match="name: has unusual characters"):
    convert_hf(hf, tmp_path / "y")


def test_kimis_ranks_travel_too(tmp_path):
  ranks = {bytes((i,)): i for i in range(256)}
  config = changed(vocab_size=512)
  save_target(tmp_path / "s", config, weights(config))
  export_hf(tmp_path / "s", tmp_path / "hf")
  write(
    tmp_path / "hf",
    tiktoken__model=ranks_file(ranks),
    tokenizer_config__json=kimi_config(256),
  )
  convert_hf(tmp_path / "hf", tmp_path / "x")
  assert read_tokenizer_json(tmp_path / "x") is None
  tokenizer = load_tokenizer(tmp_path / "x")
  assert tokenizer.encode("hi") == list(b"hi")
  assert tokenizer.chat_templates.keys() == {"default"}


def test_a_tokenizer_that_does_not_fit(tmp_path):
  hf = directory(tmp_path)
  for contents, message in (
    (b"{", "tokenizer.json: tokenizer"),
    (b"\xff", "tokenizer.json: text: is not UTF-8"),
    (words(100).encode(), "config.json: field vocab_size"),
  ):
    (hf / "tokenizer.json").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message):
      convert_hf(hf, tmp_path / "x")
  assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("expert_format", ["int4", "bfloat16"])
def test_goes_on_after_any_tensor_with_the_same_bytes(tmp_path, expert_format):
  hf = directory(tmp_path, dtype="float32", expert_format="float32")
  convert_hf(hf, tmp_path / "whole", expert_format=expert_format)
  expected = (tmp_path / "whole").read_bytes()
  path = tmp_path / "x"
  for tensors in range(0, 30, 3):
    with pytest.raises(Killed):
      convert_hf(hf, path, expert_format=expert_format, progress=kill_after(tensors))
    assert not path.exists()
    convert_hf(hf, path, expert_format=expert_format)
    assert path.read_bytes() == expected
    path.unlink()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "whole"]


def test_a_flipped_bit_in_the_part_is_repaired(tmp_path):
  hf = directory(tmp_path)
  convert_hf(hf, tmp_path / "whole")
  expected = (tmp_path / "whole").read_bytes()
  path, part = tmp_path / "x", tmp_path / "x.part"
  rng = np.random.default_rng(0)
  for _ in range(10):
    with pytest.raises(Killed):
      convert_hf(hf, path, progress=kill_after(30))
    damaged = bytearray(part.read_bytes())
    damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
    part.write_bytes(damaged)
    convert_hf(hf, path)
    assert path.read_bytes() == expected
    path.unlink()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"dtype": "float32"}, "dtype 'bfloat16', now 'float32'"),
    ({"expert_format": "bfloat16"}, "expert_format 'int4', now 'bfloat16'"),
  ],
)
def test_a_part_of_other_options_is_refused(tmp_path, changes, message):
  hf = directory(tmp_path)
  with pytest.raises(Killed):
    convert_hf(hf, tmp_path / "x", progress=kill_after(5))
  with pytest.raises(KdtrError, match=message):
    convert_hf(hf, tmp_path / "x", **changes)
  convert_hf(hf, tmp_path / "x", restart=True, **changes)
  convert_hf(hf, tmp_path / "y", **changes)
  assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_part_of_another_directory_is_refused(tmp_path):
  for seed in (0, 1):
    (tmp_path / str(seed)).mkdir()
    directory(tmp_path / str(seed), seed=seed)
  with pytest.raises(Killed):
    convert_hf(tmp_path / "0" / "hf", tmp_path / "x", progress=kill_after(5))
  with pytest.raises(KdtrError, match="belongs to another conversion .source "):
    convert_hf(tmp_path / "1" / "hf", tmp_path / "x")
  shutil.move(tmp_path / "0" / "hf", tmp_path / "moved")  # The same one.
  convert_hf(tmp_path / "moved", tmp_path / "x")


def test_a_part_of_another_version_of_the_weights_is_refused(tmp_path):
  """Which differs in the middle of a tensor, where the fingerprint does not look."""
  hf = directory(tmp_path, dtype="float32", expert_format="float32")
  with pytest.raises(Killed):
    convert_hf(hf, tmp_path / "x", progress=kill_after(5))
  entry = SafetensorsDirectory(hf).entries["model.layers.0.mlp.up_proj.weight"]
  before = read_hf_target(hf)[2], os.stat(entry.file)
  with open(entry.file, "r+b") as file:
    file.seek(entry.start + 400)
    file.write(bytes(4))
  os.utime(entry.file, ns=(before[1].st_atime_ns, before[1].st_mtime_ns + 1))
  assert read_hf_target(hf)[2] == before[0]
  message = f"weights in {entry.file.name} '{before[1].st_size} bytes, changed at "
  with pytest.raises(KdtrError, match=message):
    convert_hf(hf, tmp_path / "x")
  convert_hf(hf, tmp_path / "x", restart=True)


def test_a_part_of_another_config_is_refused(tmp_path):
  hf = directory(tmp_path)
  with pytest.raises(Killed):
    convert_hf(hf, tmp_path / "x", progress=kill_after(5))
  config = json.loads((hf / "config.json").read_text())
  (hf / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
  with pytest.raises(KdtrError, match="another conversion"):
    convert_hf(hf, tmp_path / "x")


def test_a_tensor_that_cannot_be_stored(tmp_path):
  hf = directory(tmp_path, dtype="float32", expert_format="float32")
  bad = "model.layers.1.mlp.gate.weight"
  nan = np.full((2, 64), np.nan, np.float32)
  rewrite(hf, lambda name, read: (lambda: nan) if name == bad else read)
  with pytest.raises(CheckpointError, match=f"hf: tensor '{bad}': holds NaN"):
    convert_hf(hf, tmp_path / "x")
  assert not (tmp_path / "x").exists()


def test_the_file_exists(tmp_path):
  hf = directory(tmp_path)
  path = tmp_path / "x"
  path.write_bytes(b"old")
  with pytest.raises(FileExistsError, match=f"path = {path} exists; .*--overwrite"):
    convert_hf(hf, path)
  assert path.read_bytes() == b"old"
  convert_hf(hf, path, overwrite=True)
  assert open_kdtr(path).config["kind"] == "target"
  with pytest.raises(ValueError, match="is a folder"):
    convert_hf(hf, tmp_path)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"dtype": "float16"}, "dtype = 'float16'"),
    ({"expert_format": "fp8"}, "expert_format = 'fp8'"),
  ],
)
def test_arguments(tmp_path, arguments, message):
  hf = directory(tmp_path)
  with pytest.raises(ValueError, match=message):
    convert_hf(hf, tmp_path / "x", **arguments)
  assert os.listdir(tmp_path) == ["hf"]


def test_no_directory(tmp_path):
  with pytest.raises(FileNotFoundError, match="does not exist"):
    convert_hf(tmp_path / "hf", tmp_path / "x")


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
  """Python's and numpy's allocations; the source is mapped, so it does not count."""
  config = changed(
    vocab_size=256, hidden_size=1024, num_hidden_layers=6, intermediate_size=1024
  )
  one = 1024 * 1024 * 4  # Bytes of a projection of the dense layers in float32.
  rng = np.random.default_rng(0)
  tensors = {
    name: rng.standard_normal(shape, np.float32)
    for name, shape in expected_shapes(config).items()
  }
  save_target(tmp_path / "s", config, tensors, dtype="float32", expert_format="float32")
  del tensors
  export_hf(tmp_path / "s", tmp_path / "hf")
  tracemalloc.start()
  try:
    convert_hf(tmp_path / "hf", tmp_path / "x", dtype="bfloat16", expert_format="int4")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    export_hf(tmp_path / "x", tmp_path / "back", dtype="float32")
    _, peak_back = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # The tensor in its new dtype (1/2 of it, and 1), and a bool per element to look for
  # values that are not finite (1/4). A second tensor would exceed this.
  assert peak < 1.0 * one
  assert peak_back < 1.5 * one


def test_quantising_is_that_of_quantize(tmp_path):
  hf = directory(tmp_path, dtype="float32", expert_format="float32")
  convert_hf(hf, tmp_path / "x", expert_format="int4")
  name = "model.layers.1.mlp.experts.1.down_proj.weight"
  expected = quantize(weights(TARGET)[name])
  found = read_target_as_stored(tmp_path / "x")[1][name]
  np.testing.assert_array_equal(found.packed, expected.packed)
  np.testing.assert_array_equal(
    found.scales.view(np.uint16), expected.scales.view(np.uint16)
  )
