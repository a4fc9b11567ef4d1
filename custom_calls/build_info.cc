// What the library was built from and for, as JSON, so that the Python side can tell
// whether it fits before it registers anything.

#include <string>

#include "build_config.h"
#include "shared_memory.h"
#include "xla/ffi/api/c_api.h"

namespace kdtree_jax {
namespace {

std::string BuildInfo() {
  std::string json = std::string("{") + kBuildConfig + ",\n\"ffi_api\": [" +
                     std::to_string(XLA_FFI_API_MAJOR) + ", " +
                     std::to_string(XLA_FFI_API_MINOR) +
                     "],\n\"dynamic_shared_memory\": {";
  const char* separator = "";
  for (const auto* use = DynamicSharedMemory::first; use != nullptr; use = use->next) {
    json += separator;
    json += "\"" + std::string(use->kernel) + "\": " + std::to_string(use->bytes);
    separator = ", ";
  }
  return json + "}}";
}

}  // namespace
}  // namespace kdtree_jax

// Keys:
//   version                of kdtree_jax; first of all, the loader stops at another one
//   interface              of the handlers: INTERFACE in kdtree_jax/ops/_library.py
//   cuda                   version of nvcc
//   architectures, ptx     compiled and intermediate code: ["sm_90a", "sm_120"], []
//   jaxlib, ffi_api        whose headers these are, and their [major, minor]
//   dynamic_shared_memory  kernel -> most bytes
extern "C" const char* kdtree_jax_build_info() {
  static const std::string json = kdtree_jax::BuildInfo();
  return json.c_str();
}
