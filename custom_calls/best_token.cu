// One cluster of blocks per row. Each candidate becomes a 64-bit key whose order is
// (logit, lowest id), so that the maximum has no order of evaluation.

#include "best_token.h"

#include <cfloat>

#include "rows.cuh"

namespace kdtree_jax {
namespace {

namespace cg = cooperative_groups;
using Key = unsigned long long;

constexpr Key kUnusable = ~Key{0};  // above every key of a finite logit

__device__ Key MakeKey(float value, int token) {
  // -0 equals +0. Negative floats have the order of their bits reversed.
  const unsigned bits = __float_as_uint(__fadd_rn(value, 0.0f));
  const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (static_cast<Key>(ordered) << 32) | ~static_cast<unsigned>(token);
}

__device__ Key Larger(Key a, Key b) { return a > b ? a : b; }

template <bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    BestTokenKernel(BestTokenArgs a, int parts) {
  __shared__ Key warps[kRowWarps];
  __shared__ Key block_best;
  const cg::cluster_group cluster = cg::this_cluster();
  const int row = blockIdx.x / parts, part = blockIdx.x % parts;

  float best = -INFINITY;
  int token = 0;
  bool usable = true;
  ForEachGroup<kAligned>(
      a.logits + static_cast<size_t>(row) * a.vocab, a.vocab, part, parts,
      [&](int group, float4 x) {
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          usable &= values[i] <= FLT_MAX;  // false for NaN, too
          if (values[i] > best) {          // the first of equal ones stays
            best = values[i];
            token = 4 * group + i;
          }
        }
      });
  Key key = usable ? MakeKey(best, token) : kUnusable;
  for (int lane = 16; lane > 0; lane /= 2) {
    key = Larger(key, __shfl_xor_sync(~0u, key, lane));
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kRowWarps; ++w) key = Larger(key, warps[w]);
    block_best = key;
  }
  cluster.sync();
  if (part == 0 && threadIdx.x == 0) {
    for (int p = 1; p < parts; ++p) {
      key = Larger(key, *cluster.map_shared_rank(&block_best, p));
    }
    const bool found = key != kUnusable && key >> 32 > MakeKey(-INFINITY, 0) >> 32;
    a.tokens[row] = found ? static_cast<int32_t>(~static_cast<unsigned>(key)) : -1;
  }
  cluster.sync();  // no block may end while another reads its shared memory
}

}  // namespace

cudaError_t LaunchBestToken(cudaStream_t stream, const BestTokenArgs& args) {
  if (args.rows == 0) return cudaSuccess;
  const auto kernel = RowsAreAligned(args.logits, args.vocab) ? BestTokenKernel<true>
                                                              : BestTokenKernel<false>;
  return LaunchRows(stream, kernel, args, args.rows, RowParts(args.vocab));
}

}  // namespace kdtree_jax
