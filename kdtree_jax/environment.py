"""Where the package runs: versions, devices, active implementations, cache folder.

`print_environment` belongs into every bug report and beside every figure. Nothing
here is called at import.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import pathlib
import platform
import types
from collections.abc import Iterator, Mapping

import kdtree_jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Compiler options that record a whole `while_loop`, its stop included, as one CUDA
# graph. The first replaces XLA's list of what may be recorded (+NAME is understood in
# XLA_FLAGS only). WHILE without the second is slower than nothing: loops with a body
# below XLA's minimum of 5 commands are then recorded neither whole nor in part.
CAPTURED_LOOP_OPTIONS: Mapping[str, str | bool] = types.MappingProxyType(
  {
    "xla_gpu_enable_command_buffer": (
      "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",
  }
)

# The same, for the loop of rounds. What does not wait for another's result runs beside
# it: a layer's shared experts beside its routed ones, the projections of queries beside
# those of keys. (One row through 4 layers of Kimi's width on an H200: 1,591 us instead
# of 1,693.)
DECODE_LOOP_OPTIONS: Mapping[str, str | bool] = types.MappingProxyType(
  {**CAPTURED_LOOP_OPTIONS, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
)

_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")


def compilation_cache_dir() -> pathlib.Path:
  """Folder of the user's cache for compiled programs. It may not exist yet.

  It is a place to hand to `jax_compilation_cache_dir`; the library itself never
  sets that, commands and tests do.

  Returns:
    `$XDG_CACHE_HOME/kdtree_jax/xla`, or `~/.cache/kdtree_jax/xla`.
  """
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "kdtree_jax" / "xla"


def recommended_xla_flags() -> str:
  """Value of `XLA_FLAGS` for programs that call the steps of a round in their own jit.

  The first two flags record a loop of rounds as one CUDA graph, the third lets what is
  independent in it run side by side, the fourth keeps two programs from summing in
  different orders (see `docs/exactness.md`). `kdtree_jax.decode` passes the same to the
  compiler by itself. They must be in the environment before JAX starts its backend;
  graphs of loops need a CUDA driver of 12.4 or later, older ones ignore them.
  """
  return (
    "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT "
    "--xla_gpu_experimental_enable_fusion_autotuner=false"
  )


def print_environment() -> None:
  """Prints versions, devices, XLA's flags, and which form of each op is active and why.

  It starts JAX's backend where that has not happened yet.
  """
  lines = [*_versions(), *_devices(), *_variables(), *_library(), *_operations()]
  for name, value in lines:
    print(f"{name:<26} {value}")


def _versions() -> Iterator[tuple[str, str]]:
  yield "kdtree_jax", kdtree_jax.__version__
  yield "python", f"{platform.python_version()} on {platform.platform()}"
  for package in _PACKAGES:
    yield package, importlib.metadata.version(package)


def _devices() -> Iterator[tuple[str, str]]:
  import jax  # Here and below, so that the cache folder can be asked for without JAX.

  for device in jax.devices():
    capability = getattr(device, "compute_capability", None)
    detail = "" if capability is None else f", compute capability {capability}"
    yield f"device {device.id}", f"{device.platform}: {device.device_kind}{detail}"
  # XLA's own words: on a GPU the version of CUDA that it was built with.
  yield "backend", " ".join(jax.devices()[0].client.platform_version.split())
  with contextlib.suppress(OSError):
    yield "driver", _DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ")


def _variables() -> Iterator[tuple[str, str]]:
  for variable in _VARIABLES:
    yield variable, os.environ.get(variable, "(not set)")


def _library() -> Iterator[tuple[str, str]]:
  """The CUDA custom calls: where they lie and what they were built for."""
  from kdtree_jax.ops import _library

  yield "cuda library", str(_library.find() or "(not built)")
  with contextlib.suppress(_library.UnusableError):
    info = _library.build_info()
    code = ", ".join((*info.architectures, *info.ptx))
    yield "cuda library is for", f"{code}; built with nvcc {info.cuda}"
    here = _library.ffi_api()
    yield (
      "cuda library's FFI API",
      f"{_dotted(info.ffi_api)} (headers of jaxlib {info.jaxlib}); "
      f"this jaxlib has {_dotted(here) if here else 'an unknown one'}",
    )


def _operations() -> Iterator[tuple[str, str]]:
  """Each op with the form that "auto" takes here, then what keeps ops from CUDA."""
  import jax

  from kdtree_jax import ops
  from kdtree_jax.ops import _implementation, _tree_attention_cuda

  reasons: dict[tuple[str, str], list[str]] = {}
  public = {
    op
    for op in ops.__all__
    if "implementation" in inspect.signature(getattr(ops, op)).parameters
  }
  # One, `emit`, is no function of its own.
  for op in sorted(public | _implementation.CUDA_OPS):
    form, reason = _implementation.active(op)
    yield f"op {op}", form
    if reason is not None:
      reasons.setdefault((form, reason), []).append(op)
    elif op == "tree_attention" and form == "cuda":
      yield f"kernel of {op}", _tree_attention_cuda.describe_kernel(jax.devices()[0])
  for (form, reason), names in reasons.items():
    yield f"why {form}", f"{', '.join(names)}: {reason}"


def _dotted(version: tuple[int, int]) -> str:
  return ".".join(map(str, version))
