// How blocks of weights reach the tensor cores: what a stage of the pipeline holds, how it
// is filled, and how a fragment of 16 features by 16 values of k is read from it.

#ifndef KDTREE_JAX_MATMUL_TILES_CUH_
#define KDTREE_JAX_MATMUL_TILES_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "bulk_copy.cuh"
#include "matmul.h"
#include "mma.cuh"

namespace kdtree_jax {

constexpr int kConsumerWarps = 4;
// Values of k that lie beside each other in a row of shared memory: 128 bytes.
constexpr int kSlab = 64;
constexpr int kSlabRowBytes = 2 * kSlab;

// The 16 bytes number `chunk` of row `row` in a slab: rows of 128 bytes whose chunks are
// permuted, so that eight rows of one chunk lie in different banks. The copy engine's
// 128-byte swizzle is the same.
__device__ __forceinline__ uint32_t Swizzled(int row, int chunk) {
  return row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4);
}

// What fills the stages of one item.
struct TileSource {
  const CUtensorMap* map;
  int group, tile;  // The item's weights.
  int features, depth, tile_rows;
  bool gated;
  uint64_t policy;
  const __nv_bfloat16* x;  // Of the group.
  int64_t x_row_stride;
  int rows;  // How many.
};

// bf16: a stage is 128 features by 64 values of k, as two boxes of 64 features. Where the
// weights are gated, one box is gate's and one up's.
template <bool kByFeature>
struct Bf16Tiles {
  static constexpr int kFeatures = 128;
  static constexpr int kSlabs = 1;
  static constexpr int kFragments = 2;  // Of 16 features, for each warp.
  static constexpr int kChains = 1;     // Sums of every so-manyth k step, then joined.
  static constexpr int kBoxBytes = kSlab * kSlabRowBytes;
  static constexpr int kBytes = 2 * kBoxBytes;
  static constexpr float kUnit = 1.f;
  // Blocks that share a multiprocessor, of sm_90.
  template <int kRows>
  static constexpr int kBlocks = kRows <= 32 ? 3 : 2;
  static constexpr int kRowBytes = kSlabRowBytes;
  // At a full stage: the lanes' copies of rows, and one for the weights.
  static constexpr int kArrivals = 32 + 1;

  // Row `lane / 8 + 4 i` of the item, -1 for none, is `rows[i]`: a lane copies 16 bytes
  // of each.
  template <int kRows>
  struct Rows {
    int index[kRows / 4];

    __device__ Rows(const int32_t* x_rows, int first, int count, int lane) {
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int row = (lane >> 3) + 4 * i;
        index[i] = row < count ? first + row : -1;
        if (index[i] >= 0 && x_rows != nullptr) index[i] = x_rows[index[i]];
      }
    }
  };

  // Called by one lane.
  static __device__ void FillWeights(const TileSource& source, int slab, uint32_t stage,
                                     uint32_t barrier) {
    const int k = slab * kSlab;
    ArriveExpecting(barrier, kBytes);
    const int first = source.tile * (source.gated ? 64 : 128);
    const int second = first + (source.gated ? source.features / 2 : 64);
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const int n = box == 0 ? first : second;
      CopyBox(stage + box * kBoxBytes, source.map, kByFeature ? k : n, kByFeature ? n : k,
              source.group, barrier, source.policy);
    }
  }

  // Called by the lanes of a warp.
  template <int kRows>
  static __device__ void FillRows(const TileSource& source, const Rows<kRows>& rows,
                                  int slab, uint32_t stage, uint32_t barrier, int lane) {
    const int k = slab * kSlab, chunk = lane & 7;
    if (k + 8 * chunk < source.depth) {
      const __nv_bfloat16* x = source.x + k + 8 * chunk;
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        CopyAsync16If(rows.index[i] >= 0,
                      stage + kBytes + Swizzled((lane >> 3) + 4 * i, chunk),
                      x + rows.index[i] * source.x_row_stride, true);
      }
    }
    ArriveAfterCopies(barrier);
  }

  // Address of 16 bytes of the rows: values 8 chunk .. of slab s.
  static __device__ __forceinline__ uint32_t RowChunkAt(uint32_t stage, int, int row,
                                                        int chunk) {
    return stage + kBytes + Swizzled(row, chunk);
  }

  struct Reader {
    int warp, lane;
    bool gated;
  };

  static __device__ Reader MakeReader(int warp, int lane, bool gated) {
    return Reader{warp, lane, gated};
  }

  // Slab s of a stage, of which this warp reads fragments.
  struct Slab {
    const Reader& reader;
    uint32_t stage;

    __device__ __forceinline__ Slab(const Reader& reader, uint32_t stage, int)
        : reader(reader), stage(stage) {}

    // The fragments of k step `step`. Matrix m of the four holds features 8 (m & 1) ..
    // and values of k 8 (m >> 1) ...
    __device__ __forceinline__ void Fragments(int step,
                                              uint32_t (&a)[kFragments][4]) const {
      const int m = reader.lane >> 3, r = reader.lane & 7;
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int fragment = kFragments * reader.warp + f;  // 0..7
        const int eight = 2 * fragment + (m & 1);           // Eight features, of 16.
        const int box = reader.gated ? m & 1 : eight >> 3;
        const int inner = reader.gated ? fragment : eight & 7;
        const uint32_t base = stage + box * kBoxBytes;
        if constexpr (kByFeature) {
          LoadMatrix4(a[f], base + Swizzled(8 * inner + r, 2 * step + (m >> 1)));
        } else {
          LoadMatrix4Transposed(a[f],
                                base + Swizzled(16 * step + 8 * (m >> 1) + r, inner));
        }
      }
    }
  };
};

