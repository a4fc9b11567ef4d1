// Device code that the kernels with a rotation share.

#ifndef KDTREE_JAX_ROPE_CUH_
#define KDTREE_JAX_ROPE_CUH_

#include <cstdint>

#include "chunks.cuh"
#include "rope.h"

namespace kdtree_jax {

// (cos, sin) of a pair at a position, rounded once to float32.
//
// CUDA's float64 functions are within 2 ulp of exact, so they can round to another
// float32 than numpy's only within 2 ulp of the middle of two floats: fewer than one in
// 10^8 values. Below 262,144 positions that happens nowhere for the frequencies of the
// published models; tests/ops/rope_cuda_test.py compares every value.
__device__ inline float2 RopeCosSin(const RopeAngles& angles, int position, int pair) {
  const int p = min(max(position, 0), angles.length - 1);
  if (angles.cos != nullptr) {
    const int64_t at = static_cast<int64_t>(p) * angles.pairs + pair;
    return {angles.cos[at], angles.sin[at]};
  }
  const double frequency = angles.frequencies[pair];
  const double angle =
      angles.float32_angles
          ? static_cast<double>(
                __fmul_rn(__int2float_rn(p), __double2float_rn(frequency)))
          : __dmul_rn(static_cast<double>(p), frequency);
  double sine, cosine;
  sincos(angle, &sine, &cosine);
  return {__double2float_rn(__dmul_rn(cosine, angles.amplitude)),
          __double2float_rn(__dmul_rn(sine, angles.amplitude))};
}

// Each product is rounded before the sum, as in numpy: no fused multiply-add.
template <typename T>
__device__ inline void RotatePair(T first, T second, float2 cos_sin, T* out_first,
                                  T* out_second) {
  const float a = Widen(first), b = Widen(second);
  const float c = cos_sin.x, s = cos_sin.y;
  *out_first = Rounded<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
  *out_second = Rounded<T>(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROPE_CUH_
