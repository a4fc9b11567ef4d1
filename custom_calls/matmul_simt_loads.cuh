// How the ordinary cores' matrix product brings steps of x and w into shared memory: a
// warp for itself, with asynchronous copies where there is nothing to convert.

#ifndef KDTREE_JAX_MATMUL_SIMT_LOADS_CUH_
#define KDTREE_JAX_MATMUL_SIMT_LOADS_CUH_

#include <cuda_bf16.h>

#include "matmul.h"

namespace kdtree_jax {
namespace simt {

constexpr int kColumns = 32;  // of w, that a block multiplies
constexpr int kStep = 8;      // values of k that a warp loads at once

struct Params {
  MatmulArgs a;
  int part;        // values of k of a warp
  int block_rows;  // without a list of chunks
};

// What a block multiplies: some rows of one group by some columns.
struct Tile {
  int group;
  int first_row;
  int rows;
  int index;  // of the columns
};

// Copies 16 or 4 bytes, of which the first `bytes` are read and the rest become zeros.
template <int kSize>
__device__ __forceinline__ void CopyAsync(void* to, const void* from, int bytes) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(place), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(place), "l"(from), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all but the last `kPending` groups of copies.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ int Clamp(int x, int low, int high) {
  return min(max(x, low), high);
}

__device__ __forceinline__ float4 LoadFour(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

__device__ __forceinline__ float4 LoadFour(const __nv_bfloat16* from) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

__device__ __forceinline__ float Element(float4 x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Row of x or out that row i of the sorted rows stands for.
__device__ __forceinline__ int64_t Place(const int32_t* rows, int i) {
  return rows == nullptr ? i : rows[i];
}

// Loads a warp's rows of x, step after step from k = `first` to `end`: kRows rows of
// kStep values. Rows of 32 bytes have their halves exchanged in every other four rows,
// for the banks' sake. Rows beyond the tile's repeat its last one.
template <typename T, int kRows, bool kVectors>
class RowLoader {
 public:
  static constexpr int kRowVectors = kStep * sizeof(T) / 16;
  static constexpr int kCount = kRows * kRowVectors;
  static constexpr int kBytes = 16 * kCount;

  __device__ __forceinline__ RowLoader(const Params& p, const Tile& tile, int first,
                                       int end)
      : a_(p.a), tile_(tile), k_(first), end_(end), lane_(threadIdx.x % 32) {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int vector = lane_ + 32 * i;
        from_[i] = RowOf(vector / kRowVectors) + first + HalfOf(vector) * kVector;
      }
    }
  }

  // Where elements 4 * half .. 4 * half + 3 of a row lie.
  static __device__ __forceinline__ int Offset(int row, int half) {
    if constexpr (kRowVectors == 1) return row * kStep + 4 * half;
    return row * kStep + 4 * (half ^ (row / 4 % 2));
  }

  // Loads the next step, zeros from `end` on.
  __device__ __forceinline__ void Load(T* to) {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int vector = lane_ + 32 * i;
        if (kCount % 32 == 0 || vector < kCount) {
          const int left = Clamp(end_ - k_ - HalfOf(vector) * kVector, 0, kVector);
          CopyAsync<16>(to + vector * kVector, from_[i], left * sizeof(T));
        }
        from_[i] += kStep;
      }
    } else {
#pragma unroll 1
      for (int i = lane_; i < kRows * kStep; i += 32) {
        const int row = i / kStep, column = i % kStep;
        T x = T(0.0f);
        if (k_ + column < end_) x = RowOf(row)[k_ + column];
        to[Offset(row, column / 4) + column % 4] = x;
      }
    }
    k_ += kStep;
  }

 private:
  static constexpr int kCopies = (kCount + 31) / 32;
  static constexpr int kVector = 16 / sizeof(T);  // elements

  // Which half of its row a vector in shared memory is.
  static __device__ __forceinline__ int HalfOf(int vector) {
    if constexpr (kRowVectors == 1) return 0;
    return vector % 2 ^ (vector / kRowVectors / 4 % 2);
  }

  __device__ __forceinline__ const T* RowOf(int row) const {
    const int i = tile_.first_row + min(row, tile_.rows - 1);
    return static_cast<const T*>(a_.x) + tile_.group * a_.x_group_stride +
           Place(a_.x_rows, i) * a_.x_row_stride;
  }

  const MatmulArgs& a_;
  const Tile& tile_;
  int k_;
  const int end_, lane_;
  const T* from_[kCopies];  // this lane's next vectors
};

