// (x - max) - log(sum(exp(x - max))), one cluster of blocks per slot of a path. Each
// block sums relative to the maximum of its own part, so that the blocks meet once. All
// sums have a fixed order, which depends on V alone.

#include "token_log_probs.h"

#include "rows.cuh"

namespace kdtree_jax {
namespace {

namespace cg = cooperative_groups;

struct Part {
  float max;
  float sum;
};

// The result of `combine` over the block's threads, in thread 0.
template <typename Combine>
__device__ float BlockReduce(float x, float* warps, Combine combine) {
  for (int lane = 16; lane > 0; lane /= 2) {
    x = combine(x, __shfl_xor_sync(~0u, x, lane));
  }
  __syncthreads();  // the last use of `warps` is over
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kRowWarps; ++w) x = combine(x, warps[w]);
  }
  return x;
}

template <bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    TokenLogProbsKernel(TokenLogProbsArgs a, int parts) {
  __shared__ float warps[kRowWarps];
  __shared__ Part block_part;
  const cg::cluster_group cluster = cg::this_cluster();
  const int row = blockIdx.x / parts, part = blockIdx.x % parts;
  int slot = a.path[row];
  if (slot < 0) {  // the same in all blocks of the cluster
    if (part == 0 && threadIdx.x == 0) a.log_probs[row] = 0.0f;
    return;
  }
  slot = min(slot, a.nodes - 1);
  const size_t source = static_cast<size_t>(row / a.path_len) * a.nodes + slot;
  const float* logits = a.logits + source * a.vocab;

  float top = -INFINITY;
  ForEachGroup<kAligned>(logits, a.vocab, part, parts, [&](int, float4 x) {
    top = fmaxf(top, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
  });
  top = BlockReduce(top, warps, [](float x, float y) { return fmaxf(x, y); });
  if (threadIdx.x == 0) block_part.max = top;
  __syncthreads();
  // A part of nothing but -inf has the sum 0; a NaN in it must not get lost.
  const float shift = block_part.max == -INFINITY ? 0.0f : block_part.max;
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  ForEachGroup<kAligned>(logits, a.vocab, part, parts, [&](int, float4 x) {
    sums.x += expf(x.x - shift);
    sums.y += expf(x.y - shift);
    sums.z += expf(x.z - shift);
    sums.w += expf(x.w - shift);
  });
  const float sum = BlockReduce((sums.x + sums.y) + (sums.z + sums.w), warps,
                                [](float x, float y) { return x + y; });
  if (threadIdx.x == 0) block_part.sum = sum;
  cluster.sync();
  if (part == 0 && threadIdx.x == 0) {
    for (int p = 1; p < parts; ++p) {
      top = fmaxf(top, cluster.map_shared_rank(&block_part, p)->max);
    }
    float total = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const Part other = *cluster.map_shared_rank(&block_part, p);
      total += other.sum * expf(other.max - top);
    }
    const int token = min(max(a.tokens[source], 0), a.vocab - 1);
    a.log_probs[row] = (logits[token] - top) - logf(total);
  }
  cluster.sync();  // no block may end while another reads its shared memory
}

}  // namespace

cudaError_t LaunchTokenLogProbs(cudaStream_t stream, const TokenLogProbsArgs& args) {
  const int rows = args.batch * args.path_len;
  if (rows == 0) return cudaSuccess;
  if (args.nodes < 1 || args.vocab < 1) return cudaErrorInvalidValue;
  const auto kernel = RowsAreAligned(args.logits, args.vocab)
                          ? TokenLogProbsKernel<true>
                          : TokenLogProbsKernel<false>;
  return LaunchRows(stream, kernel, args, rows, RowParts(args.vocab));
}

}  // namespace kdtree_jax
