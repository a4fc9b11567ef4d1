// The softmax of a tile of 64 rows by 64 keys, for threads that hold products' results:
// rows lane / 4 and 8 more of a warp's 16; keys lane % 4 * 2, 1 more, and multiples of
// 8 more. Both kernels for Hopper go through these functions, so their bits agree.
//
// A tile's weights are powers of 2 of its scores less a reference of its own, the row's
// maximum rounded up: they need nothing of other tiles. Who adds values keeps another one
// for all that the row has summed. As both are whole numbers, weights go from one to the
// other, and sums to a new one, by products with powers of 2, exact but below 2**-126.

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

// The rows' references, over the 4 threads of a row. In units of log2, as all from here
// on.
__device__ __forceinline__ void FindReferences(const float (&scores)[kScores],
                                               float scale, float (&top)[2]) {
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
  for (int r = 0; r < 2; ++r) top[r] = ceilf(__fmul_rn(top[r], scale));
}

// The exponent of 2 ** x, of a float or a bf16, for whole x up to 127. 0, which stands
// for 0, for x below -126 and NaN. The sum has x + 127 in its lowest bits.
__device__ __forceinline__ uint32_t ExponentOf(float x) {
  constexpr float kWhole = 12582912.f;  // 1.5 * 2**23
  return __float_as_uint(__fadd_rn(fmaxf(x, -127.f), kWhole + 127.f)) & 0xff;
}

// A row's reference follows a tile's only where it falls behind by more than 8: powers
// up to 2**8 lose no precision, and most tiles need no new one. Returns the factor for
// what the row has summed so far.
__device__ __forceinline__ float Follow(float& base, float top) {
  if (!(top > __fadd_rn(base, kSlack))) return 1.f;
  const float factor = __uint_as_float(ExponentOf(__fsub_rn(base, top)) << 23);
  base = top;
  return factor;
}

// From a tile's references to the rows'.
__device__ __forceinline__ void ChangeReferences(uint32_t (&weights)[kKeySteps][4],
                                                 const float (&top)[2],
                                                 const float (&base)[2]) {
  uint32_t scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t exponent = ExponentOf(__fsub_rn(top[r], base[r]));
    scale[r] = exponent << 7 | exponent << 23;  // twice, as bf16
  }
#pragma unroll
  for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& pair = weights[k][i];
      asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(scale[i % 2]));
    }
  }
}

// Weights take the place of scores, so that many powers are under way at a time. Where
// a row's scores are all -inf, they are 0.
__device__ __forceinline__ void FormWeights(float (&scores)[kScores], float scale,
                                            const float (&top)[2]) {
  const float shift[2] = {top[0] == -INFINITY ? 0.f : -top[0],
                          top[1] == -INFINITY ? 0.f : -top[1]};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    scores[i] = Exp2(__fmaf_rn(scores[i], scale, shift[RowOf(i)]));
  }
}

// Writes a tile's weights to `to`, as the first operand of the products with 4 x 16
// keys' values. They go to the threads of the same place in the warps that add these.
__device__ __forceinline__ void StoreWeights(const float (&scores)[kScores], char* to,
                                             int thread) {
#pragma unroll
  for (int k = 0; k < kKeySteps; ++k) {
    const float* x = &scores[k * 8];
    reinterpret_cast<uint4*>(to)[k * 128 + thread] =
        make_uint4(PackBFloat16(x[0], x[1]), PackBFloat16(x[2], x[3]),
                   PackBFloat16(x[4], x[5]), PackBFloat16(x[6], x[7]));
  }
}

// Adds a tile's weights to this thread's sums of its rows, which are a fourth of all.
__device__ __forceinline__ void AddWeights(const uint32_t (&weights)[kKeySteps][4],
                                           const float (&factor)[2], float (&sums)[2]) {
  float tile[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = tile[i % 2];
      sum = __fadd_rn(sum, __uint_as_float(weights[k][i] << 16));
      sum = __fadd_rn(sum, __uint_as_float(weights[k][i] & 0xffff0000));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[r] = __fmaf_rn(sums[r], factor[r], tile[r]);
}

// Of the 4 threads of a row.
__device__ __forceinline__ float SumOfRow(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
}

// The rows' references, beside the weights. The 4 threads of a row have the same.
__device__ __forceinline__ void StoreReferences(const float (&top)[2], char* to,
                                                int thread) {
  float* references = reinterpret_cast<float*>(to) + thread / 32 * 16 + thread % 32 / 4;
  references[0] = top[0];
  references[8] = top[1];
}

__device__ __forceinline__ void LoadReferences(const char* from, int thread,
                                               float (&top)[2]) {
  const float* references =
      reinterpret_cast<const float*>(from) + thread / 32 * 16 + thread % 32 / 4;
  top[0] = references[0];
  top[1] = references[8];
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
