"""How much a load holds at once: the result and one tensor."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdtree_jax as kd
from kdtree_jax.checkpoint import Int4Tensor, quantize, save_drafter
from kdtree_jax.checkpoint.hf.drafter import drafter_config
from kdtree_jax.model import target_from_state_dict
from kdtree_jax.model.placement import variables
from kdtree_jax.reference import random_weights
from kdtree_jax.reference.weights import drafter_weight_shapes, weight_shapes
from tests.checkpoint.hf import drafter_test
from tests.checkpoint.hf.directories import (
  FP8,
  fp8_blocks,
  hub_config,
  write_json,
  write_tensors,
)
from tests.checkpoint.hf.models import (
  BF16,
  WIDE,
  family,
  fp8_model,
  int4_model,
  transformers_5,
)
from tests.model.families import family_config

ROOT = Path(__file__).parents[3]


class Counting(Mapping[str, Any]):
  """Gives new arrays, and counts the numbers in those that are still alive."""

  def __init__(self, weights: Mapping[str, Any]) -> None:
    self._weights = weights
    self._lock = threading.RLock()
    self.alive = self.most = self.tensors = self.most_tensors = 0
    self.read: list[str] = []

  def describe(self, name: str) -> tuple[tuple[int, ...], bool]:
    weight = self._weights[name]
    return tuple(weight.shape), isinstance(weight, Int4Tensor)

  def __getitem__(self, name: str) -> Any:
    weight = self._weights[name]
    if isinstance(weight, Int4Tensor):
      weight = Int4Tensor(weight.packed.copy(), weight.scales.copy())
    else:
      weight = weight.copy()
    self._count(math.prod(weight.shape), 1)
    weakref.finalize(weight, self._count, -math.prod(weight.shape), -1)
    with self._lock:
      self.read.append(name)
    return weight

  def _count(self, numbers: int, tensors: int) -> None:
    with self._lock:
      self.alive += numbers
      self.tensors += tensors
      self.most = max(self.most, self.alive)
      self.most_tensors = max(self.most_tensors, self.tensors)

  def __iter__(self) -> Iterator[str]:
    return iter(self._weights)

  def __len__(self) -> int:
    return len(self._weights)

  def __contains__(self, name: object) -> bool:
    return name in self._weights


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stored", ["floats", "int4"])
@pytest.mark.parametrize("expert_dtype", ["as_stored", "int4", "dequantized"])
@pytest.mark.parametrize("experts", [4, 24])  # Both layouts of float experts.
@pytest.mark.parametrize("vocab", [61, 1000])  # The second allows for threads.
def test_no_more_than_the_largest_tensor(dtype, stored, expert_dtype, experts, vocab):
  config = family_config("kimi", vocab_size=vocab, n_routed_experts=experts, **WIDE)
  weights: dict[str, Any] = dict(random_weights(config, 0))
  largest = max(array.size for array in weights.values())
  if stored == "int4":
    for name in weights:
      if ".mlp.experts." in name:
        weights[name] = quantize(weights[name])
  counting = Counting(weights)
  target_from_state_dict(config, counting, dtype=dtype, expert_dtype=expert_dtype)
  assert sorted(counting.read) == sorted(weights)  # Each once.
  assert counting.most == largest and counting.alive == 0
  if vocab == 61:  # No two experts are as small as the embedding.
    assert counting.most_tensors == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_costs_one_tensor_besides_the_result(tmp_path, dtype):
  """FP8, which is dequantised on the host: the case that needs most."""
  config = family(
    "deepseek_v3",
    vocab_size=512,
    hidden_size=512,
    moe_intermediate_size=512,
    intermediate_size=1024,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=24,
  )
  tensors = {}
  for name, weight in random_weights(config, 0).items():
    if "_proj" in name:
      values, scales = fp8_blocks(weight)
      tensors |= {name: values, f"{name}_scale_inv": scales}
    else:
      tensors[name] = weight
  write_tensors(tmp_path, tensors, 2)
  write_json(tmp_path / "config.json", hub_config(config, quantization_config=FP8))
  largest = 4 * 512 * 1024  # Bytes of mlp.gate_proj in float32.
  kd.load_checkpoint(tmp_path, dtype)  # JAX's own caches.

  tracemalloc.start()
  target = kd.load_checkpoint(tmp_path, dtype)
  held, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  result = sum(variable[...].nbytes for variable in variables(target).values())
  assert result > 20 * largest
  # What JAX copied, in place of taking it over, is not in `held`: then one parameter
  # lies in memory twice. Beyond it, block rows and Python's objects.
  assert peak - held < 1.25 * largest + 1_000_000
  assert peak < result + 1.25 * largest + 1_000_000


linux = pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)
RESIDENT = """
import sys
import kdtree_jax as kd
from kdtree_jax.checkpoint.hf import SafetensorsDirectory
from kdtree_jax.model.placement import variables

