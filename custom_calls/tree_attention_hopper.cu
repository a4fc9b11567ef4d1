// Tree attention for Hopper alone (sm_90a): which kernel for which shape, and their
// launch.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "shared_memory.h"
#include "tensor_map.h"
#include "tree_attention.h"
#include "tree_attention_hopper_block.cuh"
#include "tree_attention_hopper_layout.cuh"
#include "tree_attention_hopper_split.cuh"

namespace kdtree_jax {
namespace {

using hopper::Params;

template <int kCluster>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    TreeAttentionHopperKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  // Patterns of swizzled lines begin at multiples of 1024 bytes, in the same place in
  // all blocks of a cluster.
  const uint32_t pad = -SharedAddress(shared) & 1023;
  hopper::Block<kCluster>(params, shared + pad).Run();
#endif
}

template <int kSplit>
__global__ void __launch_bounds__(hopper::kSplitThreads, 1)
    TreeAttentionHopperSplitKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  const uint32_t pad = -SharedAddress(shared) & 1023;
  hopper::SplitBlock<kSplit>(params, shared + pad).Run();
#endif
}

KDT_HOPPER_SHARED_MEMORY(TreeAttentionHopperKernel, hopper::Shared::kBytes);
KDT_HOPPER_SHARED_MEMORY(TreeAttentionHopperSplitKernel,
                         std::max(hopper::SplitShared<4>::kBytes,
                                  hopper::SplitShared<8>::kBytes));

// A map of [count, groups of 64 dimensions, rows, 64 dimensions] over [count, rows,
// width].
bool MakeMap(const void* data, int64_t count, int64_t rows, uint32_t box_rows,
             uint32_t box_groups, CUtensorMap* map) {
  static const EncodeTensorMap encode = FindEncodeTensorMap();
  if (encode == nullptr) return false;
  const cuuint64_t row_bytes = hopper::kWidth * 2;
  const cuuint64_t sizes[4] = {hopper::kGroupDims, static_cast<cuuint64_t>(rows),
                               hopper::kGroups, static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[3] = {row_bytes, hopper::kGroupDims * 2,
                                 row_bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[4] = {hopper::kGroupDims, box_rows, box_groups, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data),
                sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

cudaError_t LaunchClusters(cudaStream_t stream, void (*kernel)(Params), int clusters,
                           int cluster, int threads, int bytes, const Params& p) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = clusters * cluster;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int kCluster>
cudaError_t LaunchWhole(cudaStream_t stream, Params p, int multiprocessors) {
  p.pairs = (p.args.nodes * p.row_tiles + kCluster - 1) / kCluster;
  p.items = p.pairs * p.args.chunks * p.args.batch;
  return LaunchClusters(stream, TreeAttentionHopperKernel<kCluster>,
                        std::min(p.items, multiprocessors / kCluster), kCluster,
                        hopper::kThreads, hopper::Shared::kBytes, p);
}

template <int kSplit>
cudaError_t LaunchSplit(cudaStream_t stream, const Params& p, int items) {
  return LaunchClusters(stream, TreeAttentionHopperSplitKernel<kSplit>, items, kSplit,
                        hopper::kSplitThreads, hopper::SplitShared<kSplit>::kBytes, p);
}

// Blocks that share a chunk of a row tile: 1, 4 or 8. It changes the speed only: no bit
// of the result depends on it.
int BlocksPerItem(int64_t items, int multiprocessors) {
  // Clusters of 8 and 4 are fewer at once than would fit by number.
  if (items <= multiprocessors / 8 - 3) return 8;
  // A cluster of 4 takes about half of the time that a block takes.
  const int64_t clusters = std::max(1, multiprocessors / 4 - 5);
  const int64_t split = (items + clusters - 1) / clusters;
  const int64_t whole = (items + multiprocessors - 1) / multiprocessors;
  return split < 2 * whole ? 4 : 1;
}

}  // namespace

cudaError_t TreeAttentionHopperRuns(bool* runs) {
  *runs = false;
  int device, major;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess || major != 9) return status;
  cudaFuncAttributes attributes;
  status = cudaFuncGetAttributes(&attributes, TreeAttentionHopperKernel<2>);
  if (status != cudaSuccess) return status;
  // Compiled for sm_90 and not sm_90a, it is empty and needs hardly any registers.
  *runs = attributes.numRegs > 64;
  return cudaSuccess;
}

cudaError_t LaunchTreeAttentionHopper(cudaStream_t stream,
                                      const TreeAttentionArgs& args) {
  for (const void* data : {args.q, args.cache, args.tree_keys}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return cudaErrorMisalignedAddress;
  }
  Params p;
  p.args = args;
  p.args.scale *= 1.44269504088896340736f;  // log2(e)
  p.row_tiles = (args.heads + hopper::kRows - 1) / hopper::kRows;
  const int64_t queries = static_cast<int64_t>(args.batch) * args.nodes;
  if (!MakeMap(args.cache, args.batch, args.capacity, hopper::kTile, 3, &p.keys) ||
      !MakeMap(args.cache, args.batch, args.capacity, hopper::kTile, 1, &p.values) ||
      !MakeMap(args.q, queries, args.heads, 32, 1, &p.queries)) {
    return cudaErrorNotSupported;
  }
  int device, multiprocessors;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int row_tiles = args.nodes * p.row_tiles;
  const int64_t items = static_cast<int64_t>(row_tiles) * args.chunks * args.batch;
  const int blocks = args.blocks_per_item ? args.blocks_per_item
                                          : BlocksPerItem(items, multiprocessors);
  if (blocks == 8) return LaunchSplit<8>(stream, p, items);
  if (blocks == 4) return LaunchSplit<4>(stream, p, items);
  return row_tiles > 1 ? LaunchWhole<2>(stream, p, multiprocessors)
                       : LaunchWhole<1>(stream, p, multiprocessors);
}

}  // namespace kdtree_jax
