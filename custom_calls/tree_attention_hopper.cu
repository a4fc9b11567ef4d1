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

// Patterns of swizzled lines begin at multiples of 1024 bytes, in the same place in all
// blocks of a cluster: where dynamic shared memory begins, as there is no other.
__global__ void __launch_bounds__(hopper::kThreads, 1)
    TreeAttentionHopperKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  hopper::Block(params, shared).Run();
#endif
}

template <int kSplit>
__global__ void __launch_bounds__(hopper::kSplitThreads, 1)
    TreeAttentionHopperSplitKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  hopper::SplitBlock<kSplit>(params, shared).Run();
#endif
}

KDT_HOPPER_SHARED_MEMORY(TreeAttentionHopperKernel, hopper::Shared::kBytes);
KDT_HOPPER_SHARED_MEMORY(TreeAttentionHopperSplitKernel, hopper::kSplitBytes);

bool Encode(const void* data, uint32_t rank, const cuuint64_t* sizes,
            const cuuint64_t* strides, const cuuint32_t* box, CUtensorMap* map) {
  static const EncodeTensorMap encode = FindEncodeTensorMap();
  if (encode == nullptr) return false;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data),
                sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

constexpr cuuint64_t kGroupStride = hopper::kGroupDims * 2;
constexpr cuuint64_t kRowStride = hopper::kWidth * 2;

// Of [count, rows, width]: boxes of 64 rows and one group of 64 dimensions.
bool MakeMap(const void* data, cuuint64_t count, cuuint64_t rows, CUtensorMap* map) {
  const cuuint64_t sizes[4] = {hopper::kGroupDims, rows, hopper::kGroups, count};
  const cuuint64_t strides[3] = {kRowStride, kGroupStride, kRowStride * rows};
  const cuuint32_t box[4] = {hopper::kGroupDims, hopper::kTile, 1, 1};
  return Encode(data, 4, sizes, strides, box, map);
}

// Boxes of 64 rows and a group of either half of the values.
bool MakePairsMap(const void* data, cuuint64_t count, cuuint64_t rows,
                  CUtensorMap* map) {
  const cuuint64_t sizes[5] = {hopper::kGroupDims, rows, 2, 4, count};
  const cuuint64_t strides[4] = {kRowStride, 4 * kGroupStride, kGroupStride,
                                 kRowStride * rows};
  const cuuint32_t box[5] = {hopper::kGroupDims, hopper::kTile, 2, 1, 1};
  return Encode(data, 5, sizes, strides, box, map);
}

cudaError_t Launch(cudaStream_t stream, void (*kernel)(Params), int clusters,
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

template <int kSplit>
cudaError_t LaunchSplit(cudaStream_t stream, const Params& p, int multiprocessors) {
  const int blocks = std::min(multiprocessors, kHopperSplitBlocks);
  return Launch(stream, TreeAttentionHopperSplitKernel<kSplit>,
                std::min(p.end - p.first, std::max(1, blocks / kSplit)), kSplit,
                hopper::kSplitThreads, hopper::SplitShared<kSplit>::kBytes, p);
}

// The items from `first` to `end`, with `blocks` to share one.
cudaError_t LaunchItems(cudaStream_t stream, Params p, int first, int end, int blocks,
                        int multiprocessors) {
  if (first == end) return cudaSuccess;
  p.first = first;
  p.end = end;
  if (blocks == 8) return LaunchSplit<8>(stream, p, multiprocessors);
  if (blocks == 4) return LaunchSplit<4>(stream, p, multiprocessors);
  if (blocks == 2) return LaunchSplit<2>(stream, p, multiprocessors);
  const int grid = std::min(end - first, multiprocessors);
  return Launch(stream, TreeAttentionHopperKernel, grid, 1, hopper::kThreads,
                hopper::Shared::kBytes, p);
}

// How many blocks share an item, 1, 2, 4 or 8, where there are fewer items than
// multiprocessors: so many that all run at once. It changes the speed only: no bit
// depends on it.
int BlocksPerItem(int items, int multiprocessors) {
  // A GPU's clusters lie in its groups of multiprocessors and leave some of these over:
  // an H200 with its 132 runs 14 of 8 blocks at once, 30 of 4 and 66 of 2.
  if (items <= multiprocessors / 8 - 2) return 8;
  if (items <= multiprocessors / 4 - 3) return 4;
  return items <= multiprocessors / 2 ? 2 : 1;
}

}  // namespace

cudaError_t TreeAttentionHopperRuns(bool* runs) {
  *runs = false;
  int device, major;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess || major != 9) return status;
  int reserved;
  status = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock,
                                  device);
  if (status != cudaSuccess || reserved != hopper::kReservedShared) return status;
  cudaFuncAttributes attributes;
  status = cudaFuncGetAttributes(&attributes, TreeAttentionHopperKernel);
  if (status != cudaSuccess) return status;
  // Compiled for sm_90 and not sm_90a, it is empty and needs hardly any registers.
  *runs = attributes.numRegs > 64;
  return cudaSuccess;
}

cudaError_t LaunchTreeAttentionHopper(cudaStream_t stream,
                                      const TreeAttentionArgs& args) {
  for (const void* data : {args.q, args.cache, args.tree_keys,
                           static_cast<const void*>(args.messages)}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return cudaErrorMisalignedAddress;
  }
  Params p;
  p.args = args;
  p.args.scale *= 1.44269504088896340736f;  // log2(e)
  p.row_tiles = (args.heads + hopper::kRows - 1) / hopper::kRows;
  const int64_t queries = static_cast<int64_t>(args.batch) * args.nodes;
  if (!MakeMap(args.cache, args.batch, args.capacity, &p.keys) ||
      !MakePairsMap(args.cache, args.batch, args.capacity, &p.key_pairs) ||
      !MakeMap(args.q, queries, args.heads, &p.queries)) {
    return cudaErrorNotSupported;
  }
  int device, multiprocessors;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int items = args.nodes * p.row_tiles * args.chunks * args.batch;
  if (args.blocks_per_item != 0) {
    return LaunchItems(stream, p, 0, items, args.blocks_per_item, multiprocessors);
  }
  // What is left once all multiprocessors have had as many is shared.
  const int rest = items % multiprocessors;
  const int blocks = BlocksPerItem(rest, multiprocessors);
  const int whole = blocks == 1 ? items : items - rest;
  status = LaunchItems(stream, p, 0, whole, 1, multiprocessors);
  if (status != cudaSuccess) return status;
  return LaunchItems(stream, p, whole, items, blocks, multiprocessors);
}

}  // namespace kdtree_jax
