// Products with bf16 rows on the tensor cores, bound by the bytes of the weights.
//
// A block holds 128 (int4: 64) output features by up to 64 rows and walks over K. One warp
// feeds a ring of stages in shared memory: the copy engine brings weights, cp.async or the
// engine brings rows. Four warps multiply, weights as the 16-row operand, rows as the
// 8-column operand: columns do not meet, so a row's bits do not depend on its neighbours.
// Per output element k ascends in steps of 16 inside of each part of K (int4: even and odd
// steps apart). The parts, whose number follows from K, N and whether rows come in a list,
// are the blocks of a cluster and are added in order.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "bulk_copy.cuh"
#include "launch_early.cuh"
#include "matmul.h"
#include "matmul_pipeline.cuh"
#include "matmul_tiles.cuh"
#include "mma.cuh"
#include "shared_memory.h"
#include "tensor_map.h"

namespace kdtree_jax {
namespace {

// The rows' operand of k step `step` of slab s: [k 16, rows 8] for kTiles tiles of rows.
template <class Tiles, int kTiles>
__device__ __forceinline__ void ReadRows(uint32_t stage, int s, int step, int lane,
                                         uint32_t (&b)[kTiles][2]) {
  const int m = lane >> 3, r = lane & 7;
  if constexpr (kTiles == 1) {
    LoadMatrix2(b[0][0], b[0][1], Tiles::RowChunkAt(stage, s, r, 2 * step + (m & 1)));
  } else {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t v[4];
      LoadMatrix4(v, Tiles::RowChunkAt(stage, s, 8 * (j + (m >> 1)) + r,
                                       2 * step + (m & 1)));
      b[j][0] = v[0];
      b[j][1] = v[1];
      b[j + 1][0] = v[2];
      b[j + 1][1] = v[3];
    }
  }
}

// The same of steps `step` and `step + 1`, one tile of rows, with one load.
template <class Tiles>
__device__ __forceinline__ void ReadRowsTwice(uint32_t stage, int s, int step, int lane,
                                              uint32_t (&b)[2][1][2]) {
  uint32_t v[4];
  LoadMatrix4(v, Tiles::RowChunkAt(stage, s, lane & 7, 2 * step + (lane >> 3)));
  b[0][0][0] = v[0];
  b[0][0][1] = v[1];
  b[1][0][0] = v[2];
  b[1][0][1] = v[3];
}

// Sums of a warp's features by kTiles tiles of 8 rows. Even and odd k steps are summed
// apart where a fragment alone would leave the tensor cores waiting for its sums.
template <class Tiles, int kTiles>
struct Sums {
  static constexpr int kFragments = Tiles::kFragments;
  static constexpr int kChains = Tiles::kChains;
  float d[kChains][kFragments][kTiles][4] = {};

  __device__ __forceinline__ void Add(const uint32_t (&a)[kFragments][4],
                                      const uint32_t (&b)[kTiles][2], int step) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        Mma(d[step % kChains][f][j], a[f], b[j][0], b[j][1]);
      }
    }
  }

  __device__ __forceinline__ void Join() {
    if constexpr (kChains == 2) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          d[0][0][j][i] = (d[0][0][j][i] + d[1][0][j][i]) * Tiles::kUnit;
        }
      }
    }
  }
};

// Four warps multiply what the stages hold.
template <class Tiles, int kRows>
struct Consumer {
  using L = Layout<Tiles, kRows>;
  static constexpr int kFragments = Tiles::kFragments;

  const Params& p;
  uint32_t stages, full, empty;
  int part, warp, lane;
  typename Tiles::Reader reader;
  Turn<L::kStages> turn;

