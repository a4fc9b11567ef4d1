// The driver's function that makes tensor maps, without linking to the driver: programs
// without a GPU load this library too.

#ifndef KDTREE_JAX_TENSOR_MAP_H_
#define KDTREE_JAX_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace kdtree_jax {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Null where the driver has none.
inline EncodeTensorMap FindEncodeTensorMap() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess) {
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeTensorMap>(function)
             : nullptr;
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TENSOR_MAP_H_
