// Matrix products in fp32 arithmetic on the ordinary cores.
//
// K is cut into equal parts, a multiple of kStep long, one for each warp of a cluster
// of blocks. A warp multiplies all rows of the block by 32 columns of w over its part,
// k ascending, and needs no other warp meanwhile. The sums of the warps are added in
// ascending order within a block, then those of the blocks. The length of a part and
// the number of blocks are functions of K and N; the rows of a block are not, and do
// not show in the bits.

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <initializer_list>

#include "matmul.h"
#include "matmul_simt_loads.cuh"
#include "shared_memory.h"

namespace kdtree_jax {
namespace {

namespace cg = cooperative_groups;
using namespace simt;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMostCluster = 8;
constexpr int kTargetBlocks = 132;
constexpr int kLeastPart = 32;  // where K is split over blocks
// Of a warp: for the steps in flight, then for its sums.
constexpr int kWarpBytes = 12 * 1024;
constexpr int kSharedBytes = kWarps * kWarpBytes;
constexpr int kWeightBytes = kStep * kColumns * static_cast<int>(sizeof(float));
static_assert(kChunkRowsFloat32 * kColumns * sizeof(float) <= kWarpBytes, "");

// Multiplies a tile of up to 8 * kRowsPerLane rows over this warp's part of K. The
// sums replace the steps in `memory`, [rows, kColumns].
template <typename T, bool kVectors, int kRowsPerLane>
__device__ __forceinline__ void Multiply(const Params& p, const Tile& tile, int part,
                                         char* memory) {
  using Rows = RowLoader<T, 8 * kRowsPerLane, kVectors>;
  constexpr int kStageBytes = kWeightBytes + Rows::kBytes;
  constexpr int kStages = kWarpBytes / kStageBytes < 8 ? kWarpBytes / kStageBytes : 8;
  static_assert(kStages >= 3, "too little in flight");
  const int lane = threadIdx.x % 32;
  // Lanes that share a row or columns differ in the lowest two bits, so that shared
  // memory answers neighbours at once.
  const int lane_column = (lane & 1) | (lane >> 1 & 2);
  const int lane_row = (lane >> 1 & 1) | (lane >> 2 & 6);

  const int64_t begin = static_cast<int64_t>(part) * p.part;
  const int first = static_cast<int>(min(begin, static_cast<int64_t>(p.a.depth)));
  const int end = min(first + p.part, p.a.depth);
  const int steps = (end - first + kStep - 1) / kStep;
  Rows x(p, tile, first, end);
  WeightLoader<kVectors> w(p, tile, first, end);
  const auto load = [&](int step, char* stage) {
    if (step < steps) {
      w.Load(reinterpret_cast<float*>(stage));
      x.Load(reinterpret_cast<T*>(stage + kWeightBytes));
    }
    CommitCopies();
  };

  float sums[kRowsPerLane][8];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[i][j] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    load(step, memory + step * kStageBytes);
  }
  char* stage = memory;
  char* free_stage = memory + (kStages - 1) * kStageBytes;
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kStages - 2>();
    __syncwarp();  // This step is there for all lanes, and all are done with the last.
    load(step + kStages - 1, free_stage);
    const float* weights = reinterpret_cast<const float*>(stage) + 4 * lane_column;
    const T* rows = reinterpret_cast<const T*>(stage + kWeightBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 xs[kRowsPerLane];
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
        xs[i] = LoadFour(rows + Rows::Offset(lane_row + 8 * i, half));
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 low = LoadFour(weights + (4 * half + k) * kColumns);
        const float4 high = LoadFour(weights + (4 * half + k) * kColumns + 16);
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float weight = Element(j < 4 ? low : high, j % 4);
            sums[i][j] = __fmaf_rn(Element(xs[i], k), weight, sums[i][j]);
          }
        }
      }
    }
    free_stage = stage;
    stage += kStageBytes;
    if (stage == memory + kStages * kStageBytes) stage = memory;
  }
  WaitForCopies<0>();
  __syncwarp();
  float* out = reinterpret_cast<float*>(memory) + 4 * lane_column;
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    float4* row = reinterpret_cast<float4*>(out + (lane_row + 8 * i) * kColumns);
    row[0] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    row[4] = make_float4(sums[i][4], sums[i][5], sums[i][6], sums[i][7]);
  }
}

