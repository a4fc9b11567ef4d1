// One warp per slot: it clears its row of the table, then walks up from the slot.

#include "tree_ancestors.h"

#include "shared_memory.h"

namespace kdtree_jax {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Grid: [B * blocks_per_tree].
__global__ void __launch_bounds__(kThreads)
    TreeAncestorsKernel(TreeAncestorsArgs a, int blocks_per_tree) {
  extern __shared__ int memory[];
  const int N = a.nodes, A = a.max_depth + 1;
  const int lane = threadIdx.x % 32;
  const int b = blockIdx.x / blocks_per_tree;
  int* parents = memory;
  int* depths = memory + N;
  for (int i = threadIdx.x; i < N; i += kThreads) {
    parents[i] = a.parents[static_cast<int64_t>(b) * N + i];
    depths[i] = a.depths[static_cast<int64_t>(b) * N + i];
  }
  __syncthreads();
  const int slot = blockIdx.x % blocks_per_tree * kWarps + threadIdx.x / 32;
  if (slot >= N) return;
  int32_t* row = a.ancestors + (static_cast<int64_t>(b) * N + slot) * A;
  for (int depth = lane; depth < A; depth += 32) row[depth] = -1;
  __syncwarp();
  if (lane != 0) return;
  int node = slot;
  while (true) {
    const int depth = depths[node];
    if (depth >= 0 && depth < A) row[depth] = node;
    const int parent = parents[node];
    if (parent < 0 || parent >= node) return;  // always ends: slots only go down
    node = parent;
  }
}

KDT_DYNAMIC_SHARED_MEMORY(TreeAncestorsKernel,
                          2 * sizeof(int) * kTreeAncestorsMaxNodes);

}  // namespace

cudaError_t LaunchTreeAncestors(cudaStream_t stream, const TreeAncestorsArgs& args) {
  if (args.batch == 0 || args.nodes == 0) return cudaSuccess;
  if (args.nodes > kTreeAncestorsMaxNodes || args.max_depth < 0) {
    return cudaErrorInvalidValue;
  }
  const int per_tree = (args.nodes + kWarps - 1) / kWarps;
  const size_t bytes = 2 * sizeof(int) * args.nodes;
  TreeAncestorsKernel<<<args.batch * per_tree, kThreads, bytes, stream>>>(args,
                                                                          per_tree);
  return cudaGetLastError();
}

}  // namespace kdtree_jax
