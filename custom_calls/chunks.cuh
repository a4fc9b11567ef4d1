// Rows of float32 or bfloat16, eight neighbouring features at a time.

#ifndef KDTREE_JAX_CHUNKS_CUH_
#define KDTREE_JAX_CHUNKS_CUH_

#include <cuda_bf16.h>

namespace kdtree_jax {

// kWidth elements that move together: 16 bytes, or one element where rows are not
// aligned. Which of both is used changes no bit.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

template <typename T, int kWidth>
__device__ inline Pack<T, kWidth> LoadPack(const T* at) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(at);
}

template <typename T, int kWidth>
__device__ inline void StorePack(T* at, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(at) = pack;
}

__device__ inline float Widen(float x) { return x; }
__device__ inline float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T Rounded(float x);
template <>
__device__ inline float Rounded<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 Rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Neighbouring features that one thread sums, however they are loaded.
constexpr int kChunk = 8;

// Features at .. at + kChunk - 1 of a row; those past the end are 0.
template <typename T, int kWidth>
__device__ inline void LoadChunk(const T* row, int at, int width, T (&chunk)[kChunk]) {
  if (kWidth > 1) {
    // The width is a multiple of kWidth, but not always of kChunk.
#pragma unroll
    for (int i = 0; i < kChunk; i += kWidth) {
      Pack<T, kWidth> pack = {};
      if (at + i < width) pack = LoadPack<T, kWidth>(row + at + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) chunk[i + j] = pack.values[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      chunk[i] = at + i < width ? row[at + i] : Rounded<T>(0.0f);
    }
  }
}

template <typename T, int kWidth>
__device__ inline void StoreChunk(T* row, int at, int width, const T (&chunk)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; i += kWidth) {
    if (at + i >= width) break;
    Pack<T, kWidth> pack;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) pack.values[j] = chunk[i + j];
    StorePack(row + at + i, pack);
  }
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHUNKS_CUH_
