// The softmax of a tile of 64 rows by 32 keys, for threads that hold products' results:
// rows lane / 4 and 8 more of a warp's 16; keys lane % 4 * 2, 1 more, and multiples of
// 8 more. Both kernels for Hopper go through these functions, so their bits agree.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_SOFTMAX_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_SOFTMAX_CUH_

#include <cmath>

#include "mma.cuh"
#include "tree_attention_hopper_layout.cuh"

namespace kdtree_jax {
namespace hopper {

constexpr float kSlack = 8.f;  // see Follow

// Which of a thread's values i are of its row r.
__device__ __forceinline__ constexpr int RowOf(int i) { return i / 2 % 2; }

// -inf for keys that the node does not see: `left` is how many of the tile it sees,
// from this thread's first one on.
__device__ __forceinline__ void Mask(float (&scores)[16], int left) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i / 4 * 8 + i % 2 >= left) scores[i] = -INFINITY;
  }
}

// Of this thread's scores.
__device__ __forceinline__ void FindMaxima(const float (&scores)[16], float (&top)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = fmaxf(scores[j * 4 + r * 2], scores[j * 4 + r * 2 + 1]);
    }
    top[r] = fmaxf(fmaxf(pairs[0], pairs[1]), fmaxf(pairs[2], pairs[3]));
  }
}

// Over the 4 threads of a row: with 1, then with 2.
__device__ __forceinline__ void ShareMaxima(float (&top)[2], int lanes) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], lanes));
  }
}

// A row's reference follows its maximum only where it falls behind by more than 2**8:
// powers up to that lose no precision, and most tiles need no rescaling. Returns the
// factor for what the row has summed so far. In units of log2, as all from here on.
__device__ __forceinline__ float Follow(float& base, float top) {
  if (!(top > __fadd_rn(base, kSlack))) return 1.f;
  const float factor = Exp2(__fsub_rn(base, top));
  base = top;
  return factor;
}

// What to add to a scaled score. Where all scores are -inf, weights are 0.
__device__ __forceinline__ float ShiftOf(float base) {
  return base == -INFINITY ? 0.f : -base;
}

// A fourth of the weights, and this thread's sums of them.
template <int kPart>
__device__ __forceinline__ void FindWeights(const float (&scores)[16], float scale,
                                            const float (&shift)[2], float (&x)[16],
                                            float (&sum)[2]) {
#pragma unroll
  for (int i = kPart * 4; i < kPart * 4 + 4; ++i) {
    const int r = RowOf(i);
    x[i] = Exp2(__fmaf_rn(scores[i], scale, shift[r]));
    sum[r] = i < 4 && i % 2 == 0 ? x[i] : __fadd_rn(sum[r], x[i]);
  }
}

// Weights as the first operand of the products with 2 x 16 keys' values.
__device__ __forceinline__ void PackWeights(const float (&x)[16], uint32_t (&p)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    p[i / 4][i % 4] = PackBFloat16(x[i * 2], x[i * 2 + 1]);
  }
}

__device__ __forceinline__ void StoreWeights(const uint32_t (&p)[2][4], char* to,
                                             int thread) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    reinterpret_cast<uint4*>(to)[k * 128 + thread] =
        make_uint4(p[k][0], p[k][1], p[k][2], p[k][3]);
  }
}

__device__ __forceinline__ void LoadWeights(const char* from, int thread,
                                            uint32_t (&p)[2][4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint4 v = reinterpret_cast<const uint4*>(from)[k * 128 + thread];
    p[k][0] = v.x, p[k][1] = v.y, p[k][2] = v.z, p[k][3] = v.w;
  }
}

// The sum of a row over the 4 threads that have a part.
__device__ __forceinline__ float SumOfRow(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
}

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_SOFTMAX_CUH_
