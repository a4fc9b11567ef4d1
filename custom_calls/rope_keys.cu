// One block per row. The last threads rotate the key while the first ones reduce the
// latent. Which thread sums which squares, and in what order, depends on the width
// alone, so a row's bits depend on the row alone.

#include "rope.cuh"
#include "rope_keys.h"

namespace kdtree_jax {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// The sum over the block, the same for every thread.
__device__ inline float BlockSum(float sum) {
  __shared__ float partial[kWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = partial[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum = __fadd_rn(sum, partial[warp]);
  return sum;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    RopeKeysKernel(const __grid_constant__ RopeKeysArgs a) {
  const int R = a.latent_width;
  const int pairs = a.angles.pairs;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (R + 2 * pairs);
  const T* row = static_cast<const T*>(a.kv) + start;
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + start;

  // From the last thread down: the first warps have the latent.
  for (int pair = kThreads - 1 - threadIdx.x; pair < pairs; pair += kThreads) {
    const T* key = row + R;
    const T first = key[a.interleave ? 2 * pair : pair];
    const T second = key[a.interleave ? 2 * pair + 1 : pairs + pair];
    const float2 cos_sin = RopeCosSin(a.angles, a.positions[blockIdx.x], pair);
    RotatePair(first, second, cos_sin, out + R + pair, out + R + pairs + pair);
  }

  float sum = 0.0f;
  T chunk[kChunk];
  for (int at = threadIdx.x * kChunk; at < R; at += kThreads * kChunk) {
    LoadChunk<T, kWidth>(row, at, R, chunk);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float x = Widen(chunk[i]);
      sum = __fmaf_rn(x, x, sum);
    }
  }
  const float mean_square = __fdiv_rn(BlockSum(sum), static_cast<float>(R));
  const float scale = __frsqrt_rn(__fadd_rn(mean_square, a.eps));

  // Rounded to T before the weight, as the published code rounds it.
  T weights[kChunk];
  for (int at = threadIdx.x * kChunk; at < R; at += kThreads * kChunk) {
    LoadChunk<T, kWidth>(row, at, R, chunk);
    LoadChunk<T, kWidth>(weight, at, R, weights);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const T normed = Rounded<T>(__fmul_rn(Widen(chunk[i]), scale));
      chunk[i] = Rounded<T>(__fmul_rn(Widen(normed), Widen(weights[i])));
    }
    StoreChunk<T, kWidth>(out, at, R, chunk);
  }
}

template <typename T>
cudaError_t Launch(cudaStream_t stream, const RopeKeysArgs& a) {
  constexpr int kWidth = 16 / sizeof(T);
  const uintptr_t pointers = reinterpret_cast<uintptr_t>(a.kv) |
                             reinterpret_cast<uintptr_t>(a.weight) |
                             reinterpret_cast<uintptr_t>(a.out);
  if (pointers % 16 == 0 && a.latent_width % kWidth == 0 &&
      (a.latent_width + 2 * a.angles.pairs) % kWidth == 0) {
    RopeKeysKernel<T, kWidth><<<a.tokens, kThreads, 0, stream>>>(a);
  } else {
    RopeKeysKernel<T, 1><<<a.tokens, kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchRopeKeys(cudaStream_t stream, const RopeKeysArgs& args) {
  if (args.tokens == 0) return cudaSuccess;
  return args.bfloat16 ? Launch<__nv_bfloat16>(stream, args)
                       : Launch<float>(stream, args);
}

}  // namespace kdtree_jax
