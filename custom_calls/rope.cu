// One block per token and group of heads. The last warps form the token's cosines and
// sines once, for all heads of the block, while the others copy; then every thread
// rotates packs of pairs.
//
// Cost of the angles where float64 is slow (sm_120: 1/64 of the float32 rate, that is
// 2 operations a cycle and SM): 27 float64 operations per pair make 32 x 27 / 2 = 432
// cycles, 0.2 us, per token of 32 pairs and block. A decode step of 64 tokens x 64
// heads has 512 such warps on 188 SMs: three in a row on an SM, 0.6 us, beside the
// copy. This is an estimate from counted operations; no such GPU was measured. With
// many tokens a block takes all heads, so that each token pays once.

#include <algorithm>

#include "rope.cuh"

namespace kdtree_jax {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 288;
constexpr int kHeadsPerBlock = 8;
// More blocks than this only form the same angles more often.
constexpr int kManyBlocks = 4096;

template <typename T, int kWidth>
struct Unit {
  Pack<T, kWidth> low, high;

  // Unit `index` of a row: pairs index * kWidth and following.
  __device__ void Load(const T* row, int index, int pairs, bool interleave) {
    const int at = index * kWidth;
    low = LoadPack<T, kWidth>(row + (interleave ? 2 * at : at));
    high = LoadPack<T, kWidth>(row + (interleave ? 2 * at + kWidth : pairs + at));
  }

  __device__ void RotateAndStore(T* row, int index, int pairs, bool interleave,
                                 const float2* cos_sin) const {
    Pack<T, kWidth> first, second;
    const int at = index * kWidth;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      T a = low.values[i], b = high.values[i];
      if (interleave) {
        a = 2 * i < kWidth ? low.values[2 * i % kWidth] : high.values[2 * i % kWidth];
        b = 2 * i + 1 < kWidth ? low.values[(2 * i + 1) % kWidth]
                               : high.values[(2 * i + 1) % kWidth];
      }
      RotatePair(a, b, cos_sin[at + i], &first.values[i], &second.values[i]);
    }
    StorePack(row + at, first);
    StorePack(row + pairs + at, second);
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    RopeKernel(const __grid_constant__ RopeArgs a, int heads_per_block,
               int angle_threads) {
  __shared__ float2 cos_sin[kRopeMaxPairs];
  const int64_t token = blockIdx.x;
  const int first_head = blockIdx.y * heads_per_block;
  const int heads = min(heads_per_block, a.heads - first_head);
  const int pairs = a.angles.pairs;
  const int units = pairs / kWidth;
  const int thread = threadIdx.x;
  const int threads = blockDim.x;
  const int64_t out_stride = a.copied_width + 2 * pairs;
  const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride +
               first_head * a.x_head_stride;
  T* out = static_cast<T*>(a.out) + (token * a.heads + first_head) * out_stride;
  const auto source = [&](int unit) { return x + unit / units * a.x_head_stride; };
  const auto target = [&](int unit) {
    return out + unit / units * out_stride + a.copied_width;
  };

  // In flight before the barrier: the first unit of each thread.
  Unit<T, kWidth> unit;
  const bool has_unit = thread < heads * units;
  if (has_unit) unit.Load(source(thread), thread % units, pairs, a.interleave);

  const int copy_threads = threads - angle_threads;
  if (thread >= copy_threads) {
    const int position = a.positions[token];
    for (int pair = thread - copy_threads; pair < pairs; pair += angle_threads) {
      cos_sin[pair] = RopeCosSin(a.angles, position, pair);
    }
  } else {
    const T* __restrict__ copied = static_cast<const T*>(a.copied) +
                                   token * a.copied_token_stride +
                                   first_head * a.copied_head_stride;
    const int packs = a.copied_width / kWidth;
#pragma unroll 2
    for (int i = thread; i < heads * packs; i += copy_threads) {
      const int head = i / packs;
      const int at = (i - head * packs) * kWidth;
      StorePack(out + head * out_stride + at,
                LoadPack<T, kWidth>(copied + head * a.copied_head_stride + at));
    }
  }
  __syncthreads();
  if (has_unit) {
    unit.RotateAndStore(target(thread), thread % units, pairs, a.interleave, cos_sin);
  }
  for (int u = thread + threads; u < heads * units; u += threads) {
    unit.Load(source(u), u % units, pairs, a.interleave);
    unit.RotateAndStore(target(u), u % units, pairs, a.interleave, cos_sin);
  }
}

int RoundUp(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

template <typename T, int kWidth>
cudaError_t Launch(cudaStream_t stream, const RopeArgs& a) {
  const int groups = std::max(1, kManyBlocks / a.tokens);
  const int heads =
      std::min(a.heads, std::max(kHeadsPerBlock, (a.heads + groups - 1) / groups));
  const int angle_threads = RoundUp(a.angles.pairs, kWarp);
  int threads = kMaxThreads;
  if (a.copied == nullptr) {
    // All threads form angles and rotate: there is nothing to copy meanwhile.
    const int64_t work = static_cast<int64_t>(heads) * (a.angles.pairs / kWidth);
    threads = RoundUp(static_cast<int>(std::min<int64_t>(work, 256)), kWarp);
    threads = std::max(threads, angle_threads);
  }
  const dim3 grid(a.tokens, (a.heads + heads - 1) / heads);
  RopeKernel<T, kWidth><<<grid, threads, 0, stream>>>(
      a, heads, a.copied == nullptr ? threads : angle_threads);
  return cudaGetLastError();
}

// Whether every pack of a row lies on a multiple of its size.
template <typename T, int kWidth>
bool Packable(const RopeArgs& a) {
  const auto misaligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % (sizeof(T) * kWidth) != 0;
  };
  if (misaligned(a.x) || misaligned(a.copied) || misaligned(a.out)) return false;
  for (const int64_t elements :
       {a.x_token_stride, a.x_head_stride, a.copied_token_stride, a.copied_head_stride,
        static_cast<int64_t>(a.copied_width), static_cast<int64_t>(a.angles.pairs)}) {
    if (elements % kWidth != 0) return false;
  }
  return true;
}

template <typename T>
cudaError_t LaunchElement(cudaStream_t stream, const RopeArgs& a) {
  constexpr int kWidth = 16 / sizeof(T);
  if (Packable<T, kWidth>(a)) return Launch<T, kWidth>(stream, a);
  return Launch<T, 1>(stream, a);
}

}  // namespace

cudaError_t LaunchRope(cudaStream_t stream, const RopeArgs& args) {
  if (args.tokens == 0 || args.heads == 0) return cudaSuccess;
  return args.bfloat16 ? LaunchElement<__nv_bfloat16>(stream, args)
                       : LaunchElement<float>(stream, args);
}

}  // namespace kdtree_jax
