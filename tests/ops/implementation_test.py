"""Which form of an op is traced, and what is said where that cannot be."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdtree_jax.ops import _implementation, _library


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What the checks ask of a device."""

  device_kind: str = "NVIDIA Something"
  platform: str = "gpu"
  compute_capability: str = "9.0"


def info(*architectures: str, ptx: tuple[str, ...] = ()) -> _library.BuildInfo:
  return _library.BuildInfo(
    version="1",
    interface=1,
    cuda="13.0.88",
    architectures=architectures,
    ptx=ptx,
    jaxlib="0.10.2",
    ffi_api=(0, 3),
    dynamic_shared_memory={},
  )


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
  """As if there were a library, for sm_90a and sm_120, and "rope" had a CUDA form."""
  monkeypatch.setattr(_library, "why_not", lambda: None)
  monkeypatch.setattr(_library, "build_info", lambda: info("sm_90a", "sm_120"))
  monkeypatch.setattr(_implementation, "CUDA_OPS", frozenset({"rope"}))
  _library.why_not_on.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, device: object) -> None:
  monkeypatch.setattr(_implementation, "_default_device", lambda: device)


def dispatch(implementation: str, *arguments) -> jax.Array:
  return _implementation.dispatch(
    "rope", implementation, lambda x: x + 1, lambda x: x + 2, *arguments
  )


def test_auto_is_the_form_for_the_platform(built: None):
  assert _implementation.resolve("rope", "auto") == "platform"
  assert _implementation.resolve("rope", "xla") == "xla"
  assert _implementation.resolve("rope", "cuda") == "cuda"


def test_without_the_library_auto_is_xla_and_cuda_says_why(
  monkeypatch: pytest.MonkeyPatch,
):
  monkeypatch.setattr(_library, "why_not", lambda: "no nvcc was found")
  monkeypatch.setattr(_implementation, "CUDA_OPS", frozenset({"rope"}))
  assert _implementation.resolve("rope", "auto") == "xla"
  assert _implementation.active("rope") == ("xla", "no nvcc was found")
  with pytest.raises(NotImplementedError, match="of rope.*no nvcc.*'xla' or 'auto'"):
    _implementation.resolve("rope", "cuda")


def test_an_op_without_a_cuda_form_says_so(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(_implementation, "CUDA_OPS", frozenset())
  with pytest.raises(NotImplementedError, match="no CUDA form.*'xla' or 'auto'"):
    _implementation.resolve("rope", "cuda")


def test_unknown_names_are_refused_with_the_allowed_ones():
  with pytest.raises(ValueError, match="'triton' of rope .*'auto', 'xla', 'cuda'"):
    _implementation.resolve("rope", "triton")


def test_a_gpu_with_code_is_used(built: None, monkeypatch: pytest.MonkeyPatch):
  use(monkeypatch, Gpu())
  assert _implementation.active("rope") == ("cuda", None)
  _implementation.check_runs("rope", "cuda")
  assert dispatch("auto", jnp.zeros(())) == 2  # The arrays are on the CPU in fact.


@pytest.mark.parametrize("implementation", ["auto", "cuda"])
def test_a_gpu_without_code_is_an_error(
  built: None, monkeypatch: pytest.MonkeyPatch, implementation: str
):
  use(monkeypatch, Gpu("NVIDIA A100", compute_capability="8.0"))
  message = (
    f"'{implementation}' of rope .*NVIDIA A100 .*8.0, sm_80.* built for sm_90a, sm_120"
    ".*CMAKE_CUDA_ARCHITECTURES='90a-real;120-real;80-real'.*implementation='xla'"
  )
  for call in (
    lambda: dispatch(implementation, jnp.zeros(())),
    lambda: _implementation.check_runs("rope", implementation),
  ):
    with pytest.raises(NotImplementedError, match=message):
      call()
  assert _implementation.active("rope")[0] == "none"
  assert dispatch("xla", jnp.zeros(())) == 2


def test_a_gpu_of_another_maker_gets_the_xla_form(
  built: None, monkeypatch: pytest.MonkeyPatch
):
  use(monkeypatch, Gpu("AMD Instinct", compute_capability="gfx942"))
  assert dispatch("auto", jnp.zeros(())) == 2


@pytest.mark.parametrize(
  ("built_for", "ptx", "runs", "does_not"),
  [
    (("sm_90a", "sm_120"), (), ("9.0", "12.0", "12.1"), ("8.0", "8.9", "10.0")),
    (("sm_80",), (), ("8.0", "8.6", "8.9"), ("9.0", "7.5")),
    (("sm_89",), (), ("8.9",), ("8.0", "8.6")),
    (("sm_120f",), (), ("12.0", "12.1"), ("11.0", "13.0")),
    (("sm_120a",), (), ("12.0",), ("12.1",)),
    ((), ("compute_80",), ("8.0", "9.0", "12.1"), ("7.5",)),
    ((), ("compute_90a",), ("9.0",), ("10.0",)),
    ((), (), (), ("9.0",)),
  ],
)
def test_which_gpus_run_what_was_compiled(built_for, ptx, runs, does_not):
  library = info(*built_for, ptx=ptx)
  assert all(library.runs_on(capability) for capability in runs)
  assert not any(library.runs_on(capability) for capability in does_not)


def test_cuda_with_arrays_on_the_cpu_is_refused_in_python(built: None):
  cpu = jax.devices("cpu")[0]
  x = jax.device_put(np.zeros(3, np.float32), cpu)
  with pytest.raises(NotImplementedError, match="'cuda' of rope needs .*cpu:0.*'xla'"):
    dispatch("cuda", x)
  assert dispatch("auto", x).tolist() == [2, 2, 2]


def test_cuda_without_a_gpu_is_refused_before_a_program_is_made(
  built: None, monkeypatch: pytest.MonkeyPatch
):
  use(monkeypatch, jax.devices("cpu")[0])
  with pytest.raises(NotImplementedError, match="'cuda' of rope needs .* is a cpu"):
    _implementation.check_runs("rope", "cuda")
  _implementation.check_runs("rope", "auto")
  _implementation.check_runs("rope", "xla")


def test_programs_for_cuda_can_be_lowered_without_a_gpu(
  built: None, monkeypatch: pytest.MonkeyPatch
):
  use(monkeypatch, jax.devices("cpu")[0])
  for implementation in ("auto", "cuda"):
    f = jax.jit(lambda x, name=implementation: dispatch(name, x))
    traced = f.trace(jax.ShapeDtypeStruct((), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dense<1.0" in text and "dense<2.0" not in text


def test_a_chosen_default_device_counts(built: None, monkeypatch: pytest.MonkeyPatch):
  cpu = jax.devices("cpu")[0]
  with jax.default_device(cpu):
    assert _implementation._default_device() == cpu
  with jax.default_device("cpu"):
    assert _implementation._default_device() == cpu