  // No branch depends on data in here, so that loads and products can overlap.
  template <int kTiles>
  __device__ __forceinline__ void AddSlab(Sums<Tiles, kTiles>& sums, uint32_t stage,
                                          int s) {
    const typename Tiles::Slab weights(reader, stage, s);
#pragma unroll
    for (int k = 0; k < kSlab / 16; k += 2) {
      uint32_t a[kFragments][4], b[2][kTiles][2];
      if constexpr (kTiles == 1) {
        ReadRowsTwice<Tiles>(stage, s, k, lane, b);
      } else {
        ReadRows<Tiles>(stage, s, k, lane, b[0]);
      }
      weights.Fragments(k, a);
      sums.Add(a, b[0], k);
      if constexpr (kTiles > 1) ReadRows<Tiles>(stage, s, k + 1, lane, b[1]);
      weights.Fragments(k + 1, a);
      sums.Add(a, b[1], k + 1);
    }
  }

  // The last stage, where K ends inside of it.
  template <int kTiles>
  __device__ void AddLast(Sums<Tiles, kTiles>& sums, uint32_t stage, int k_left) {
#pragma unroll 1
    for (int s = 0; s < Tiles::kSlabs && k_left > 0; ++s, k_left -= kSlab) {
      if (k_left >= kSlab) {
        AddSlab(sums, stage, s);
        continue;
      }
      const typename Tiles::Slab weights(reader, stage, s);
#pragma unroll
      for (int k = 0; k < kSlab / 16; ++k) {
        if (16 * k >= k_left) break;
        uint32_t a[kFragments][4], b[kTiles][2];
        ReadRows<Tiles>(stage, s, k, lane, b);
        weights.Fragments(k, a);
        sums.Add(a, b, k);
      }
    }
  }

  template <int kTiles>
  __device__ void Multiply(const Item& item) {
    const int steps = (p.slabs + Tiles::kSlabs - 1) / Tiles::kSlabs;
    const int begin = steps * part / p.parts, end = steps * (part + 1) / p.parts;
    Sums<Tiles, kTiles> sums;
    for (int step = begin; step < end; ++step) {
      const uint32_t stage = stages + turn.stage * L::kStageBytes;
      WaitForPhase(full + 8 * turn.stage, turn.parity);
      const int k_left = p.args.depth - step * Tiles::kSlabs * kSlab;
      if (k_left >= Tiles::kSlabs * kSlab) {
#pragma unroll
        for (int s = 0; s < Tiles::kSlabs; ++s) AddSlab(sums, stage, s);
      } else {
        AddLast(sums, stage, k_left);
      }
      ArriveAsWarp(empty + 8 * turn.stage);
      turn.Next();
    }
    sums.Join();
    const Writer writer{p.args, item,
                        p.args.gated ? Tiles::kFeatures / 2 : Tiles::kFeatures};
    if (p.parts > 1) {
      AddParts(writer, sums);
      return;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        writer.Fragment(kFragments * warp + f, j, lane, sums.d[0][f][j]);
      }
    }
  }

  // Adds the sums of the cluster's blocks, in their order. A cluster has one item only,
  // so its stages are free, once all warps have read them.
  template <int kTiles>
  __device__ void AddParts(const Writer& writer, const Sums<Tiles, kTiles>& sums) {
    auto slot = [&](int fragment, int j) {
      return stages + ((fragment * kTiles + j) * 32 + lane) * 16;
    };
    WarpsSync(1, 32 * kConsumerWarps);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const float(&d)[4] = sums.d[0][f][j];
        asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(
                         slot(kFragments * warp + f, j)),
                     "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
                     : "memory");
      }
    }
    ClusterSync();
    // Fragments of 16 features by 8 rows, dealt out to all warps of the cluster.
    for (int piece = kConsumerWarps * part + warp;
         piece < kFragments * kConsumerWarps * kTiles; piece += kConsumerWarps * p.parts) {
      const int fragment = piece / kTiles, j = piece % kTiles;
      float d[4];
      for (int q = 0; q < p.parts; ++q) {
        const float4 v = LoadOfBlock(slot(fragment, j), q);
        d[0] = q == 0 ? v.x : d[0] + v.x;
        d[1] = q == 0 ? v.y : d[1] + v.y;
        d[2] = q == 0 ? v.z : d[2] + v.z;
        d[3] = q == 0 ? v.w : d[3] + v.w;
      }
      writer.Fragment(fragment, j, lane, d);
    }
    ClusterSync();
  }

  __device__ void Run() {
    const Walk walk = WalkOf(p);
    Item next = walk.first < walk.end ? ItemOf<kRows>(p, walk.first) : Item{};
    for (int index = walk.first; index < walk.end; index += walk.stride) {
      const Item item = next;
      // Asked for now, it has come when it is wanted.
      if (index + walk.stride < walk.end) next = ItemOf<kRows>(p, index + walk.stride);
      if (item.count <= 8) {
        Multiply<1>(item);
      } else if constexpr (kRows >= 16) {
        if (item.count <= 16) {
          Multiply<2>(item);
        } else if constexpr (kRows >= 32) {
          if (item.count <= 32) {
            Multiply<4>(item);
          } else if constexpr (kRows >= 64) {
            Multiply<8>(item);
          }
        }
      }
    }
  }
};

