// Longest path of a draft tree that the target would have written itself.

#ifndef KDTREE_JAX_ACCEPT_TREE_H_
#define KDTREE_JAX_ACCEPT_TREE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

constexpr int kAcceptTreeMaxNodes = 1024;

// Shapes: B sequences, N slots. All arrays are row-major on the device.
struct AcceptTreeArgs {
  const int32_t* token_ids;      // [B, N]
  const int32_t* parents;        // [B, N]; -1 for the root and for padding
  const int32_t* size;           // [B]
  const int32_t* target_tokens;  // [B, N]
  int32_t* path;                 // [B, max_depth + 1]; -1 padded
  int32_t* length;               // [B]
  int32_t* bonus;                // [B]
  int batch;
  int nodes;
  int max_depth;
};

cudaError_t LaunchAcceptTree(cudaStream_t stream, const AcceptTreeArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ACCEPT_TREE_H_