// int4: a stage is 64 features by 256 values of k, four rows of four tiles. `kBlocksWanted`
// share a multiprocessor: many with few stages each, or few with many.
template <int kBlocksWanted>
struct Int4Tiles {
  static constexpr int kFeatures = 64;
  static constexpr int kSlabs = 4;
  static constexpr int kFragments = 1;
  static constexpr int kChains = 2;
  static constexpr int kTileRows = kFeatures / kInt4TileRows;
  static constexpr int kBytes = kTileRows * kSlabs * kInt4TileBytes;
  template <int kRows>
  static constexpr int kBlocks = kBlocksWanted;
  // 16 bytes more than the values, so that eight rows lie in different banks.
  static constexpr int kRowBytes = kSlabs * kSlabRowBytes + 16;
  static constexpr int kArrivals = 1;

  // Lane 1 + i copies row i of the item; the row of this lane.
  template <int kRows>
  struct Rows {
    int index;

    __device__ Rows(const int32_t* x_rows, int first, int count, int lane) {
      static_assert(kRows < 32);
      index = lane > 0 && lane <= count ? first + lane - 1 : -1;
      if (index >= 0 && x_rows != nullptr) index = x_rows[index];
    }
  };

  static __device__ uint32_t RowBytes(const TileSource& source, int slab) {
    return 2 * min(kSlabs * kSlab, source.depth - slab * kSlab);
  }

  static __device__ void FillWeights(const TileSource& source, int slab, uint32_t stage,
                                     uint32_t barrier) {
    ArriveExpecting(barrier, kBytes + source.rows * RowBytes(source, slab));
    CopyBox(stage, source.map, 0, slab,
            source.group * source.tile_rows + source.tile * kTileRows, barrier,
            source.policy);
  }

  template <int kRows>
  static __device__ void FillRows(const TileSource& source, const Rows<kRows>& rows,
                                  int slab, uint32_t stage, uint32_t barrier, int lane) {
    if (rows.index < 0) return;
    CopyBulk(stage + kBytes + (lane - 1) * kRowBytes,
             source.x + rows.index * source.x_row_stride + slab * kSlab,
             RowBytes(source, slab), barrier, EvictNormal());
  }

  static __device__ __forceinline__ uint32_t RowChunkAt(uint32_t stage, int s, int row,
                                                        int chunk) {
    return stage + kBytes + row * kRowBytes + s * kSlabRowBytes + 16 * chunk;
  }

  struct Reader {
    uint32_t words, scales;  // Offsets of this lane's in the tile.
  };

  static __device__ Reader MakeReader(int warp, int lane, bool) {
    const uint32_t row = warp * kSlabs * kInt4TileBytes;
    return Reader{row + 16 * lane, row + 512 + 8 * (lane >> 2)};
  }

  // What the sums are too small by, see Slab.
  static constexpr float kUnit = 281474976710656.f;  // 2^48

  // A weight is bf16(value * scale), in units of 2^48 here, which changes no bit of it. A
  // nibble n in the lowest bits of a bf16 is n 2^-133, in the next ones n 2^-129: bf16
  // numbers below 2^-125 are evenly spaced. So one fused multiply-add gives
  //   n 2^-133 * (scale 2^85) - 8 scale 2^-48 = (n - 8) scale 2^-48,
  // rounded once.
  struct Slab {
    uint32_t words[4];  // For four k steps.
    __nv_bfloat162 factor[2], offset[2];  // Of rows (g, g + 8), for each 32 k.

    __device__ __forceinline__ Slab(const Reader& reader, uint32_t stage, int s) {
      const uint32_t tile = stage + s * kInt4TileBytes;
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(tile + reader.words));
      uint32_t scales[2];
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                   : "=r"(scales[0]), "=r"(scales[1])
                   : "r"(tile + reader.scales));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto scale = reinterpret_cast<const __nv_bfloat162&>(scales[i]);
        factor[i] = __hmul2(scale, AsPair(0x68006A00));  // (2^85, 2^81)
        offset[i] = __hmul2(scale, AsPair(0xA900A900));  // -2^-45
      }
    }

    static __device__ __forceinline__ __nv_bfloat162 AsPair(uint32_t bits) {
      return reinterpret_cast<const __nv_bfloat162&>(bits);
    }

    __device__ __forceinline__ void Fragments(int step,
                                              uint32_t (&a)[kFragments][4]) const {
      const int half = step >> 1;
#pragma unroll
      for (int p = 0; p < 4; p += 2) {
        const uint32_t word = words[step] >> (4 * p);
        const __nv_bfloat162 low =
            __hfma2(AsPair(word & 0x000F000F), __low2bfloat162(factor[half]),
                    __low2bfloat162(offset[half]));
        const __nv_bfloat162 high =
            __hfma2(AsPair(word & 0x00F000F0), __high2bfloat162(factor[half]),
                    __high2bfloat162(offset[half]));
        a[0][p] = reinterpret_cast<const uint32_t&>(low);
        a[0][p + 1] = reinterpret_cast<const uint32_t&>(high);
      }
    }
  };
};

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_MATMUL_TILES_CUH_