template <class Tiles, int kRows>
__global__ void __launch_bounds__(kThreads, (Layout<Tiles, kRows>::kBlocks))
    MatmulMmaKernel(const __grid_constant__ Params p) {
  using L = Layout<Tiles, kRows>;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t full = stages + L::kStages * L::kStageBytes;
  const uint32_t empty = full + 8 * L::kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      InitBarrier(full + 8 * s, Tiles::kArrivals);
      InitBarrier(empty + 8 * s, kConsumerWarps * kArrivingLanes);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (p.args.start == Start::kEarly) WaitForKernelBefore();
  // Not before the line above: a kWeights kernel then reads the list of chunks at once.
  LetNextKernelStart();
  const int part = p.parts == 1 ? 0 : static_cast<int>(ClusterRank());
  if (threadIdx.x >= 32 * kConsumerWarps) {
    Produce<Tiles, kRows>(p, stages, full, empty, part);
    if (p.parts > 1 && WalkOf(p).first < WalkOf(p).end) {  // All threads, see AddParts.
      ClusterSync();
      ClusterSync();
    }
  } else {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Consumer<Tiles, kRows>{p,    stages, full, empty,
                           part, warp,   lane, Tiles::MakeReader(warp, lane, p.args.gated)}
        .Run();
  }
}

// Of K: so that a product with few features fills the GPU. Each part is worth its sum.
// These figures decide bits: whoever changes them changes those of every model.
int PartsOf(const MatmulArgs& args, int tiles, int steps) {
  constexpr int kLeastSteps = 8;  // Of a part: a shorter one is not worth its sum.
  constexpr int kBlocks = 264;    // Two for each multiprocessor of an H200.
  // Clusters of eight must fit into its groups of multiprocessors, which leaves some over.
  constexpr int kBlocksOfMost = 224;
  constexpr int kBlocksOfGroup = 64;  // Several groups of a list have rows at once.
  int parts = kMostParts;
  while (parts > 1) {
    const int blocks = parts == kMostParts       ? kBlocksOfMost
                       : args.chunks == nullptr ? kBlocks
                                                : kBlocksOfGroup;
    if (tiles * parts <= blocks && steps >= kLeastSteps * parts) break;
    parts /= 2;
  }
  return parts;
}

