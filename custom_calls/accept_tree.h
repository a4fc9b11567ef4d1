// Longest path of a draft tree that the target would have written itself.

#ifndef KDTREE_JAX_ACCEPT_TREE_H_
#define KDTREE_JAX_ACCEPT_TREE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

// What 48 KB of shared memory hold.
constexpr int kAcceptTreeMaxNodes = 6144;

// Shapes: B sequences, N slots. All arrays are row-major on the device. Any values are
// safe: a slot whose parent is outside 0 .. N - 1 is nobody's child, a size below 0
// counts as 0 and one above N as N, and a path through a cycle of parents ends at
// max_depth. The root is accepted whatever the size.
struct AcceptTreeArgs {
  const int32_t* token_ids;      // [B, N]
  const int32_t* parents;        // [B, N]; -1 for the root and for padding
  const int32_t* size;           // [B]
  const int32_t* target_tokens;  // [B, N]
  int32_t* path;                 // [B, max_depth + 1]; -1 padded
  int32_t* length;               // [B]
  int32_t* bonus;                // [B]
  int batch;
  int nodes;      // 1 .. kAcceptTreeMaxNodes
  int max_depth;  // 0 or more
};

cudaError_t LaunchAcceptTree(cudaStream_t stream, const AcceptTreeArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ACCEPT_TREE_H_