def resident(peak):  # Bytes, pages of mapped files included.
  field = "VmHWM" if peak else "VmRSS"
  with open("/proc/self/status") as status:
    return 1024 * int(next(s for s in status if s.startswith(field)).split()[1])

small, large = sys.argv[1:]
kd.load_checkpoint(small)  # What JAX needs for itself.
before = resident(peak=False)
target = kd.load_checkpoint(large)
result = sum(variable[...].nbytes for variable in variables(target).values())
print(resident(peak=True) - before, result)
"""


def resident(tmp_path: Path) -> tuple[int, int]:
  """Bytes that loading "large" takes at its peak, and those of the parameters."""
  run = subprocess.run(
    [sys.executable, "-c", RESIDENT, *(str(tmp_path / s) for s in ("small", "large"))],
    env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""},
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 0, run.stderr
  used, result = map(int, run.stdout.split())
  return used, result


@linux
def test_pages_of_files_are_given_back(tmp_path):
  """The files are as large as the result; one of their tensors is there at a time."""
  sizes = {"small": (16, 64), "large": (2048, 1024)}
  for name, (vocab, hidden) in sizes.items():
    config = family(
      "kimi",
      vocab_size=vocab,
      hidden_size=hidden,
      moe_intermediate_size=hidden,
      n_routed_experts=24,
      max_position_embeddings=64,
      eos_token_id=(),
    )
    rng = np.random.default_rng(0)
    tensors = {
      key: rng.integers(0, 2**14, shape, dtype=np.uint16).view(BF16)
      for key, shape in weight_shapes(config).items()
    }
    write_tensors(tmp_path / name, tensors, 2)
    write_json(tmp_path / name / "config.json", hub_config(config))
  largest = 2 * 2048 * 1024
  used, result = resident(tmp_path)
  assert result > 30 * largest
  # Arenas of the allocator and JAX's own memory differ by some MB from run to run.
  assert used < result + largest + 24_000_000


@linux
def test_pages_of_a_drafter_are_given_back(tmp_path):
  for name, hidden in (("small", 64), ("large", 1024)):
    sizes = drafter_test.CONFIG | {
      "hidden_size": hidden,
      "intermediate_size": 4 * hidden,
      "head_dim": hidden // 4,
      "num_hidden_layers": 3,
      "layer_types": ["full_attention"] * 3,
    }
    shapes = drafter_weight_shapes(drafter_config(sizes))
    rng = np.random.default_rng(0)
    weights = {
      key: rng.integers(0, 2**14, shape, dtype=np.uint16).view(BF16)
      for key, shape in shapes.items()
    }
    drafter_test.write(tmp_path / name, weights, sizes)
  largest = 2 * 1024 * 4096
  used, result = resident(tmp_path)
  assert result > 10 * largest
  assert used < result + largest + 24_000_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["drafter", "target"])
def test_parameters_are_no_views_of_files(tmp_path, kind, dtype):
  """JAX takes over aligned memory on a CPU: that of a file, if it is given it."""
  folder = tmp_path / "d"
  if kind == "drafter":
    drafter_test.write(folder, drafter_test.tensors(np.dtype(dtype)))
  else:
    config = family("other")
    write_tensors(
      folder, {k: w.astype(dtype) for k, w in random_weights(config, 0).items()}
    )
    write_json(folder / "config.json", transformers_5(config))
  model = kd.load_checkpoint(folder, dtype)
  before = {k: np.array(v[...]) for k, v in variables(model).items()}
  # A change of the file in place, at which mapped pages change too.
  file = folder / "model.safetensors"
  with open(file, "r+b") as opened:
    opened.seek(-(file.stat().st_size - 8), 2)
    opened.write(bytes(file.stat().st_size - 8))
  for name, variable in variables(model).items():
    assert np.array(variable[...]).tobytes() == before[name].tobytes(), name


# Where parameters go.


@pytest.mark.parametrize("stored", ["directory", "file"])
def test_the_sharding_of_a_drafter(tmp_path, stored):
  """Parameters go there one by one, by the names that they have in the module."""
  path = drafter_test.write(tmp_path / "d", drafter_test.tensors())
  if stored == "file":
    path = tmp_path / "d.kdtr"
    save_drafter(path, drafter_test.EXPECTED, drafter_test.tensors())
  seen = {}

  def choose(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    seen[name] = shape
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])

  drafter = kd.load_checkpoint(path, sharding=choose)
  assert seen == {n: v.shape for n, v in variables(drafter).items()}
  assert seen["layers.1.self_attn.o_proj.kernel"] == (32, 16)
  assert seen["fc.kernel"] == (32, 16) and seen["norm.weight"] == (16,)
  with pytest.raises(ValueError, match=r"sharding\('fc.kernel', ...\) is 3"):
    kd.load_checkpoint(path, sharding=lambda *_: 3)  # type: ignore[arg-type]


def test_a_sharding_for_all(tmp_path):
  fp8_model(tmp_path)
  mesh = jax.make_mesh((1,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  target = kd.load_checkpoint(tmp_path, sharding=sharding)
  assert all(v[...].sharding == sharding for v in variables(target).values())


def test_a_function_sees_names_and_shapes(tmp_path):
  int4_model(tmp_path)
  seen = {}

  def choose(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    seen[name] = shape
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])

  target = kd.load_checkpoint(tmp_path, sharding=choose)
  assert seen == {n: v.shape for n, v in variables(target).items()}
  assert seen["embed_tokens"] == (61, 64)
  assert seen["layers.1.mlp.experts.down"][0] == 8
  assert "layers.0.self_attn.o_proj.kernel" in seen and "cos" in seen


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_a_sharding_for_a_file(name):
  mesh = jax.make_mesh((1,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  path = ROOT / "kdtree_jax" / "demo" / f"{name}.kdtr"
  model = kd.load_checkpoint(path, sharding=sharding)
  assert all(v[...].sharding == sharding for v in variables(model).values())
  plain = variables(kd.load_checkpoint(path))
  for key, variable in variables(model).items():
    np.testing.assert_array_equal(
      np.asarray(variable[...], np.float32), np.asarray(plain[key][...], np.float32)
    )


@pytest.mark.parametrize(
  ("sharding", "reason"),
  [("cpu", "sharding = 'cpu' is not allowed"), (lambda *_: 3, "is 3, not a Sharding")],
)
def test_what_is_no_sharding(tmp_path, sharding, reason):
  int4_model(tmp_path)
  with pytest.raises(ValueError, match=reason):
    kd.load_checkpoint(tmp_path, sharding=sharding)


SHARDED = """
import sys
import jax, numpy as np
import kdtree_jax as kd
from kdtree_jax.model.placement import variables