// Loads a block's columns of w, step after step from k = `first` to `end`: kStep rows
// of kColumns values. Where gate and up are asked for, columns 16 .. 31 are the
// partners of 0 .. 15. kVectors: float32, not by feature, and aligned.
template <bool kVectors>
class WeightLoader {
 public:
  __device__ __forceinline__ WeightLoader(const Params& p, const Tile& tile, int first,
                                          int end)
      : a_(p.a), tile_(tile), k_(first), end_(end), lane_(threadIdx.x % 32) {
    if constexpr (kVectors) {
      const int column = 4 * (lane_ % 8);
      left_ = Clamp(Limit(column) - ColumnOf(column), 0, 4);
      from_ = Floats() + (first + lane_ / 8) * a_.w_row_stride + ColumnOf(column);
    }
  }

  // Loads the next step, zeros from `end` on.
  __device__ __forceinline__ void Load(float* to) {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kStep; i += 4) {
        const int bytes = k_ + lane_ / 8 + i < end_ ? left_ * 4 : 0;
        CopyAsync<16>(to + 4 * lane_ + i * kColumns, from_ + i * a_.w_row_stride,
                      bytes);
      }
      from_ += kStep * a_.w_row_stride;
    } else if (a_.kind == WeightKind::kInt4) {
      LoadInt4(to);
    } else {
      LoadElements(to);
    }
    k_ += kStep;
  }

 private:
  __device__ __forceinline__ const float* Floats() const {
    return static_cast<const float*>(a_.w) + tile_.group * a_.w_group_stride;
  }

  // The column of w that a column of the tile is; it is one if below the limit.
  __device__ __forceinline__ int ColumnOf(int column) const {
    if (!a_.gated) return tile_.index * kColumns + column;
    return tile_.index * (kColumns / 2) + column % (kColumns / 2) +
           (column < kColumns / 2 ? 0 : a_.features / 2);
  }
  __device__ __forceinline__ int Limit(int column) const {
    return a_.gated && column < kColumns / 2 ? a_.features / 2 : a_.features;
  }

  __device__ __forceinline__ void LoadElements(float* to) const {
#pragma unroll 1
    for (int i = lane_; i < kStep * kColumns; i += 32) {
      // Neighbours in memory to neighbouring lanes.
      const int row = a_.w_by_feature ? i % kStep : i / kColumns;
      const int column = a_.w_by_feature ? i / kStep : i % kColumns;
      const int64_t k = k_ + row, n = ColumnOf(column);
      const bool inside = k < end_ && n < Limit(column);
      const int64_t at =
          a_.w_by_feature ? n * a_.w_row_stride + k : k * a_.w_row_stride + n;
      CopyAsync<4>(to + row * kColumns + column, Floats() + (inside ? at : 0),
                   inside ? 4 : 0);
    }
  }

  // k is a multiple of kStep, so a lane's values of a tile lie in half a word.
  __device__ __forceinline__ void LoadInt4(float* to) const {
    const int tiles_along_k = (a_.depth + kInt4TileDepth - 1) / kInt4TileDepth;
    const int tiles_along_n = (a_.features + kInt4TileRows - 1) / kInt4TileRows;
    const int g = lane_ / 4, t = lane_ % 4, depth = k_ % kInt4TileDepth;
#pragma unroll 1
    for (int u = 0; u < kColumns / kInt4TileRows; ++u) {
      const int n = kColumns / kInt4TileRows * tile_.index + u;
      unsigned word = 0x88888888u, scales = 0;  // all zeros
      if (n < tiles_along_n) {
        const int64_t tile =
            (static_cast<int64_t>(tile_.group) * tiles_along_n + n) * tiles_along_k +
            k_ / kInt4TileDepth;
        const uint8_t* from = static_cast<const uint8_t*>(a_.w) + tile * kInt4TileBytes;
        word = *reinterpret_cast<const unsigned*>(from + 16 * lane_ + depth / 16 * 4);
        word >>= depth / 8 % 2 * 8;
        scales = *reinterpret_cast<const unsigned*>(
            from + 512 + 8 * g + depth / kInt4GroupSize * 4);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale =
            __uint_as_float(h == 0 ? scales << 16 : scales & 0xffff0000u);
        const int column = a_.gated ? 16 * h + 8 * u + g : 16 * u + 8 * h + g;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int value = static_cast<int>(word >> (16 * odd + 4 * h) & 15) - 8;
          const int row = 2 * t + odd;
          to[row * kColumns + column] =
              k_ + row < end_ ? __fmul_rn(static_cast<float>(value), scale) : 0.0f;
        }
      }
    }
  }

  const MatmulArgs& a_;
  const Tile& tile_;
  int k_;
  const int end_, lane_;
  const float* from_;  // this lane's next vector
  int left_;           // elements of it that exist
};

}  // namespace simt
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_MATMUL_SIMT_LOADS_CUH_
