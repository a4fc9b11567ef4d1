// One block per sequence. Every slot finds its first child that carries the token
// which the target chose at it; one thread then follows these links from the root.

#include "accept_tree.h"

namespace kdtree_jax {
namespace {

__global__ void AcceptTreeKernel(AcceptTreeArgs a) {
  __shared__ int next[kAcceptTreeMaxNodes];
  const int b = blockIdx.x;
  const int N = a.nodes;
  const int32_t* tokens = a.token_ids + b * N;
  const int32_t* parents = a.parents + b * N;
  const int32_t* chosen = a.target_tokens + b * N;
  const int live = min(a.size[b], N);

  for (int slot = threadIdx.x; slot < N; slot += blockDim.x) next[slot] = N;
  __syncthreads();
  // Of several fitting children the lowest slot counts; a minimum has no order.
  for (int slot = threadIdx.x; slot < live; slot += blockDim.x) {
    const int parent = parents[slot];
    if (parent >= 0 && parent < N && tokens[slot] == chosen[parent]) {
      atomicMin(&next[parent], slot);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t* path = a.path + b * (a.max_depth + 1);
  int slot = 0, last = 0, length = 0;
  for (int depth = 0; depth <= a.max_depth; ++depth) {
    path[depth] = slot < N ? slot : -1;
    if (slot < N) {
      last = slot;
      ++length;
      slot = next[slot];
    }
  }
  a.length[b] = length;
  a.bonus[b] = chosen[last];
}

}  // namespace

cudaError_t LaunchAcceptTree(cudaStream_t stream, const AcceptTreeArgs& args) {
  if (args.batch == 0) return cudaSuccess;
  AcceptTreeKernel<<<args.batch, 128, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kdtree_jax
