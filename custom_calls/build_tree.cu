// From logits to trees in two launches. The first leaves the candidates of each slice
// of each row (slice_candidates.cuh). The second has one block per row, which merges
// the slices' candidates and sums into the row of the table; the block that ends last
// in its sequence then searches the table for the tree (best_first.cuh).

#include "build_tree.h"

#include <algorithm>

#include "best_first.cuh"
#include "shared_memory.h"
#include "slice_candidates.cuh"

namespace kdtree_jax {
namespace {

constexpr int kMergeThreads = 512;
constexpr int kMergeInShared = 4096;  // more candidates are read from memory each time
constexpr int kMergeRanked = 64;
constexpr int kTreeThreads = 128;

int SlicesOf(int vocab) { return (vocab - 1) / kLogitsPerSlice + 1; }

struct Workspace {
  SliceSum* sums;
  Candidate* candidates;
  int* arrivals;
};

Workspace SplitWorkspace(const CandidateArgs& a) {
  const size_t parts = static_cast<size_t>(a.batch) * a.depths * SlicesOf(a.vocab);
  Workspace w;
  w.sums = static_cast<SliceSum*>(a.workspace);
  w.candidates = reinterpret_cast<Candidate*>(w.sums + parts);
  w.arrivals = reinterpret_cast<int*>(w.candidates + parts * a.width);
  return w;
}

__device__ __forceinline__ double WarpSum(double value) {
  for (int apart = 16; apart > 0; apart /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, apart);
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T WarpMax(T value) {
  for (int apart = 16; apart > 0; apart /= 2) {
    value = max(value, __shfl_xor_sync(kWholeWarp, value, apart));
  }
  return value;
}

// log(sum(exp(x - top))) of a row, by one warp. All terms are positive and the one that
// is exactly 1 stays apart, so that also a tiny result is right relative to itself.
__device__ double LogSum(const SliceSum* sums, int slices, float* row_top) {
  const int lane = threadIdx.x % 32;
  float top = -INFINITY;
  for (int s = lane; s < slices; s += 32) top = fmaxf(top, sums[s].top);
  top = WarpMax(top);
  int first = slices;  // the first slice that has the maximum: its 1 is left out
  for (int s = lane; s < slices; s += 32) {
    if (sums[s].top == top) first = min(first, s);
  }
  first = __reduce_min_sync(kWholeWarp, first);
  double rest = 0;
  for (int s = lane; s < slices; s += 32) {
    if (sums[s].top == -INFINITY) continue;
    const double own = sums[s].sum + (s == first ? 0 : 1);
    const double apart = static_cast<double>(sums[s].top) - static_cast<double>(top);
    rest += own * exp(apart);
  }
  *row_top = top;
  return log1p(WarpSum(rest));
}

// Grid: [B * L]. kTree: also builds the trees; `arrivals` [B] starts at 0.
template <bool kTree>
__global__ void __launch_bounds__(kMergeThreads, 1)
    MergeSlicesKernel(CandidateArgs a, int slices, const Candidate* candidates,
                      const SliceSum* sums, int* arrivals, TreeArgs tree) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ double log_sum;
  __shared__ float row_top;
  __shared__ Candidate bounds[2];
  __shared__ int found_count;
  __shared__ bool last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x, width = a.width;
  const int count = slices * width;
  const Candidate* all = candidates + static_cast<int64_t>(row) * count;
  Candidate* found = reinterpret_cast<Candidate*>(memory);
  const int room = RankedAtMost(width, kMergeRanked);

  const Candidate* pool = all;
  if (count <= kMergeInShared) {
    Candidate* copy = found + room;
    for (int i = threadIdx.x; i < count; i += kMergeThreads) copy[i] = all[i];
    pool = copy;
  }
  if (warp == 0) {
    float top;
    const double log_of_sum =
        LogSum(sums + static_cast<int64_t>(row) * slices, slices, &top);
    if (lane == 0) {
      found_count = 0;
      log_sum = log_of_sum;
      row_top = top;
    }
  } else if (warp == 1) {
    // The k-th best is not below any slice's k-th best, nor above any slice's best.
    Candidate low = 0, high = 0;
    for (int s = lane; s < slices; s += 32) {
      low = max(low, all[static_cast<int64_t>(s) * width + width - 1]);
      high = max(high, all[static_cast<int64_t>(s) * width]);
    }
    low = WarpMax(low);
    high = WarpMax(high);
    if (lane == 0) {
      bounds[0] = low;
      bounds[1] = high;
    }
  }
  __syncthreads();
  Candidate low = bounds[0], high = bounds[1];
  __shared__ int partial[2][kMergeThreads / 32];
  const auto count_from = [&](Candidate bound, int turn) {
    int n = 0;
    for (int i = threadIdx.x; i < count; i += kMergeThreads) n += pool[i] >= bound;
    return BlockSum<kMergeThreads / 32>(n, partial[turn & 1]);
  };
  int turn = 0;
  int total = count_from(low, turn++);
  // Ends: candidates are distinct, so exactly k are at or above the k-th best, and
  // `room` is k at least.
  while (total > room) {
    const Candidate middle = low + (high - low + 1) / 2;
    const int n = count_from(middle, turn++);
    if (n >= width) {
      low = middle;
      total = n;
    } else {
      high = middle - 1;
    }
  }
  for (int i = threadIdx.x; i < count; i += kMergeThreads) {
    const Candidate candidate = pool[i];
    if (candidate >= low) found[atomicAdd(&found_count, 1)] = candidate;
  }
  __syncthreads();
  const float top = row_top;
  const double log_of_sum = log_sum;
  const bool finite = top > -INFINITY && top < INFINITY;
  float* log_probs = a.log_probs + static_cast<int64_t>(row) * width;
  int32_t* token_ids = a.token_ids + static_cast<int64_t>(row) * width;
  RankBest(found, total, width, [&](int rank, Candidate candidate) {
    // Both terms are at most 0, so nothing cancels.
    const double below =
        static_cast<double>(LogitOf(candidate)) - static_cast<double>(top);
    log_probs[rank] = finite ? static_cast<float>(below - log_of_sum) : NAN;
    token_ids[rank] = TokenOf(candidate);
  });
  if (!kTree) return;

  __threadfence();
  __syncthreads();
  const int b = row / a.depths;
  if (threadIdx.x == 0) last = atomicAdd(&arrivals[b], 1) == a.depths - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  BuildOneTree(tree, b, memory);
}

__global__ void __launch_bounds__(kTreeThreads) TreeKernel(TreeArgs tree) {
  extern __shared__ __align__(16) unsigned char memory[];
  BuildOneTree(tree, blockIdx.x, memory);
}

size_t MergeBytes(const CandidateArgs& a) {
  const int count = SlicesOf(a.vocab) * a.width;
  const int room = RankedAtMost(a.width, kMergeRanked);
  return sizeof(Candidate) * (room + (count <= kMergeInShared ? count : 0));
}

constexpr size_t kMostMergeBytes =
    sizeof(Candidate) *
    (RankedAtMost(kBuildTreeMaxWidth, kMergeRanked) + kMergeInShared);
KDT_DYNAMIC_SHARED_MEMORY(MergeSlicesKernel,
                          std::max(kMostMergeBytes, kMostSearchBytes));
KDT_DYNAMIC_SHARED_MEMORY(TreeKernel, kMostSearchBytes);
// More than this would have to be asked for.
static_assert(std::max(kMostMergeBytes, kMostSearchBytes) <= 47 * 1024);

size_t TreeBytes(const TreeArgs& a) { return SearchBytes(a.budget, a.depths, a.width); }

template <typename T>
cudaError_t LaunchSlices(cudaStream_t stream, const CandidateArgs& a, Workspace w) {
  const int slices = SlicesOf(a.vocab);
  const unsigned blocks = static_cast<unsigned>(a.batch) * a.depths * slices;
  const bool aligned =
      a.vocab % kChunk == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
  auto kernel =
      aligned ? SliceCandidatesKernel<T, true> : SliceCandidatesKernel<T, false>;
  kernel<<<blocks, kSliceThreads, 0, stream>>>(a, slices, w.candidates, w.sums,
                                               w.arrivals);
  return cudaGetLastError();
}

bool Fits(const TreeArgs& a) {
  return a.budget >= 0 && a.budget < kBuildTreeMaxNodes && a.rows > a.budget;
}

template <bool kTree>
cudaError_t LaunchBoth(cudaStream_t stream, const CandidateArgs& a,
                       const TreeArgs& tree, size_t shared_bytes) {
  if (a.batch == 0) return cudaSuccess;
  // A tree is built behind the last row of its table; a table without rows is empty.
  if (a.depths == 0) return kTree ? cudaErrorInvalidValue : cudaSuccess;
  if (a.width < 1 || a.width > kBuildTreeMaxWidth || a.width > a.vocab) {
    return cudaErrorInvalidValue;
  }
  const Workspace w = SplitWorkspace(a);
  const cudaError_t status = a.is_bfloat16 ? LaunchSlices<__nv_bfloat16>(stream, a, w)
                                           : LaunchSlices<float>(stream, a, w);
  if (status != cudaSuccess) return status;
  MergeSlicesKernel<kTree><<<a.batch * a.depths, kMergeThreads, shared_bytes, stream>>>(
      a, SlicesOf(a.vocab), w.candidates, w.sums, w.arrivals, tree);
  return cudaGetLastError();
}

}  // namespace

size_t CandidateWorkspaceBytes(int batch, int depths, int vocab, int width) {
  const size_t parts = static_cast<size_t>(batch) * depths * SlicesOf(vocab);
  const size_t bytes =
      parts * (sizeof(SliceSum) + sizeof(Candidate) * width) + sizeof(int) * batch;
  return (bytes + 7) / 8 * 8;
}

cudaError_t LaunchLogSoftmaxTopK(cudaStream_t stream, const CandidateArgs& args) {
  return LaunchBoth<false>(stream, args, TreeArgs{}, MergeBytes(args));
}

cudaError_t LaunchTreeFromTable(cudaStream_t stream, const TreeArgs& args) {
  if (args.batch == 0) return cudaSuccess;
  if (!Fits(args)) return cudaErrorInvalidValue;
  TreeKernel<<<args.batch, kTreeThreads, TreeBytes(args), stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchBuildTree(cudaStream_t stream, const CandidateArgs& candidates,
                            const TreeArgs& tree) {
  if (!Fits(tree)) return cudaErrorInvalidValue;
  const size_t merge = MergeBytes(candidates), search = TreeBytes(tree);
  return LaunchBoth<true>(stream, candidates, tree, std::max(merge, search));
}

}  // namespace kdtree_jax