cudaError_t MakeMap(const MatmulArgs& args, CUtensorMap* map) {
  static const EncodeTensorMap encode = FindEncodeTensorMap();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t depth = args.depth, features = args.features;
  const cuuint64_t groups = args.groups;
  const cuuint32_t steps[3] = {1, 1, 1};
  CUresult status;
  if (args.kind == WeightKind::kInt4) {
    // Words of a tile, tiles along K, rows of tiles.
    const cuuint64_t slabs = (depth + kInt4TileDepth - 1) / kInt4TileDepth;
    const cuuint64_t rows = (features + kInt4TileRows - 1) / kInt4TileRows;
    const cuuint64_t sizes[3] = {kInt4TileBytes / 4, slabs, rows * groups};
    const cuuint64_t strides[2] = {kInt4TileBytes, slabs * kInt4TileBytes};
    const cuuint32_t box[3] = {kInt4TileBytes / 4, Int4Tiles<4>::kSlabs,
                               Int4Tiles<4>::kTileRows};
    status = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 3, const_cast<void*>(args.w),
                    sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                    CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  } else {
    const cuuint64_t sizes[3] = {args.w_by_feature ? depth : features,
                                 args.w_by_feature ? features : depth, groups};
    // In bytes; one group's stride is not used, but must be valid. Where experts lie
    // beside each other, theirs is the shorter one, which the driver takes too.
    const cuuint64_t row = 2 * static_cast<cuuint64_t>(args.w_row_stride);
    const cuuint64_t strides[2] = {
        row, groups == 1 ? row : 2 * static_cast<cuuint64_t>(args.w_group_stride)};
    const cuuint32_t box[3] = {kSlab, kSlab, 1};
    status = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(args.w),
                    sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Tiles, int kRows>
cudaError_t Launch(cudaStream_t stream, const MatmulArgs& args) {
  using L = Layout<Tiles, kRows>;
  Params p;
  p.args = args;
  p.tiles = (args.features + Tiles::kFeatures - 1) / Tiles::kFeatures;
  p.row_chunks = (args.rows + kRows - 1) / kRows;
  p.slabs = (args.depth + kSlab - 1) / kSlab;
  p.parts = PartsOf(args, p.tiles, (p.slabs + Tiles::kSlabs - 1) / Tiles::kSlabs);
  if (cudaError_t e = MakeMap(args, &p.map); e != cudaSuccess) return e;
  int device, multiprocessors, shared;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors,
                                             cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e = cudaDeviceGetAttribute(
          &shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
      e != cudaSuccess) {
    return e;
  }
  // A long dense product is faster with two blocks than with three.
  const int most = args.chunks == nullptr ? std::min(2, L::kBlocks) : L::kBlocks;
  const int64_t slots = static_cast<int64_t>(multiprocessors) *
                        std::clamp(shared / (L::kBytes + 1024), 1, most);
  const int64_t items = args.chunks == nullptr
                            ? static_cast<int64_t>(args.groups) * p.tiles * p.row_chunks
                            : static_cast<int64_t>(args.max_chunks) * p.tiles;
  if (items > INT32_MAX / kMostParts) return cudaErrorInvalidValue;

  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (p.parts > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = p.parts;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (args.start != Start::kAfter) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.parts > 1 ? items * p.parts : std::min(items, slots));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = L::kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const auto kernel = MatmulMmaKernel<Tiles, kRows>;
  if (cudaError_t e = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
      e != cudaSuccess) {
    return e;
  }
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <class Tiles>
cudaError_t LaunchBf16(cudaStream_t stream, const MatmulArgs& args) {
  if (args.group_rows <= 16) return Launch<Tiles, 16>(stream, args);
  if (args.group_rows <= 32) return Launch<Tiles, 32>(stream, args);
  return Launch<Tiles, kChunkRowsBf16>(stream, args);
}

KDT_DYNAMIC_SHARED_MEMORY(MatmulMmaKernel, kMostSharedMemory);

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

cudaError_t LaunchMatmulMma(cudaStream_t stream, const MatmulArgs& args) {
  const bool int4 = args.kind == WeightKind::kInt4;
  if (args.rows == 0 || args.features == 0 || args.groups == 0) return cudaSuccess;
  if (IsSimt(args) || args.depth == 0 || !HasMmaSizes(args) || !Aligned(args.x) ||
      !Aligned(args.w)) {
    return cudaErrorInvalidValue;
  }
  if (int4) {
    if (args.group_rows <= 8) return Launch<Int4Tiles<4>, 8>(stream, args);
    // Where K is short, blocks begin anew often: more of them hide that.
    return args.depth <= 4096 ? Launch<Int4Tiles<4>, kChunkRowsInt4>(stream, args)
                              : Launch<Int4Tiles<3>, kChunkRowsInt4>(stream, args);
  }
  return args.w_by_feature ? LaunchBf16<Bf16Tiles<true>>(stream, args)
                           : LaunchBf16<Bf16Tiles<false>>(stream, args);
}

}  // namespace kdtree_jax
