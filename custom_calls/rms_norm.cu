// One block per row. How many threads it has, which of them sums which squares, and in
// what order, depends on the width alone, so a row's bits depend on the row alone.

#include "rms_norm.h"

#include <algorithm>
#include <cstdint>

#include "chunks.cuh"
#include "launch_early.cuh"
#include "warp_sum.cuh"

namespace kdtree_jax {
namespace {

constexpr int kMaxThreads = 1024;

// The sum over the block, the same for every thread.
__device__ inline float BlockSum(float sum) {
  __shared__ float partial[kMaxThreads / 32];
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  sum = WarpSum(sum);
  if (warps == 1) return sum;
  if (lane == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  return WarpSum(lane < warps ? partial[lane] : 0.0f);
}

template <typename T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kMaxThreads) RmsNormKernel(RmsNormArgs a) {
  const int D = a.width, stride = blockDim.x * kChunk;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * D;
  const T* x = static_cast<const T*>(a.x) + start;
  const T* added = static_cast<const T*>(a.added) + start;
  const T* weight = static_cast<const T*>(a.weight);
  T* total = static_cast<T*>(a.sum) + start;
  T* out = static_cast<T*>(a.out) + start;

  LetNextKernelStart();
  float sum = 0.0f;
  T chunk[kChunk], weights[kChunk];
  int at = threadIdx.x * kChunk;
  // Here, so that they arrive while the block waits and sums.
  LoadChunk<T, kWidth>(weight, at, D, weights);
  WaitForKernelBefore();
  for (; at < D; at += stride) {
    LoadChunk<T, kWidth>(x, at, D, chunk);
    if (at >= stride) LoadChunk<T, kWidth>(weight, at, D, weights);
    if (kAdd) {
      T more[kChunk];
      LoadChunk<T, kWidth>(added, at, D, more);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        chunk[i] = Rounded<T>(__fadd_rn(Widen(chunk[i]), Widen(more[i])));
      }
      StoreChunk<T, kWidth>(total, at, D, chunk);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float value = Widen(chunk[i]);
      sum = __fmaf_rn(value, value, sum);
    }
  }
  const float mean_square = __fdiv_rn(BlockSum(sum), static_cast<float>(D));
  const float scale = __frsqrt_rn(__fadd_rn(mean_square, a.eps));

  // Backwards: the last chunk, the only one of most widths, is still in registers.
  const T* again = kAdd ? total : x;
  for (at -= stride; at >= 0;) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      // Rounded to T before the weight, as the published code rounds it.
      const T normed = Rounded<T>(__fmul_rn(Widen(chunk[i]), scale));
      chunk[i] = Rounded<T>(__fmul_rn(Widen(normed), Widen(weights[i])));
    }
    StoreChunk<T, kWidth>(out, at, D, chunk);
    at -= stride;
    if (at < 0) break;
    LoadChunk<T, kWidth>(again, at, D, chunk);
    LoadChunk<T, kWidth>(weight, at, D, weights);
  }
}

template <typename T, bool kAdd>
cudaError_t Launch(cudaStream_t stream, const RmsNormArgs& a) {
  constexpr int kWidth = 16 / sizeof(T);
  uintptr_t pointers = 0;
  for (const void* pointer : {a.x, a.added, a.weight, static_cast<const void*>(a.sum),
                              static_cast<const void*>(a.out)}) {
    pointers |= reinterpret_cast<uintptr_t>(pointer);
  }
  const int warps = (a.width - 1) / (32 * kChunk) + 1;
  const int threads = 32 * std::min(warps, kMaxThreads / 32);
  const bool packed = pointers % 16 == 0 && a.width % kWidth == 0;
  return LaunchKernel(stream, a.early, dim3(a.rows), dim3(threads), 0,
                      packed ? RmsNormKernel<T, kWidth, kAdd> : RmsNormKernel<T, 1, kAdd>,
                      a);
}

template <typename T>
cudaError_t Launch(cudaStream_t stream, const RmsNormArgs& a) {
  return a.added != nullptr ? Launch<T, true>(stream, a) : Launch<T, false>(stream, a);
}

}  // namespace

cudaError_t LaunchRmsNorm(cudaStream_t stream, const RmsNormArgs& args) {
  if (args.rows == 0) return cudaSuccess;
  return args.bfloat16 ? Launch<__nv_bfloat16>(stream, args)
                       : Launch<float>(stream, args);
}

}  // namespace kdtree_jax
