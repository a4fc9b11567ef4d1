// The softmax of a tile of 64 rows by 64 keys, for threads that hold products' results:
// rows lane / 4 and 8 more of a warp's 16; keys lane % 4 * 2, 1 more, and multiples of
// 8 more. Both kernels for Hopper go through these functions, so their bits agree.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_SOFTMAX_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_SOFTMAX_CUH_

#include <cmath>

#include "mma.cuh"
#include "tree_attention_hopper_layout.cuh"

namespace kdtree_jax {
namespace hopper {

constexpr int kScores = kTile / 2;     // of a tile, a thread's
constexpr int kKeySteps = kTile / 16;  // products of a tile's weights and values
constexpr float kSlack = 8.f;          // see Follow

// Which of a thread's values i are of its row r.
__device__ __forceinline__ constexpr int RowOf(int i) { return i / 2 % 2; }

// -inf for keys that the node does not see: `left` is how many of the tile it sees,
// from this thread's first one on.
__device__ __forceinline__ void Mask(float (&scores)[kScores], int left) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (i / 4 * 8 + i % 2 >= left) scores[i] = -INFINITY;
  }
}

// Of the rows' scaled scores, over the 4 threads of a row.
__device__ __forceinline__ void FindMaxima(const float (&scores)[kScores], float scale,
                                           float (&top)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float some[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      some[j] = fmaxf(scores[j * 4 + r * 2], scores[j * 4 + r * 2 + 1]);
#pragma unroll
      for (int k = j + 4; k < kScores / 4; k += 4) {
        some[j] = fmaxf(some[j],
                        fmaxf(scores[k * 4 + r * 2], scores[k * 4 + r * 2 + 1]));
      }
    }
    top[r] = fmaxf(fmaxf(some[0], some[1]), fmaxf(some[2], some[3]));
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    const float other0 = __shfl_xor_sync(~0u, top[0], lanes);
    const float other1 = __shfl_xor_sync(~0u, top[1], lanes);
    top[0] = fmaxf(top[0], other0);
    top[1] = fmaxf(top[1], other1);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = __fmul_rn(top[r], scale);
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

// Writes a tile's weights to `to`, as the first operand of the products with 4 x 16
// keys' values. They go to the threads of the same place in the warps that add these.
// Takes the place of the scores, so that many powers are under way at a time.
__device__ __forceinline__ void StoreWeights(float (&scores)[kScores], float scale,
                                             const float (&shift)[2], char* to,
                                             int thread) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    scores[i] = Exp2(__fmaf_rn(scores[i], scale, shift[RowOf(i)]));
  }
#pragma unroll
  for (int k = 0; k < kKeySteps; ++k) {
    const float* x = &scores[k * 8];
    reinterpret_cast<uint4*>(to)[k * 128 + thread] =
        make_uint4(PackBFloat16(x[0], x[1]), PackBFloat16(x[2], x[3]),
                   PackBFloat16(x[4], x[5]), PackBFloat16(x[6], x[7]));
  }
}

__device__ __forceinline__ void LoadWeights(const char* from, int thread,
                                            uint32_t (&weights)[kKeySteps][4]) {
#pragma unroll
  for (int k = 0; k < kKeySteps; ++k) {
    const uint4 v = reinterpret_cast<const uint4*>(from)[k * 128 + thread];
    weights[k][0] = v.x, weights[k][1] = v.y;
    weights[k][2] = v.z, weights[k][3] = v.w;
  }
}

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_SOFTMAX_CUH_