__device__ __forceinline__ float RoundToBf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// silu(gate) * up, rounded after each step as arrays of the result's dtype are.
__device__ __forceinline__ float SiluTimes(float gate, float up, bool to_float32) {
  if (!to_float32) {
    gate = RoundToBf16(gate);
    up = RoundToBf16(up);
  }
  const float sigmoid = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-gate)));
  float silu = __fmul_rn(gate, sigmoid);
  if (!to_float32) silu = RoundToBf16(silu);
  return __fmul_rn(silu, up);
}

// Adds the sums of all warps of the cluster and writes the outputs.
__device__ __forceinline__ void Finish(const Params& p, const Tile& tile,
                                       const cg::cluster_group& cluster, float* own) {
  constexpr int kWarpFloats = kWarpBytes / sizeof(float);
  const MatmulArgs& a = p.a;
  const int blocks = cluster.num_blocks(), rank = cluster.block_rank();
  const auto add_warps = [&](int at) {
    float sum = own[at];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = __fadd_rn(sum, own[w * kWarpFloats + at]);
    return sum;
  };
  if (blocks > 1) {
    for (int at = threadIdx.x; at < tile.rows * kColumns; at += kThreads) {
      own[at] = add_warps(at);  // Nobody else reads this element of warp 0.
    }
    cluster.sync();
  }
  const auto total = [&](int at) {
    if (blocks == 1) return add_warps(at);
    float sums[kMostCluster];
#pragma unroll
    for (int b = 0; b < kMostCluster; ++b) {
      if (b < blocks) sums[b] = cluster.map_shared_rank(own, b)[at];
    }
    float sum = sums[0];
#pragma unroll
    for (int b = 1; b < kMostCluster; ++b) {
      if (b < blocks) sum = __fadd_rn(sum, sums[b]);
    }
    return sum;
  };
  const int width = a.gated ? kColumns / 2 : kColumns;
  const int features = a.gated ? a.features / 2 : a.features;
  for (int i = rank * kThreads + threadIdx.x; i < tile.rows * width;
       i += blocks * kThreads) {
    const int row = i / width, column = tile.index * width + i % width;
    if (column >= features) continue;
    const int at = row * kColumns + i % width;
    float x = total(at);
    if (a.gated) x = SiluTimes(x, total(at + kColumns / 2), a.out_float32);
    const int64_t place = tile.group * a.out_group_stride +
                          Place(a.out_rows, tile.first_row + row) * a.out_row_stride +
                          column;
    if (a.out_float32) {
      static_cast<float*>(a.out)[place] = x;
    } else {
      static_cast<__nv_bfloat16*>(a.out)[place] = __float2bfloat16_rn(x);
    }
  }
  if (blocks > 1) cluster.sync();  // No block may end while another reads its sums.
}

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, 1)
    MatmulSimtKernel(const __grid_constant__ Params p) {
  extern __shared__ float4 memory[];
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = cluster.block_rank();
  Tile tile;
  tile.index = blockIdx.x / cluster.num_blocks();
  if (p.a.chunks != nullptr) {
    // The same in all blocks of a cluster, and so is whether they leave here.
    if (static_cast<int>(blockIdx.y) >= *p.a.num_chunks) return;
    const RowChunk& chunk = p.a.chunks[blockIdx.y];
    tile.group = chunk.group;
    tile.first_row = chunk.first;
    tile.rows = min(chunk.count, kChunkRowsFloat32);
  } else {
    tile.group = blockIdx.z;
    tile.first_row = blockIdx.y * p.block_rows;
    tile.rows = min(p.block_rows, p.a.rows - tile.first_row);
  }

  if (tile.rows < 1) return;

  const int warp = threadIdx.x / 32, part = rank * kWarps + warp;
  char* own = reinterpret_cast<char*>(memory) + warp * kWarpBytes;
  if (tile.rows <= 8) {
    Multiply<T, kVectors, 1>(p, tile, part, own);
  } else if (tile.rows <= 16) {
    Multiply<T, kVectors, 2>(p, tile, part, own);
  } else if (tile.rows <= 32) {
    Multiply<T, kVectors, 4>(p, tile, part, own);
  } else {
    Multiply<T, kVectors, 8>(p, tile, part, own);
  }
  __syncthreads();
  Finish(p, tile, cluster, reinterpret_cast<float*>(memory));
}

