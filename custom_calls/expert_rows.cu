// One block each, or one warp for few pairs. The pairs are sorted by counting: every warp
// counts the experts of a run of consecutive pairs, the counts are turned into the places
// where the warp's first pair of each expert goes, and the warps walk over their runs once
// more. No result depends on which warp comes first.

#include "expert_rows.h"
#include "launch_early.cuh"
#include "shared_memory.h"

namespace kdtree_jax {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSharedBytes = 98 * 1024;  // beside the static part
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(3 * (kMostGroups + 1) * sizeof(int) <= kSharedBytes, "");

// The sum of x over the threads before this one, saturating at `most`, by all threads
// of the block; x is 0 .. most.
__device__ unsigned SumBefore(unsigned x, unsigned most, unsigned* total) {
  __shared__ unsigned warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned sum = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum = min(sum + other, most);
  }
  unsigned before = __shfl_up_sync(kAllLanes, sum, 1);
  if (lane == 0) before = 0;
  __syncthreads();  // The last use of `warps` is over.
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  unsigned all = lane < kWarps ? warps[lane] : 0;
#pragma unroll
  for (int distance = 1; distance < kWarps; distance *= 2) {
    const unsigned other = __shfl_up_sync(kAllLanes, all, distance);
    if (lane >= distance) all = min(all + other, most);
  }
  *total = __shfl_sync(kAllLanes, all, kWarps - 1);
  const unsigned warps_before = __shfl_sync(kAllLanes, all, max(warp - 1, 0));
  return warp == 0 ? before : min(warps_before + before, most);
}

// Replaces sizes[0 .. n - 1] by the sums of those before them, and sizes[n] by the sum
// of all, saturating at `most`. All threads of the block; sizes are 0 .. most.
__device__ void SumBeforeEach(int* sizes, int n, unsigned most) {
  const int each = (n + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, n);
  const int last = min(first + each, n);
  unsigned sum = 0, total;
  for (int i = first; i < last; ++i) sum = min(sum + sizes[i], most);
  unsigned before = SumBefore(sum, most, &total);
  for (int i = first; i < last; ++i) {
    const unsigned size = sizes[i];
    sizes[i] = before;
    before = min(before + size, most);
  }
  if (threadIdx.x == 0) sizes[n] = total;
  __syncthreads();
}

// Writes the chunks of groups whose rows are starts[g] .. starts[g + 1] - 1 to a list
// of MaxChunks. `firsts` is scratch, groups + 1 long. All threads of the block.
__device__ void WriteChunks(const int* starts, int* firsts, int groups,
                            int rows_per_chunk, int max_chunks, RowChunk* chunks,
                            int32_t* num_chunks) {
  for (int g = threadIdx.x; g < groups; g += kThreads) {
    const int size = starts[g + 1] - starts[g];
    firsts[g] = size / rows_per_chunk + (size % rows_per_chunk != 0);
  }
  __syncthreads();
  SumBeforeEach(firsts, groups, INT32_MAX);
  const int used = firsts[groups];
  if (threadIdx.x == 0) *num_chunks = used;
  for (int i = threadIdx.x; i < max_chunks; i += kThreads) {
    RowChunk chunk = {0, 0, 0, 0, 0};
    if (i < used) {
      int low = 0, high = groups - 1;  // the last group whose first chunk is <= i
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (firsts[middle] <= i) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      chunk.group = low;
      chunk.index = i - firsts[low];
      chunk.chunks = firsts[low + 1] - firsts[low];
      chunk.first = starts[low] + chunk.index * rows_per_chunk;
      chunk.count = min(rows_per_chunk, starts[low + 1] - chunk.first);
    }
    chunks[i] = chunk;
  }
}

// `warps` of the block's warps have a run of the pairs, of `run` each.
__global__ void __launch_bounds__(kThreads)
    ExpertRowsKernel(ExpertRowsArgs a, int warps, int run, int max_chunks) {
  extern __shared__ int memory[];
  LetNextKernelStart();
  const int buckets = a.num_experts + 1;  // the last one of ids that are no expert's
  int* starts = memory;                   // [buckets + 1]
  int* firsts = starts + buckets + 1;     // [buckets]
  int* counts = firsts + buckets;         // [warps, buckets]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int* own = counts + warp * buckets;
  const int begin = warp * run;
  const int end = warp < warps ? min(begin + run, a.pairs) : begin;
  const unsigned lanes_before = (1u << lane) - 1;

  // Calls visit(pair, place) in the order of the pairs, where place is what the pair's
  // counter was before it.
  const auto for_each_pair = [&](auto visit) {
    int next = begin + lane < end ? a.experts[begin + lane] : 0;
    for (int i = begin; i < end; i += 32) {
      const int pair = i + lane;
      const bool inside = pair < end;
      int bucket = next;
      if (static_cast<unsigned>(bucket) >= static_cast<unsigned>(a.num_experts)) {
        bucket = a.num_experts;
      }
      if (pair + 32 < end) next = a.experts[pair + 32];
      const unsigned same = __match_any_sync(kAllLanes, inside ? bucket : -1);
      if (inside) visit(pair, own[bucket] + __popc(same & lanes_before));
      __syncwarp();  // All lanes have read the counters.
      if (inside && (same & lanes_before) == 0) own[bucket] += __popc(same);
      __syncwarp();
    }
  };

  for (int i = threadIdx.x; i < warps * buckets; i += kThreads) counts[i] = 0;
  __syncthreads();
  for_each_pair([](int, int) {});
  __syncthreads();
  for (int b = threadIdx.x; b < buckets; b += kThreads) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) sum += counts[w * buckets + b];
    starts[b] = sum;
  }
  __syncthreads();
  SumBeforeEach(starts, buckets, INT32_MAX);
  for (int b = threadIdx.x; b < buckets; b += kThreads) {
    int place = starts[b];
    for (int w = 0; w < warps; ++w) {
      const int count = counts[w * buckets + b];
      counts[w * buckets + b] = place;
      place += count;
    }
  }
  __syncthreads();
  for_each_pair([&](int pair, int place) {
    a.order[place] = pair;
    a.tokens[place] = pair / a.slots;
  });
  WriteChunks(starts, firsts, a.num_experts, a.rows_per_chunk, max_chunks, a.chunks,
              a.num_chunks);
}

