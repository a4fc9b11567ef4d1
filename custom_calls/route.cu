// One warp, a block of its own, per token. Lane l holds experts l, l + 32, ... in
// registers. Sums have a fixed order, and selection compares integers, so a token's
// result depends on its own logits alone.

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
  const int lane = threadIdx.x, size = a.num_experts / a.n_group;
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

// kPerLane experts of each lane; which kPerLane fits changes no bit.
template <int kPerLane>
__global__ void __launch_bounds__(32) RouteKernel(RouteArgs a) {
  __shared__ uint32_t shared_keys[32 * kPerLane];
  const int E = a.num_experts, lane = threadIdx.x;
  const int64_t row = blockIdx.x;
  const float* logits = a.logits + row * E;

  float scores[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    scores[i] = expert < E ? __ldg(logits + expert) : -INFINITY;
  }
  if (a.softmax) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) top = max(top, KeyOf(scores[i]));
    const float largest = FloatOfKey(__reduce_max_sync(kWarp, top));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = Exp(Sub(scores[i], largest));
      if (lane + 32 * i < E) sum = Add(sum, scores[i]);
    }
    sum = WarpSum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = __fdiv_rn(scores[i], sum);
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = __fdiv_rn(1.0f, Add(1.0f, Exp(-scores[i])));
    }
  }

  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    float choice = scores[i];
    if (a.bias != nullptr && expert < E) choice = Add(choice, __ldg(a.bias + expert));
    keys[i] = expert < E ? ChoiceKey(choice) : kNoKey;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    if (expert < E) a.scores[row * E + expert] = scores[i];
  }
  if (a.n_group > 1) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) shared_keys[lane + 32 * i] = keys[i];
    __syncwarp();
    const unsigned kept = BestGroups(shared_keys, a);
    const int size = E / a.n_group;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane + 32 * i;
      if (expert < E && !(kept >> (expert / size) & 1)) keys[i] = kKeyOfMinusInfinity;
    }
  }

  unsigned chosen = 0;  // Of slot `lane`, as is its score.
  float score = 0, total = 0;
  for (int slot = 0; slot < a.chosen; ++slot) {
    uint32_t best = keys[0];
    unsigned id = lane;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (keys[i] > best) best = keys[i], id = lane + 32 * i;
    }
    WarpBest(best, &id);
    float mine = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (id == lane + 32 * i) mine = scores[i], keys[i] = kNoKey;
    }
    mine = __shfl_sync(kWarp, mine, id % 32);
    total = Add(total, mine);  // In slot order.
    if (lane == slot) chosen = id, score = mine;
  }
  if (lane < a.chosen) {
    if (a.normalise) score = __fdiv_rn(score, Add(total, 1e-20f));
    a.experts[row * a.chosen + lane] = static_cast<int32_t>(chosen);
    a.weights[row * a.chosen + lane] = Mul(score, a.scaling);
  }
}

}  // namespace

cudaError_t LaunchRoute(cudaStream_t stream, const RouteArgs& args) {
  if (args.tokens == 0) return cudaSuccess;
  const int per_lane = (args.num_experts + 31) / 32;
  const auto kernel = per_lane <= 4    ? RouteKernel<4>
                      : per_lane <= 8  ? RouteKernel<8>
                      : per_lane <= 12 ? RouteKernel<12>
                      : per_lane <= 16 ? RouteKernel<16>
                                       : RouteKernel<32>;
  kernel<<<args.tokens, 32, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kdtree_jax
