// Reads a row of V floats by a cluster of blocks.
//
// Part p of P takes the groups of four consecutive elements g with g / blockDim.x % P
// == p, in ascending order per thread. Which thread takes which element depends on V
// alone, and not on how the row is aligned.

#ifndef KDTREE_JAX_ROWS_CUH_
#define KDTREE_JAX_ROWS_CUH_

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree_jax {

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / 32;

// Blocks that share a row: few rows must fill the GPU.
inline int RowParts(int vocab) { return vocab >= 16384 ? 8 : 1; }

inline bool RowsAreAligned(const float* rows, int vocab) {
  return vocab % 4 == 0 && reinterpret_cast<uintptr_t>(rows) % 16 == 0;
}

// Elements 4 * group .. 4 * group + 3; -inf beyond the end of the row.
template <bool kAligned>
__device__ inline float4 LoadGroup(const float* row, int group, int vocab) {
  if constexpr (kAligned) return reinterpret_cast<const float4*>(row)[group];
  const int i = 4 * group;
  const float none = -INFINITY;
  return make_float4(row[i], i + 1 < vocab ? row[i + 1] : none,
                     i + 2 < vocab ? row[i + 2] : none,
                     i + 3 < vocab ? row[i + 3] : none);
}

// Calls visit(group, elements) for the groups of this thread.
template <bool kAligned, typename Visit>
__device__ inline void ForEachGroup(const float* row, int vocab, int part, int parts,
                                    Visit visit) {
  const int groups = (vocab + 3) / 4;
#pragma unroll 4
  for (int g = part * kRowThreads + threadIdx.x; g < groups; g += parts * kRowThreads) {
    visit(g, LoadGroup<kAligned>(row, g, vocab));
  }
}

// Launches `kernel(args, parts)` with one cluster of `parts` blocks for each row.
template <typename Args>
cudaError_t LaunchRows(cudaStream_t stream, void (*kernel)(Args, int), const Args& args,
                       int rows, int parts) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = parts;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows) * parts);
  config.blockDim = dim3(kRowThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, parts);
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROWS_CUH_
