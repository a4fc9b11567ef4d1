// What the kernel for bf16 rows is made of besides its products: how the work is divided,
// the ring of stages that one warp fills, and how results are written.

#ifndef KDTREE_JAX_MATMUL_PIPELINE_CUH_
#define KDTREE_JAX_MATMUL_PIPELINE_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "bulk_copy.cuh"
#include "launch_early.cuh"
#include "matmul.h"
#include "matmul_tiles.cuh"
#include "shared_memory.h"

namespace kdtree_jax {

constexpr int kThreads = 32 * (kConsumerWarps + 1);
constexpr int kMostParts = 8;

struct Params {
  CUtensorMap map;
  MatmulArgs args;
  int tiles;       // Along N.
  int row_chunks;  // Of a group, where there is no list.
  int slabs;
  int parts;       // Of K, blocks of a cluster.
};

template <class Tiles, int kRows>
struct Layout {
  static constexpr int kStageBytes = Tiles::kBytes + kRows * Tiles::kRowBytes;
  static constexpr int kReserved = 1024 + 128;  // Alignment and barriers.
  // Blocks that share a multiprocessor of 228 KB; on sm_120 it holds one.
  static constexpr int kBlocks = Tiles::template kBlocks<kRows>;
  static constexpr int kStages =
      (std::min(228 * 1024 / kBlocks - 1024, kMostSharedMemory) - kReserved) / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kReserved;
  static_assert(kStages >= 2 && kBytes <= kMostSharedMemory);
  // Partial sums lie in the stages once these are read.
  static_assert(Tiles::kFeatures * kRows * 4 <= kStages * kStageBytes);
};

// What a block multiplies at once.
struct Item {
  int group, first, count, tile;
};

template <int kRows>
__device__ inline Item ItemOf(const Params& p, int index) {
  const MatmulArgs& args = p.args;
  if (args.chunks == nullptr) {
    // Chunks of rows that read the same weights come one after the other.
    const int chunk = index % p.row_chunks, rest = index / p.row_chunks;
    const int first = chunk * kRows;
    return Item{rest / p.tiles, first, min(kRows, args.rows - first), rest % p.tiles};
  }
  const int unit = index / p.tiles;
  RowChunk chunk = args.chunks[unit];
  int tile = index - unit * p.tiles;
  if (chunk.chunks > 1) {
    const int first = unit - chunk.index, local = index - first * p.tiles;
    tile = local / chunk.chunks;
    chunk = args.chunks[first + local % chunk.chunks];
  }
  return Item{chunk.group, chunk.first, min(chunk.count, kRows), tile};
}

__device__ inline int CountItems(const Params& p) {
  if (p.args.chunks == nullptr) return p.args.groups * p.tiles * p.row_chunks;
  return min(p.args.num_chunks[0], p.args.max_chunks) * p.tiles;
}

// Which items a cluster takes: as many as any other, or one less.
struct Walk {
  int first, stride, end;
};

__device__ inline Walk WalkOf(const Params& p) {
  const int clusters = gridDim.x / p.parts, items = CountItems(p);
  const int rounds = (items + clusters - 1) / clusters;
  const int active = rounds == 0 ? 1 : (items + rounds - 1) / rounds;
  const int cluster = blockIdx.x / p.parts;
  return Walk{cluster < active ? cluster : items, active, items};
}

// The stages' turn: which one, and the parity of its phase.
template <int kStages>
struct Turn {
  int stage = 0, parity = 0;
  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ float Silu(float x) { return x / (1.f + expf(-x)); }

__device__ __forceinline__ float Rounded(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// Writes two rows of one feature, or of one gate and up.
struct Writer {
  const MatmulArgs& args;
  const Item& item;
  int width;  // Features of a tile in the result.

  __device__ void Store(int row, int feature, float value) const {
    const int n = item.tile * width + feature;
    if (row >= item.count || n >= (args.gated ? args.features / 2 : args.features)) return;
    int64_t r = item.first + row;
    if (args.out_rows != nullptr) r = args.out_rows[r];
    const int64_t at = item.group * args.out_group_stride + r * args.out_row_stride + n;
    if (args.out_float32) {
      static_cast<float*>(args.out)[at] = value;
    } else {
      static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16_rn(value);
    }
  }

  // A lane's part of 16 features by 8 rows.
  __device__ void Fragment(int fragment, int row_tile, int lane,
                           const float (&d)[4]) const {
    const int g = lane >> 2, row = 8 * row_tile + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (args.gated) {
        const float gate = Rounded(d[i]), up = Rounded(d[2 + i]);
        Store(row + i, 8 * fragment + g, Rounded(Silu(gate)) * up);
      } else {
        Store(row + i, 16 * fragment + g, d[i]);
        Store(row + i, 16 * fragment + g + 8, d[2 + i]);
      }
    }
  }
};

// One warp fills the stages.
template <class Tiles, int kRows>
__device__ inline void Produce(const Params& p, uint32_t stages, uint32_t full, uint32_t empty,
                        int part) {
  using L = Layout<Tiles, kRows>;
  const MatmulArgs& args = p.args;
  const int lane = threadIdx.x % 32;
  const int steps = (p.slabs + Tiles::kSlabs - 1) / Tiles::kSlabs;
  const int begin = steps * part / p.parts, end = steps * (part + 1) / p.parts;
  TileSource source;
  source.map = &p.map;
  source.features = args.features;
  source.depth = args.depth;
  source.tile_rows = (args.features + kInt4TileRows - 1) / kInt4TileRows;
  source.gated = args.gated;
  source.x_row_stride = args.x_row_stride;
  const bool once = args.chunks != nullptr || p.row_chunks == 1;
  source.policy = once ? EvictFirst() : EvictNormal();

  Turn<L::kStages> turn;
  const Walk walk = WalkOf(p);
  int ahead = 0;  // Stages whose weights are on their way.
  for (int index = walk.first; index < walk.end; index += walk.stride) {
    const Item item = ItemOf<kRows>(p, index);
    source.group = item.group;
    source.tile = item.tile;
    source.rows = item.count;
    source.x = static_cast<const __nv_bfloat16*>(args.x) +
               item.group * args.x_group_stride;
    if (args.start == Start::kWeights && index == walk.first) {
      ahead = min(L::kStages, end - begin);
      for (int i = 0; i < ahead && lane == 0; ++i) {
        Tiles::FillWeights(source, (begin + i) * Tiles::kSlabs,
                           stages + i * L::kStageBytes, full + 8 * i);
      }
      WaitForKernelBefore();
    }
    const typename Tiles::template Rows<kRows> rows(args.x_rows, item.first, item.count,
                                                    lane);
    for (int step = begin; step < end; ++step) {
      const uint32_t stage = stages + turn.stage * L::kStageBytes;
      const uint32_t barrier = full + 8 * turn.stage;
      WaitForPhase(empty + 8 * turn.stage, turn.parity ^ 1);
      if (ahead > 0) {
        --ahead;
      } else if (lane == 0) {
        Tiles::FillWeights(source, step * Tiles::kSlabs, stage, barrier);
      }
      Tiles::FillRows(source, rows, step * Tiles::kSlabs, stage, barrier, lane);
      turn.Next();
    }
  }
  // Without an item too: who waits for this kernel relies on the one before having ended.
  if (args.start == Start::kWeights && walk.first >= walk.end) WaitForKernelBefore();
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_MATMUL_PIPELINE_CUH_
