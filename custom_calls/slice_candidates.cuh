// First half of the log-softmax with top k: every block takes one slice of one row of
// logits, holds it in registers, and leaves its k best candidates, its maximum and its
// sum of exponentials. The row is read from memory once.

#ifndef KDTREE_JAX_SLICE_CANDIDATES_CUH_
#define KDTREE_JAX_SLICE_CANDIDATES_CUH_

#include <cuda_bf16.h>

#include "build_tree.h"
#include "log_softmax_math.h"

namespace kdtree_jax {

// A candidate is one number that orders as they must be taken: the logit's key above,
// the complement of the token below, so that of equal logits the lowest token wins.
using Candidate = unsigned long long;

__device__ __forceinline__ Candidate MakeCandidate(float logit, int token) {
  // Adding zero makes -0.0 equal 0.0.
  const uint32_t key = KeyOf(Add(logit, 0.0f));
  return static_cast<Candidate>(key) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ float LogitOf(Candidate candidate) {
  return FloatOfKey(static_cast<uint32_t>(candidate >> 32));
}
__device__ __forceinline__ int TokenOf(Candidate candidate) {
  return static_cast<int>(~static_cast<uint32_t>(candidate));
}

struct SliceSum {
  double sum;  // of exp(x - top) over all x of the slice but one that equals top
  float top;   // maximum; +inf where there is a NaN
};

// Candidates that are ranked by comparing all with all; more are first reduced.
__host__ __device__ constexpr int RankedAtMost(int width, int least) {
  const int some_more = width + (width / 4 > 32 ? width / 4 : 32);
  return some_more > least ? some_more : least;
}

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kSliceThreads = 640;
constexpr int kSliceWarps = kSliceThreads / 32;
constexpr int kChunk = 8;  // neighbouring logits that a thread loads at once
constexpr int kChunks = kLogitsPerSlice / (kSliceThreads * kChunk);
static_assert(kChunks * kSliceThreads * kChunk == kLogitsPerSlice);
constexpr int kSliceRanked = 256;  // least room for candidates
constexpr int kSliceRankedMax = RankedAtMost(kBuildTreeMaxWidth, kSliceRanked);

__device__ __forceinline__ void LoadChunk(const float* from, float (&to)[kChunk]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from));
  const float4 b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ __forceinline__ void LoadChunk(const __nv_bfloat16* from,
                                          float (&to)[kChunk]) {
  const uint4 pairs = __ldg(reinterpret_cast<const uint4*>(from));
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = FloatOf(words[i] << 16);
    to[2 * i + 1] = FloatOf(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ float LoadOne(const float* from) { return __ldg(from); }
__device__ __forceinline__ float LoadOne(const __nv_bfloat16* from) {
  return __bfloat162float(*from);
}

// Sum over the block. The caller passes another `partial` in each of two calls in a
// row, so that one barrier is enough.
template <int kWarps>
__device__ __forceinline__ int BlockSum(int value, int* partial) {
  value = __reduce_add_sync(kWholeWarp, value);
  const int lane = threadIdx.x % 32;
  if (lane == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_add_sync(kWholeWarp, lane < kWarps ? partial[lane] : 0);
}

// Calls write(rank, candidate) once for each of the `width` best of `count` distinct
// candidates, from some thread of the block.
template <typename Write>
__device__ __forceinline__ void RankBest(const Candidate* candidates, int count,
                                         int width, Write write) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < count; i += blockDim.x / 32) {
    const Candidate mine = candidates[i];
    int better = 0;
    for (int j = lane; j < count; j += 32) better += candidates[j] > mine;
    better = __reduce_add_sync(kWholeWarp, better);
    if (lane == 0 && better < width) write(better, mine);
  }
}

// Grid: [B * L * slices]. kAligned: rows start at multiples of 16 bytes and of kChunk
// logits. `candidates` [B * L, slices, k], sorted, may hold tokens >= V of -inf behind
// the row's end; `sums` [B * L, slices]; `arrivals` [B] is set to 0.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kSliceThreads, 1)
    SliceCandidatesKernel(CandidateArgs a, int slices, Candidate* candidates,
                          SliceSum* sums, int* arrivals) {
  __shared__ Candidate found[kSliceRankedMax];
  __shared__ double warp_sum[kSliceWarps];
  __shared__ uint32_t warp_max[kSliceWarps], warp_min[kSliceWarps];
  __shared__ int partial[2][kSliceWarps];
  __shared__ int tops, found_count;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int begin = slice * kLogitsPerSlice;
  const int first = begin + static_cast<int>(threadIdx.x) * kChunk;
  const int chunks =
      min(kChunks, (a.vocab - begin - 1) / (kSliceThreads * kChunk) + 1);
  const int64_t logit_row =
      static_cast<int64_t>(row / a.depths) * a.logit_depths + row % a.depths;
  const T* logits = static_cast<const T*>(a.logits) + logit_row * a.vocab;
  if (slice == 0 && row % a.depths == 0 && threadIdx.x == 0) {
    arrivals[row / a.depths] = 0;
  }
  if (threadIdx.x == 0) tops = found_count = 0;

  float x[kChunks][kChunk];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int token = first + c * kSliceThreads * kChunk;
    if (kAligned && token < a.vocab) {
      LoadChunk(logits + token, x[c]);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const bool inside = !kAligned && token + i < a.vocab;
        x[c][i] = inside ? LoadOne(logits + token + i) : -INFINITY;
      }
    }
  }