// The same for up to 32 pairs, by one warp: a pair's place is the number of those before.
__global__ void __launch_bounds__(32)
    FewExpertRowsKernel(ExpertRowsArgs a, int max_chunks) {
  LetNextKernelStart();
  const int lane = threadIdx.x, r = a.rows_per_chunk;
  unsigned bucket = lane < a.pairs ? a.experts[lane] : UINT32_MAX;
  const bool valid = bucket < static_cast<unsigned>(a.num_experts);
  if (lane < a.pairs && !valid) bucket = a.num_experts;  // Behind all, in their order.

  int place = 0;
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    const unsigned theirs = __shfl_sync(kAllLanes, bucket, other);
    place += theirs < bucket || (theirs == bucket && other < lane);
  }
  const unsigned same = __match_any_sync(kAllLanes, bucket);
  const int index = __popc(same & ((1u << lane) - 1)), size = __popc(same);
  const bool begins_chunk = valid && index % r == 0;
  const unsigned chunks = __reduce_or_sync(kAllLanes, begins_chunk ? 1u << place : 0);
  if (lane < a.pairs) {
    a.order[place] = lane;
    a.tokens[place] = lane / a.slots;
  }
  if (begins_chunk) {
    a.chunks[__popc(chunks & ((1u << place) - 1))] =
        RowChunk{static_cast<int>(bucket), place, min(r, size - index), index / r,
                 (size + r - 1) / r};
  }
  const int used = __popc(chunks);
  if (lane == 0) *a.num_chunks = used;
  for (int i = used + lane; i < max_chunks; i += 32) a.chunks[i] = RowChunk{0, 0, 0, 0, 0};
}

__global__ void __launch_bounds__(kThreads)
    GroupChunksKernel(GroupChunksArgs a, int max_chunks) {
  extern __shared__ int memory[];
  LetNextKernelStart();
  int* starts = memory;                 // [groups + 1]
  int* firsts = starts + a.groups + 1;  // [groups + 1]
  for (int g = threadIdx.x; g < a.groups; g += kThreads) {
    starts[g] = min(max(a.group_sizes[g], 0), a.rows);
  }
  __syncthreads();
  SumBeforeEach(starts, a.groups, a.rows);
  WriteChunks(starts, firsts, a.groups, a.rows_per_chunk, max_chunks, a.chunks,
              a.num_chunks);
  if (a.out == nullptr) return;
  const int64_t end = a.rows * a.out_row_bytes / 2;
  for (int64_t i = starts[a.groups] * a.out_row_bytes / 2 + threadIdx.x; i < end;
       i += kThreads) {
    static_cast<uint16_t*>(a.out)[i] = 0;
  }
}

KDT_DYNAMIC_SHARED_MEMORY(ExpertRowsKernel, kSharedBytes);
KDT_DYNAMIC_SHARED_MEMORY(GroupChunksKernel, kSharedBytes);

template <typename Kernel, typename... Args>
cudaError_t LaunchBlock(cudaStream_t stream, Kernel kernel, size_t bytes,
                        const Args&... args) {
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

bool IsValid(int64_t rows, int groups, int rows_per_chunk) {
  return rows >= 0 && groups >= 0 && groups <= kMostGroups && rows_per_chunk >= 1 &&
         MaxChunks(rows, groups, rows_per_chunk) <= INT32_MAX;
}

}  // namespace

cudaError_t LaunchExpertRows(cudaStream_t stream, const ExpertRowsArgs& args) {
  if (!IsValid(args.pairs, args.num_experts, args.rows_per_chunk) || args.slots < 1) {
    return cudaErrorInvalidValue;
  }
  const int max_chunks = static_cast<int>(
      MaxChunks(args.pairs, args.num_experts, args.rows_per_chunk));
  if (args.pairs <= 32) {
    FewExpertRowsKernel<<<1, 32, 0, stream>>>(args, max_chunks);
    return cudaGetLastError();
  }
  const int buckets = args.num_experts + 1;
  const int room = kSharedBytes / sizeof(int) - (2 * buckets + 1);
  // At least one: kMostGroups sees to that.
  int warps = room / buckets < kWarps ? room / buckets : kWarps;
  const int needed = (args.pairs + int64_t{31}) / 32;
  if (warps > needed) warps = needed > 0 ? needed : 1;
  // Whole groups of 32 pairs a warp.
  const int run = static_cast<int>((needed + int64_t{warps} - 1) / warps) * 32;
  const size_t bytes = (2 * buckets + 1 + int64_t{warps} * buckets) * sizeof(int);
  return LaunchBlock(stream, ExpertRowsKernel, bytes, args, warps, run, max_chunks);
}

cudaError_t LaunchGroupChunks(cudaStream_t stream, const GroupChunksArgs& args) {
  if (!IsValid(args.rows, args.groups, args.rows_per_chunk)) {
    return cudaErrorInvalidValue;
  }
  const size_t bytes = 2 * (args.groups + size_t{1}) * sizeof(int);
  const int max_chunks =
      static_cast<int>(MaxChunks(args.rows, args.groups, args.rows_per_chunk));
  return LaunchBlock(stream, GroupChunksKernel, bytes, args, max_chunks);
}

}  // namespace kdtree_jax
