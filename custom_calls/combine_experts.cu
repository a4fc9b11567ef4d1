// A thread sums some neighbouring features of one token. Which ones does not show in
// the bits, since features do not meet.

#include <cuda_bf16.h>

#include "chunks.cuh"
#include "combine_experts.h"
#include "launch_early.cuh"

namespace kdtree_jax {
namespace {

constexpr int kThreads = 64;   // few tokens must spread over many SMs
constexpr int kSlotBatch = 8;  // rows of y in flight

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    CombineExpertsKernel(CombineExpertsArgs a, int token_blocks) {
  using Vector = Pack<T, kWidth>;
  WaitForKernelBefore();
  const int token = blockIdx.x / token_blocks;
  const int at = blockIdx.x % token_blocks * kThreads + threadIdx.x;
  const int vectors = a.width / kWidth;
  if (at >= vectors) return;
  const int64_t first = static_cast<int64_t>(token) * a.slots;
  const Vector* y = static_cast<const Vector*>(a.y) + first * vectors + at;

  float sums[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = 0.0f;
  for (int slot = 0; slot < a.slots; slot += kSlotBatch) {
    Vector rows[kSlotBatch];
    float weights[kSlotBatch];
    bool valid[kSlotBatch];
#pragma unroll
    for (int s = 0; s < kSlotBatch; ++s) {
      valid[s] = slot + s < a.slots;
      if (valid[s]) weights[s] = a.weights[first + slot + s];
      if (valid[s] && a.experts != nullptr) {
        valid[s] = static_cast<unsigned>(a.experts[first + slot + s]) <
                   static_cast<unsigned>(a.num_experts);
      }
    }
#pragma unroll
    for (int s = 0; s < kSlotBatch; ++s) {
      if (valid[s]) rows[s] = y[static_cast<int64_t>(slot + s) * vectors];
    }
#pragma unroll
    for (int s = 0; s < kSlotBatch; ++s) {
      if (!valid[s]) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float product = __fmul_rn(weights[s], Widen(rows[s].values[i]));
        sums[i] = __fadd_rn(sums[i], product);
      }
    }
  }
  Vector result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result.values[i] = Rounded<T>(sums[i]);
  static_cast<Vector*>(a.out)[static_cast<int64_t>(token) * vectors + at] = result;
}

template <typename T>
cudaError_t LaunchElement(cudaStream_t stream, const CombineExpertsArgs& a) {
  constexpr int kMostWidth = 16 / sizeof(T);
  const bool aligned = a.width % kMostWidth == 0 &&
                       reinterpret_cast<uintptr_t>(a.y) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
  const int vectors = aligned ? a.width / kMostWidth : a.width;
  const int token_blocks = (vectors - 1) / kThreads + 1;
  const int64_t blocks = static_cast<int64_t>(a.tokens) * token_blocks;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel =
      aligned ? CombineExpertsKernel<T, kMostWidth> : CombineExpertsKernel<T, 1>;
  return LaunchKernel(stream, a.early, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                      0, kernel, a, token_blocks);
}

}  // namespace

cudaError_t LaunchCombineExperts(cudaStream_t stream, const CombineExpertsArgs& args) {
  if (args.tokens == 0 || args.width == 0) return cudaSuccess;
  if (args.is_float32) return LaunchElement<float>(stream, args);
  return LaunchElement<__nv_bfloat16>(stream, args);
}

}  // namespace kdtree_jax
