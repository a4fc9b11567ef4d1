// What every handler shares: error values that name the kernel and what to do.

#ifndef KDTREE_JAX_FFI_SUPPORT_H_
#define KDTREE_JAX_FFI_SUPPORT_H_

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace kdtree_jax {

namespace ffi = xla::ffi;

// The stream argument that every handler binds first.
inline auto Bind() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>();
}

// Turns the result of a launcher into what XLA reports.
inline ffi::Error Launched(const char* kernel, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  std::string message = std::string("kdtree_jax.") + kernel + ": " +
                        cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) {
    message +=
        "; the library of custom calls has no code for this GPU. Rebuild with "
        "CMAKE_CUDA_ARCHITECTURES set to its architecture, or use "
        "implementation=\"xla\"";
  }
  return ffi::Error::Internal(message);
}

inline ffi::Error BadArgument(const char* kernel, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string("kdtree_jax.") + kernel + ": " + what);
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_FFI_SUPPORT_H_
