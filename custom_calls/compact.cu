// One block per (layer, sequence, index of the path) copies one key. Blocks behind the
// end of a path leave at once. No two blocks write to the same row: the positions of a
// path are distinct.

#include "compact.h"

namespace kdtree_jax {
namespace {

constexpr int kThreads = 96;  // a row of 576 bf16 values is 72 vectors of 16 bytes

template <typename Vector>
__global__ void __launch_bounds__(kThreads) CompactKernel(CompactArgs a) {
  const unsigned i = blockIdx.x % a.path_len;
  const unsigned layer_row = blockIdx.x / a.path_len;  // layer * B + b
  const unsigned b = layer_row % a.batch;
  if (static_cast<int>(i) >= a.length[b]) return;
  // Unsigned, since a signed sum may not overflow. It wraps below 0: dropped.
  const int position = static_cast<int>(static_cast<unsigned>(a.start[b]) + i);
  if (position < 0 || position >= a.capacity) return;
  const int slot = min(max(a.path[b * a.path_len + i], 0), a.nodes - 1);

  const size_t vectors = a.row_bytes / sizeof(Vector);
  const Vector* from = static_cast<const Vector*>(a.tree_keys) +
                       (static_cast<size_t>(layer_row) * a.nodes + slot) * vectors;
  Vector* to = static_cast<Vector*>(a.cache) +
               (static_cast<size_t>(layer_row) * a.capacity + position) * vectors;
  for (size_t v = threadIdx.x; v < vectors; v += kThreads) to[v] = from[v];
}

bool IsMultiple(const CompactArgs& a, size_t bytes) {
  return a.row_bytes % bytes == 0 &&
         reinterpret_cast<uintptr_t>(a.cache) % bytes == 0 &&
         reinterpret_cast<uintptr_t>(a.tree_keys) % bytes == 0;
}

}  // namespace

cudaError_t LaunchCompact(cudaStream_t stream, const CompactArgs& args) {
  const int64_t blocks =
      static_cast<int64_t>(args.layers) * args.batch * args.path_len;
  if (blocks == 0 || args.nodes == 0 || args.capacity == 0 || args.row_bytes == 0) {
    return cudaSuccess;
  }
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (IsMultiple(args, sizeof(uint4))) {
    CompactKernel<uint4><<<grid, kThreads, 0, stream>>>(args);
  } else if (IsMultiple(args, sizeof(uint32_t))) {
    CompactKernel<uint32_t><<<grid, kThreads, 0, stream>>>(args);
  } else if (IsMultiple(args, sizeof(uint16_t))) {
    CompactKernel<uint16_t><<<grid, kThreads, 0, stream>>>(args);
  } else {
    CompactKernel<uint8_t><<<grid, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace kdtree_jax
