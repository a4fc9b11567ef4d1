// Kernels that start before the one launched before them on the stream has ended.

#ifndef KDTREE_JAX_LAUNCH_EARLY_CUH_
#define KDTREE_JAX_LAUNCH_EARLY_CUH_

#include <cuda_runtime.h>

#include <utility>

namespace kdtree_jax {

// As kernel<<<grid, block, shared, stream>>>(args...). An `early` one may begin before the
// kernel launched before it on the stream has ended, and must call WaitForKernelBefore.
template <typename... Parameters, typename... Args>
cudaError_t LaunchKernel(cudaStream_t stream, bool early, dim3 grid, dim3 block,
                         size_t shared, void (*kernel)(Parameters...), Args&&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

// Of kernels launched with programmatic stream serialization: waits until the kernel before
// has ended and what it wrote is seen. Returns at once in others.
__device__ __forceinline__ void WaitForKernelBefore() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be started, once all blocks have come here or ended.
__device__ __forceinline__ void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_LAUNCH_EARLY_CUH_
