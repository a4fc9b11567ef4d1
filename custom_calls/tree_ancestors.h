// The ancestors of every slot of a draft tree, by depth.

#ifndef KDTREE_JAX_TREE_ANCESTORS_H_
#define KDTREE_JAX_TREE_ANCESTORS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

constexpr int kTreeAncestorsMaxNodes = 4096;

// Shapes: B sequences, N slots, A = 1 + max_depth. Row-major on the device.
struct TreeAncestorsArgs {
  const int32_t* parents;  // [B, N]; -1 for the root and for padding
  const int32_t* depths;   // [B, N]
  int32_t* ancestors;      // [B, N, A]; -1 where there is none
  int batch;
  int nodes;  // N, at most kTreeAncestorsMaxNodes
  int max_depth;
};

// A parent that does not lie before its child ends the child's path.
cudaError_t LaunchTreeAncestors(cudaStream_t stream, const TreeAncestorsArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ANCESTORS_H_
