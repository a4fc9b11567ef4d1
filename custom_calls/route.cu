// A block per token, a thread per expert. Sums have a fixed order, and selection compares
// integers: an expert's place is the number of those above it. So a token's result depends
// on its own logits alone.

#include "route.h"

#include "log_softmax_math.h"
#include "warp_sum.cuh"

namespace kdtree_jax {
namespace {

constexpr unsigned kWarp = 0xffffffffu;
constexpr uint32_t kNanKey = 0xffffffffu;  // Above +inf.
constexpr uint32_t kNoKey = 0;             // Below -inf: no expert, or taken already.

// exp(x) within 2 * 2^-24 of itself, or 2^-149 where that is more: the same operations
// on every GPU. 0 for -inf, NaN for NaN.
__device__ float Exp(float x) {
  // Beyond these it is 0 and inf anyway. Comparisons that NaN fails.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  // x = n ln2 + r with |r| <= ln2 / 2; the first product is exact.
  const float shifted = Fma(x, 0x1.715476p+0f, 0x1.8p+23f);
  const float n = Sub(shifted, 0x1.8p+23f);
  const float r = Fma(n, 0x1.05c610p-29f, Fma(n, -0x1.62e430p-1f, x));
  // exp(r) = 1 + r + r^2 q(r), as in log_softmax_math.h.
  float q = 0x1.6a2352p-10f;
  q = Fma(q, r, 0x1.123a6cp-7f);
  q = Fma(q, r, 0x1.5558f4p-5f);
  q = Fma(q, r, 0x1.555490p-3f);
  q = Fma(q, r, 0x1.fffffcp-2f);
  const float e = Add(1.0f, Fma(Mul(r, r), q, r));
  // 2^n in two factors, both normal; the first product is exact.
  const int exponent = static_cast<int>(BitsOf(shifted)) - 0x4b400000;
  const int half = exponent >> 1;
  const float scale = FloatOf(static_cast<uint32_t>(half + 127) << 23);
  const float rest = FloatOf(static_cast<uint32_t>(exponent - half + 127) << 23);
  return Mul(Mul(e, scale), rest);
}

// Orders as a choice must: floats, -0 as 0, any NaN above all.
__device__ uint32_t ChoiceKey(float x) {
  return x == x ? KeyOf(Add(x, 0.0f)) : kNanKey;
}

// The largest key of the warp; `id` becomes the lowest of those that have it.
__device__ uint32_t WarpBest(uint32_t key, unsigned* id) {
  const uint32_t best = __reduce_max_sync(kWarp, key);
  *id = __reduce_min_sync(kWarp, key == best ? *id : ~0u);
  return best;
}

// Which groups are kept, a bit each. A group's score is the sum of its two best keys.
__device__ unsigned BestGroups(const uint32_t* keys, const RouteArgs& a) {
  const int lane = threadIdx.x % 32, size = a.num_experts / a.n_group;
  uint32_t group = kNoKey;
  if (lane < a.n_group) {
    uint32_t first = kNoKey, second = kNoKey;
    for (int i = 0, at = lane % size; i < size; ++i) {
      const uint32_t key = keys[lane * size + at];
      second = max(second, min(first, key));
      first = max(first, key);
      at = at + 1 == size ? 0 : at + 1;  // Lanes start in different banks.
    }
    const float best = FloatOfKey(first);
    group = ChoiceKey(size > 1 ? Add(best, FloatOfKey(second)) : best);
  }
  unsigned kept = 0;
  for (int i = 0; i < a.topk_group; ++i) {
    unsigned id = lane;
    WarpBest(group, &id);
    kept |= 1u << id;
    if (lane == id) group = kNoKey;
  }
  return kept;
}

// Orders experts: by key, then by the lower id. `key` and `id` as one number.
__device__ uint64_t Rank(uint32_t key, unsigned id) {
  return static_cast<uint64_t>(key) << 32 | ~id;
}

// How many of `count` numbers in shared memory, an even one, are above x.
__device__ int CountAbove(const uint64_t* numbers, int count, uint64_t x) {
  int above = 0;
#pragma unroll 8
  for (int i = 0; i < count; i += 2) {
    const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(numbers + i);
    above += (pair.x > x) + (pair.y > x);
  }
  return above;
}

// A block per token, a thread per expert.
__global__ void __launch_bounds__(kRouteMaxExperts) RouteKernel(RouteArgs a) {
  __shared__ __align__(16) uint64_t ranks[kRouteMaxExperts];  // Of each warp, by lane.
  __shared__ __align__(16) uint64_t best[kRouteMaxExperts];   // Of each warp, sorted.
  __shared__ uint32_t keys[kRouteMaxExperts];
  __shared__ float scores[kRouteMaxExperts];
  __shared__ int chosen[kRouteMaxChosen];
  const int E = a.num_experts, expert = threadIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t row = blockIdx.x;

  const float bias = a.bias != nullptr && expert < E ? __ldg(a.bias + expert) : 0.0f;
  float score = expert < E ? __ldg(a.logits + row * E + expert) : -INFINITY;
  if (a.softmax) {
    keys[expert] = KeyOf(score);
    __syncthreads();
    uint32_t top = 0;
    for (int i = lane; i < blockDim.x; i += 32) top = max(top, keys[i]);
    score = Exp(Sub(score, FloatOfKey(__reduce_max_sync(kWarp, top))));
    scores[expert] = score;
    __syncthreads();
    float sum = 0;
    for (int i = lane; i < E; i += 32) sum = Add(sum, scores[i]);
    score = __fdiv_rn(score, WarpSum(sum));
    __syncthreads();  // All have read the exponentials.
  } else {
    score = __fdiv_rn(1.0f, Add(1.0f, Exp(-score)));
  }
  scores[expert] = score;
  if (expert < E) a.scores[row * E + expert] = score;

  uint32_t key = kNoKey;
  if (expert < E) key = ChoiceKey(a.bias != nullptr ? Add(score, bias) : score);
  if (a.n_group > 1) {
    keys[expert] = key;
    __syncthreads();
    const unsigned kept = BestGroups(keys, a);
    if (expert < E && !(kept >> (expert / (E / a.n_group)) & 1)) key = kKeyOfMinusInfinity;
  }

  // The best of each warp, then the best of these.
  const uint64_t rank = Rank(key, expert);
  ranks[expert] = rank;
  __syncwarp();
  const int place = CountAbove(ranks + 32 * warp, 32, rank);
  const int kept = (min(a.chosen, 32) + 1) & ~1;  // Of each warp; kRouteMaxChosen is 32.
  if (place < kept) best[kept * warp + place] = rank;
  __syncthreads();
  for (int i = threadIdx.x; i < kept * warps; i += blockDim.x) {
    const int slot = CountAbove(best, kept * warps, best[i]);
    if (slot < a.chosen) chosen[slot] = ~static_cast<uint32_t>(best[i]);
  }
  __syncthreads();
  if (threadIdx.x >= a.chosen) return;
  float total = 0;
  for (int slot = 0; slot < a.chosen; ++slot) total = Add(total, scores[chosen[slot]]);
  float weight = scores[chosen[threadIdx.x]];
  if (a.normalise) weight = __fdiv_rn(weight, Add(total, 1e-20f));
  a.experts[row * a.chosen + threadIdx.x] = chosen[threadIdx.x];
  a.weights[row * a.chosen + threadIdx.x] = Mul(weight, a.scaling);
}

}  // namespace

cudaError_t LaunchRoute(cudaStream_t stream, const RouteArgs& args) {
  if (args.tokens == 0) return cudaSuccess;
  const int threads = (args.num_experts + 31) / 32 * 32;
  RouteKernel<<<args.tokens, threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kdtree_jax
