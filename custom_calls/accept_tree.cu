// One block per sequence. Every slot finds its first child that carries the token
// which the target chose at it; one thread then follows these links from the root.
// What the walk needs lies in shared memory, so device memory is waited for once.

#include "accept_tree.h"

#include "shared_memory.h"

namespace kdtree_jax {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) AcceptTreeKernel(AcceptTreeArgs a) {
  extern __shared__ int shared[];
  const int N = a.nodes;
  int* next = shared;  // [N] slot to step to, N for none
  int* chosen = shared + N;
  const size_t row = static_cast<size_t>(blockIdx.x) * N;
  const int32_t* tokens = a.token_ids + row;
  const int32_t* parents = a.parents + row;
  const int live = min(a.size[blockIdx.x], N);

  for (int slot = threadIdx.x; slot < N; slot += kThreads) {
    next[slot] = N;
    chosen[slot] = a.target_tokens[row + slot];
  }
  __syncthreads();
  // Of several fitting children the lowest slot counts; a minimum has no order.
  for (int slot = threadIdx.x; slot < live; slot += kThreads) {
    const int parent = parents[slot];
    if (parent >= 0 && parent < N && tokens[slot] == chosen[parent]) {
      atomicMin(&next[parent], slot);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Links that form a cycle are followed until the path is full, no longer.
  int32_t* path = a.path + static_cast<size_t>(blockIdx.x) * (a.max_depth + 1);
  int slot = 0, last = 0, length = 0;
  for (int depth = 0; depth <= a.max_depth; ++depth) {
    path[depth] = slot < N ? slot : -1;
    if (slot < N) {
      last = slot;
      ++length;
      slot = next[slot];
    }
  }
  a.length[blockIdx.x] = length;
  a.bonus[blockIdx.x] = chosen[last];
}

KDT_DYNAMIC_SHARED_MEMORY(AcceptTreeKernel, 2 * sizeof(int) * kAcceptTreeMaxNodes);

}  // namespace

cudaError_t LaunchAcceptTree(cudaStream_t stream, const AcceptTreeArgs& args) {
  if (args.batch == 0) return cudaSuccess;
  if (args.nodes < 1 || args.nodes > kAcceptTreeMaxNodes || args.max_depth < 0) {
    return cudaErrorInvalidValue;
  }
  const size_t shared = 2 * sizeof(int) * args.nodes;
  AcceptTreeKernel<<<args.batch, kThreads, shared, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kdtree_jax
