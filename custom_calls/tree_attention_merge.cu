// Merges the partial results of a row's chunks, in chunk order.
//
// A warp takes one row and up to 128 of its columns. Nothing is shared between warps,
// so a few rows of many chunks are spread as widely as many rows.

#include <cuda_bf16.h>

#include <cmath>
#include <type_traits>

#include "tree_attention.h"

namespace kdtree_jax {
namespace {

constexpr int kWarps = 4;
constexpr int kBatch = 8;  // chunks whose loads are in flight
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ void Store(float* to, float x) { *to = x; }
__device__ __forceinline__ void Store(__nv_bfloat16* to, float x) {
  *to = __float2bfloat16_rn(x);
}

// kColumns consecutive floats.
template <int kColumns>
struct alignas(4 * kColumns) Columns {
  float x[kColumns];
};

template <int kColumns>
using Vector = std::conditional_t<kColumns == 4, float4,
                                  std::conditional_t<kColumns == 2, float2, float>>;

// This lane's columns of kBatch chunks from `first` on, of those below `end`. As they
// are read once, they are not to drive out of the L2 what is still to be read.
template <int kColumns>
__device__ __forceinline__ void Load(const TreeAttentionArgs& a,
                                     const float* accumulators, int first, int end,
                                     Columns<kColumns> (&loaded)[kBatch]) {
#pragma unroll
  for (int u = 0; u < kBatch; ++u) {
    if (first + u >= end) continue;
    const float* from = accumulators + static_cast<int64_t>(first + u) * a.value_dim;
    const Vector<kColumns> v = __ldcs(reinterpret_cast<const Vector<kColumns>*>(from));
    loaded[u] = *reinterpret_cast<const Columns<kColumns>*>(&v);
  }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(32 * kWarps)
    TreeAttentionMergeKernel(const TreeAttentionArgs a) {
  const int lane = threadIdx.x % 32;
  const int slices = (a.value_dim + 32 * kColumns - 1) / (32 * kColumns);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = unit / slices;
  if (row >= static_cast<int64_t>(a.batch) * a.nodes * a.heads) return;
  const int64_t node = row / a.heads;
  const int b = static_cast<int>(node / a.nodes);
  const int column = (static_cast<int>(unit % slices) * 32 + lane) * kColumns;
  const bool inside = column < a.value_dim;
  const float* accumulators = a.accumulators + row * a.chunks * a.value_dim + column;
  const float* maxima = a.maxima + row * a.chunks;
  const float* chunk_sums = a.sums + row * a.chunks;
  // All that the first chunks may need, before it is known how many chunks there are:
  // what takes long is to wait for memory, several times.
  Columns<kColumns> loaded[kBatch];
  Load(a, accumulators, 0, inside ? a.chunks : 0, loaded);
  const float first_maximum = lane < a.chunks ? maxima[lane] : -INFINITY;
  const float first_sum = lane < a.chunks ? chunk_sums[lane] : 0.0f;

  const int length = min(max(a.lengths[b], 0), a.capacity);
  const int depth = min(max(a.depths[node], 0), a.max_ancestors - 1);
  const int live = (length + depth) / a.chunk + 1;
  float top = lane < live ? first_maximum : -INFINITY;
  for (int c = lane + 32; c < live; c += 32) top = fmaxf(top, maxima[c]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
  }
  // Scores of -inf only: all weights are 0 instead of NaN, and so are the sums; their
  // quotient is NaN in every column, as the softmax of such a row is.
  if (top == -INFINITY) top = 0.0f;

  float sums[kColumns] = {};
  float total = 0.0f;
  for (int base = 0; base < live; base += 32) {
    // Lane c holds the weight of chunk base + c.
    float weight = 0.0f, chunk_sum = 0.0f;
    if (base + lane < live) {
      weight = exp2f(__fsub_rn(base == 0 ? first_maximum : maxima[base + lane], top));
      chunk_sum = base == 0 ? first_sum : chunk_sums[base + lane];
    }
    const int count = min(32, live - base);
    for (int first = 0; first < count; first += kBatch) {
      if (base + first > 0) {
        Load(a, accumulators, base + first, inside ? live : 0, loaded);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (first + u < count) {
          const float w = __shfl_sync(kAllLanes, weight, first + u);
          const float s = __shfl_sync(kAllLanes, chunk_sum, first + u);
          total = __fmaf_rn(w, s, total);
          if (inside) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
              sums[i] = __fmaf_rn(w, loaded[u].x[i], sums[i]);
            }
          }
        }
      }
    }
  }
  if (!inside) return;
  T* out = static_cast<T*>(a.out) + row * a.value_dim + column;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) Store(out + i, __fdiv_rn(sums[i], total));
}

template <typename T, int kColumns>
cudaError_t LaunchColumns(cudaStream_t stream, const TreeAttentionArgs& a) {
  const int64_t slices = (a.value_dim + 32 * kColumns - 1) / (32 * kColumns);
  const int64_t units = slices * a.batch * a.nodes * a.heads;
  const unsigned blocks = static_cast<unsigned>((units + kWarps - 1) / kWarps);
  TreeAttentionMergeKernel<T, kColumns><<<blocks, 32 * kWarps, 0, stream>>>(a);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchElement(cudaStream_t stream, const TreeAttentionArgs& a) {
  if (a.value_dim % 4 == 0 && a.value_dim > 64) return LaunchColumns<T, 4>(stream, a);
  if (a.value_dim % 2 == 0) return LaunchColumns<T, 2>(stream, a);
  return LaunchColumns<T, 1>(stream, a);
}

}  // namespace

cudaError_t LaunchTreeAttentionMerge(cudaStream_t stream,
                                     const TreeAttentionArgs& args) {
  if (args.element == Element::kFloat32) return LaunchElement<float>(stream, args);
  return LaunchElement<__nv_bfloat16>(stream, args);
}

}  // namespace kdtree_jax