KDT_DYNAMIC_SHARED_MEMORY(MatmulSimtKernel, kSharedBytes);

int64_t DivideUp(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Blocks that share K: few columns must fill the GPU. A function of K and N alone.
int ClusterSize(int depth, int features) {
  const int64_t tiles = DivideUp(features, kColumns);
  int size = 1;
  while (size < kMostCluster && tiles * size * 2 <= kTargetBlocks &&
         depth >= 2 * size * kWarps * kLeastPart) {
    size *= 2;
  }
  return size;
}

bool IsAligned(const void* array, int64_t element_bytes,
               std::initializer_list<int64_t> offsets) {
  if (reinterpret_cast<uintptr_t>(array) % 16 != 0) return false;
  for (const int64_t offset : offsets) {
    if (offset * element_bytes % 16 != 0) return false;
  }
  return true;
}

using Kernel = void (*)(Params);

template <typename T>
Kernel KernelFor(bool vectors) {
  return vectors ? MatmulSimtKernel<T, true> : MatmulSimtKernel<T, false>;
}

}  // namespace

cudaError_t LaunchMatmulSimt(cudaStream_t stream, const MatmulArgs& args) {
  if (args.kind == WeightKind::kBf16 || args.depth < 0 || args.rows < 0 ||
      (args.gated && args.features % 2 != 0)) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0 || args.features == 0 || args.groups == 0 ||
      (args.chunks != nullptr && args.max_chunks == 0)) {
    return cudaSuccess;
  }
  Params p;
  p.a = args;
  const int cluster_size = ClusterSize(args.depth, args.features);
  p.part = static_cast<int>(
      DivideUp(DivideUp(args.depth, cluster_size * kWarps), kStep) * kStep);
  const bool vectors =
      IsAligned(args.x, args.x_float32 ? 4 : 2,
                {args.x_row_stride, args.x_group_stride}) &&
      args.kind == WeightKind::kFloat32 && !args.w_by_feature &&
      IsAligned(args.w, 4,
                {args.w_row_stride, args.w_group_stride,
                 args.gated ? args.features / 2 : 0});

  const int64_t blocks =
      DivideUp(args.features, kColumns) * cluster_size;  // gated: as many
  int64_t row_blocks = args.max_chunks, groups = 1;
  if (args.chunks == nullptr) {
    // As few rows a block as still fit the GPU at once.
    groups = args.groups;
    p.block_rows = 8;
    while (p.block_rows < kChunkRowsFloat32 &&
           DivideUp(args.rows, p.block_rows) * blocks * groups > kTargetBlocks) {
      p.block_rows *= 2;
    }
    row_blocks = DivideUp(args.rows, p.block_rows);
  }
  if (blocks > INT32_MAX || row_blocks > 65535 || groups > 65535) {
    return cudaErrorInvalidValue;
  }

  const auto kernel = args.x_float32
                          ? KernelFor<float>(vectors)
                          : KernelFor<__nv_bfloat16>(vectors);
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = cluster_size;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks),
                        static_cast<unsigned>(row_blocks),
                        static_cast<unsigned>(groups));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace kdtree_jax