  // Extrema: of the slice, and the least of the threads' maxima.
  float thread_top = -INFINITY;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      // A NaN spoils the row as +inf does.
      if (isnan(x[c][i])) x[c][i] = INFINITY;
      thread_top = fmaxf(thread_top, x[c][i]);
    }
  }
  const uint32_t thread_key = KeyOf(Add(thread_top, 0.0f));
  const uint32_t most = __reduce_max_sync(kWholeWarp, thread_key);
  const uint32_t least = __reduce_min_sync(kWholeWarp, thread_key);
  if (lane == 0) {
    warp_max[warp] = most;
    warp_min[warp] = least;
  }
  __syncthreads();
  uint32_t high = __reduce_max_sync(kWholeWarp, warp_max[min(lane, kSliceWarps - 1)]);
  uint32_t low = __reduce_min_sync(kWholeWarp, warp_min[min(lane, kSliceWarps - 1)]);
  const float top = FloatOfKey(high);

  const auto for_each = [&](auto f) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c < chunks) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          f(x[c][i], first + c * kSliceThreads * kChunk + i);
        }
      }
    }
  };

  ExpSum exps;
  for_each([&](float value, int) { exps.Add(value, top); });
  double sum = exps.Value();
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, apart);
  }
  if (lane == 0) warp_sum[warp] = sum;
  if (thread_top == top) {
    int count = 0;
    for_each([&](float value, int) { count += value == top; });
    atomicAdd(&tops, count);
  }

  // A threshold that k logits reach, and few more: of the threads' maxima, at least k
  // must reach it. Where k is too large for that, all logits reach it.
  const int width = a.width;
  const int room = RankedAtMost(width, kSliceRanked);
  if (width > kSliceThreads) {
    low = kKeyOfMinusInfinity;
  } else {
    uint32_t above = high;
    while (low < above) {
      const uint32_t middle = low + (above - low + 1) / 2;
      const int count = __syncthreads_count(thread_key >= middle);
      if (count >= width) {
        low = middle;
        if (count <= width + width / 4) break;
      } else {
        above = middle - 1;
      }
    }
  }
  const auto count_if = [&](auto f, int turn) {
    int count = 0;
    for_each([&](float value, int token) { count += f(value, token); });
    return BlockSum<kSliceWarps>(count, partial[turn & 1]);
  };
  float threshold = FloatOfKey(low);
  int last_tie = INT_MAX;  // logits at the threshold count up to this token
  int turn = 0;
  int total = count_if([&](float value, int) { return value >= threshold; }, turn++);

  // Too many for the room: bisect exactly, first the logit, then the token of ties.
  while (total > room && low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const float bound = FloatOfKey(middle);
    const int count =
        count_if([&](float value, int) { return value >= bound; }, turn++);
    if (count >= width) {
      low = middle;
      threshold = bound;
      total = count;
    } else {
      high = middle - 1;
    }
  }
  if (total > room) {
    int from = begin;
    last_tie = begin + kLogitsPerSlice - 1;
    while (total > room) {
      const int middle = from + (last_tie - from) / 2;
      const int count = count_if(
          [&](float value, int token) {
            return value > threshold || (value == threshold && token <= middle);
          },
          turn++);
      if (count >= width) {
        last_tie = middle;
        total = count;
      } else {
        from = middle + 1;
      }
    }
  }

  for_each([&](float value, int token) {
    if (value > threshold || (value == threshold && token <= last_tie)) {
      found[atomicAdd(&found_count, 1)] = MakeCandidate(value, token);
    }
  });
  __syncthreads();
  const int64_t part = static_cast<int64_t>(blockIdx.x);
  Candidate* best = candidates + part * width;
  RankBest(found, total, width,
           [&](int rank, Candidate candidate) { best[rank] = candidate; });
  if (threadIdx.x == 0) {
    double slice_sum = tops - 1;
    for (int w = 0; w < kSliceWarps; ++w) slice_sum += warp_sum[w];
    sums[part] = SliceSum{slice_sum, top};
  }
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_SLICE_CANDIDATES_CUH_