mesh = jax.make_mesh((4,), ("x",))
spec = jax.sharding.PartitionSpec

def choose(name, shape):
  axis = "x" if "experts" in name and name.endswith(("gate_up", "down")) else None
  return jax.sharding.NamedSharding(mesh, spec(axis))

whole, parts = (kd.load_checkpoint(sys.argv[1], sharding=s) for s in (None, choose))
for name, value in variables(parts).items():
  array = value[...]
  assert array.sharding == choose(name, array.shape), name
  rows = {s.data.shape[0] for s in array.addressable_shards}
  expected = array.shape[0] // (4 if array.sharding.spec[0] else 1)
  assert rows == {expected}, name
  other = np.asarray(variables(whole)[name][...])
  assert np.asarray(array).tobytes() == other.tobytes()
try:
  everything = jax.sharding.NamedSharding(mesh, spec("x"))
  kd.load_checkpoint(sys.argv[1], sharding=everything)
except ValueError as error:
  assert "sharding of 'embed_tokens' [61, 64]" in str(error), error
  print("fits")
"""


def test_four_devices(tmp_path):
  int4_model(tmp_path)
  run = subprocess.run(
    [sys.executable, "-c", SHARDED, str(tmp_path)],
    env={
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": str(ROOT),
      "PATH": "",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 0 and run.stdout == "fits\n", run.stderr
