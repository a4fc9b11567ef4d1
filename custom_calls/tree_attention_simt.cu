// Tree attention in fp32 arithmetic on the ordinary cores: fp32 and bf16, any width up
// to kTreeAttentionMaxWidth.
//
// A block takes a tile of rows and one chunk of positions, 32 positions a step. In the
// scores a lane is a position and a warp owns some of the rows; in the products with
// the values a thread owns 4 rows x 4 columns of the accumulator. A step that lies
// below `length` has the same keys for every row of the tile. A step that reaches
// `length` has other keys for every node: they are gathered for a few nodes at once,
// and only these nodes' rows take part. Both do the same operations in the same order
// to a row, so how rows are put into tiles, and where a key lies, does not show in its
// bits.

#include <cuda_bf16.h>
#include <cuda_pipeline.h>

#include <climits>
#include <cmath>

#include "shared_memory.h"
#include "tree_attention.h"

namespace kdtree_jax {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kStep = 32;  // positions; should divide a chunk, for speed
constexpr int kMaxKeyBuffers = 4;
constexpr int kMaxItems = 4;  // 4 x 4 tiles of the accumulator a thread
constexpr int kSharedBytes = kMostSharedMemory;
constexpr int kNoKey = INT_MIN;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Params {
  TreeAttentionArgs a;
  int stride;        // of a row of queries or keys in shared memory, in float4
  int key_buffers;   // for a step's keys, of the nodes that gather at once
  bool vectors;      // rows are whole 16-byte vectors
  float log2_scale;  // scale * log2(e)
};

__device__ __forceinline__ int Clamp(int x, int low, int high) {
  return min(max(x, low), high);
}

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

__device__ __forceinline__ float4 Widen(unsigned low, unsigned high) {
  return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                     __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u));
}

// Walks over the 16-byte vectors of rows, kThreads at a time.
struct VectorWalk {
  int per_row, row, column, step_row, step_column;

  __device__ explicit VectorWalk(int per_row)
      : per_row(per_row),
        row(threadIdx.x / per_row),
        column(threadIdx.x % per_row),
        step_row(kThreads / per_row),
        step_column(kThreads % per_row) {}

  __device__ __forceinline__ void Next() {
    row += step_row;
    column += step_column;
    if (column >= per_row) {
      column -= per_row;
      ++row;
    }
  }
};

// Copies rows of whole vectors. The copies of fp32 are in flight when it returns.
template <typename Source>
__device__ __forceinline__ void CopyVectors(float4* to, int rows, const Params& p,
                                            Source source, float) {
  VectorWalk at(p.a.width / 4);
  for (int i = threadIdx.x; i < rows * at.per_row; i += kThreads, at.Next()) {
    const float* from = source(at.row);
    float4* place = to + at.row * p.stride + at.column;
    if (from != nullptr) {
      __pipeline_memcpy_async(place, from + 4 * at.column, sizeof(float4));
    } else {
      *place = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

template <typename Source>
__device__ __forceinline__ void CopyVectors(float4* to, int rows, const Params& p,
                                            Source source, __nv_bfloat16) {
  constexpr int kBatch = 5;  // loads in flight
  VectorWalk at(p.a.width / 8);
  const int total = rows * at.per_row;
  for (int i = threadIdx.x; i < total; i += kThreads * kBatch) {
    uint4 loaded[kBatch];
    int places[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u, at.Next()) {
      if (i + u * kThreads >= total) continue;
      const __nv_bfloat16* from = source(at.row);
      loaded[u] = make_uint4(0, 0, 0, 0);
      if (from != nullptr) {
        loaded[u] = __ldg(reinterpret_cast<const uint4*>(from) + at.column);
      }
      places[u] = at.row * p.stride + 2 * at.column;
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (i + u * kThreads >= total) continue;
      to[places[u]] = Widen(loaded[u].x, loaded[u].y);
      to[places[u] + 1] = Widen(loaded[u].z, loaded[u].w);
    }
  }
}

// Begins to copy `rows` rows into shared memory as fp32, all threads together, as one
// batch of the pipeline. `source` gives the address of a row, or null for a row of
// zeros. Columns up to a multiple of 4 are filled with zeros.
template <typename T, typename Source>
__device__ __forceinline__ void LoadRows(float4* to, int rows, const Params& p,
                                         Source source) {
  if (p.vectors) {
    CopyVectors(to, rows, p, source, T());
  } else {
    const int width = p.a.width, padded = (width + 3) / 4 * 4;
    for (int i = threadIdx.x; i < rows * padded; i += kThreads) {
      const int row = i / padded, column = i % padded;
      const T* from = source(row);
      float x = 0.0f;
      if (from != nullptr && column < width) x = ToFloat(from[column]);
      reinterpret_cast<float*>(to + row * p.stride)[column] = x;
    }
  }
  __pipeline_commit();
}

__device__ __forceinline__ float Dot(float4 x, float4 y, float sum) {
  sum = __fmaf_rn(x.x, y.x, sum);
  sum = __fmaf_rn(x.y, y.y, sum);
  sum = __fmaf_rn(x.z, y.z, sum);
  return __fmaf_rn(x.w, y.w, sum);
}

// A row's state while it walks over its keys. `sum` is that of one lane's positions.
struct RowState {
  float maximum = -INFINITY;  // in units of log2
  float sum = 0.0f;
};

struct Weight {
  float of_key;  // of this lane's position
  float decay;   // of all that was summed before
};

// One online softmax step of a row; `seen` tells whether it sees this lane's position.
__device__ __forceinline__ Weight Advance(RowState& state, float dot, bool seen,
                                          float log2_scale) {
  const float score = seen ? __fmul_rn(dot, log2_scale) : -INFINITY;
  float top = score;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
  }
  top = fmaxf(top, state.maximum);
  // Scores of -inf only: weights of 0, not of NaN.
  const float origin = top == -INFINITY ? 0.0f : top;
  Weight weight;
  weight.of_key = seen ? exp2f(__fsub_rn(score, origin)) : 0.0f;
  weight.decay = exp2f(__fsub_rn(state.maximum, origin));
  state.sum = __fmaf_rn(state.sum, weight.decay, weight.of_key);
  state.maximum = top;
  return weight;
}

__device__ __forceinline__ void AddScaled(float4& sum, float weight, float4 value) {
  sum.x = __fmaf_rn(weight, value.x, sum.x);
  sum.y = __fmaf_rn(weight, value.y, sum.y);
  sum.z = __fmaf_rn(weight, value.z, sum.z);
  sum.w = __fmaf_rn(weight, value.w, sum.w);
}

__device__ __forceinline__ void Scale(float4& sum, float factor) {
  sum.x = __fmul_rn(sum.x, factor);
  sum.y = __fmul_rn(sum.y, factor);
  sum.z = __fmul_rn(sum.z, factor);
  sum.w = __fmul_rn(sum.w, factor);
}

// What a block keeps in shared memory.
template <int kRows>
struct Shared {
  static constexpr int kWeightStride = kRows + 4;  // an odd number of float4

  float4* queries;  // [kRows, stride]
  float4* keys;     // [key_buffers, kStep, stride]
  float* weights;   // [kStep, kWeightStride]
  float* decays;    // [kRows]
  int* row_node;    // [kRows] node of the tile, -1 beyond the last row
  int* row_last;    // [kRows] last position of the chunk that the row sees
  int* node_last;   // [32]
  int* sources;     // [key_buffers, kStep] cache row, ~slot of the tree, or kNoKey

  __host__ __device__ static constexpr size_t Bytes(int stride, int key_buffers) {
    const size_t vectors = (kRows + key_buffers * kStep) * stride;
    const size_t words = kStep * kWeightStride + 3 * kRows + 32 + key_buffers * kStep;
    return vectors * sizeof(float4) + words * sizeof(float);
  }

  __device__ Shared(float4* memory, int stride, int key_buffers) {
    queries = memory;
    keys = queries + kRows * stride;
    weights = reinterpret_cast<float*>(keys + key_buffers * kStep * stride);
    decays = weights + kStep * kWeightStride;
    row_node = reinterpret_cast<int*>(decays + kRows);
    row_last = row_node + kRows;
    node_last = row_last + kRows;
    sources = node_last + 32;
  }
};

template <typename T, int kRows, int kItems>
__global__ void __launch_bounds__(kThreads, kItems == 1 ? 3 : 2)
    TreeAttentionSimtKernel(const Params p) {
  extern __shared__ float4 memory[];
  constexpr int kRowsPerWarp = kRows / kWarps;
  constexpr int kWeightStride = Shared<kRows>::kWeightStride;
  const TreeAttentionArgs& a = p.a;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int b = blockIdx.z;
  const int chunk = gridDim.y - 1 - blockIdx.y;  // the gathering blocks start first
  const int first_row = blockIdx.x * kRows;
  const int tile_rows = min(kRows, a.nodes * a.heads - first_row);
  const int first_node = first_row / a.heads;
  const int nodes = (first_row + tile_rows - 1) / a.heads - first_node + 1;
  const int length = Clamp(a.lengths[b], 0, a.capacity);

  int own_last = -1;  // of the tile's node number `lane`; kRows <= 32
  if (lane < nodes) {
    const int depth = a.depths[b * a.nodes + first_node + lane];
    own_last = length + Clamp(depth, 0, a.max_ancestors - 1);
  }
  const int tile_last = __reduce_max_sync(kAllLanes, own_last);
  const int begin = chunk * a.chunk;
  if (begin > tile_last) return;
  const int end = min(begin + a.chunk, tile_last + 1);
  own_last = min(own_last, end - 1);

  const Shared<kRows> shared(memory, p.stride, p.key_buffers);
  const T* cache =
      static_cast<const T*>(a.cache) + static_cast<int64_t>(b) * a.capacity * a.width;
  const T* tree_keys =
      static_cast<const T*>(a.tree_keys) + static_cast<int64_t>(b) * a.nodes * a.width;
  const T* queries =
      static_cast<const T*>(a.q) +
      (static_cast<int64_t>(b) * a.nodes * a.heads + first_row) * a.width;
  const int32_t* ancestors =
      a.ancestors + (static_cast<int64_t>(b) * a.nodes + first_node) * a.max_ancestors;

  if (warp == 0) {
    shared.node_last[lane] = own_last;
    const bool live = lane < tile_rows;
    const int node = live ? (first_row + lane) / a.heads - first_node : 0;
    const int last = __shfl_sync(kAllLanes, own_last, node);
    if (lane < kRows) {
      shared.row_node[lane] = live ? node : -1;
      shared.row_last[lane] = live ? last : -1;
    }
  }
  LoadRows<T>(shared.queries, kRows, p, [&](int row) {
    return row < tile_rows ? queries + static_cast<int64_t>(row) * a.width : nullptr;
  });
  __syncthreads();

  RowState states[kRowsPerWarp];
  float4 sums[kItems][4];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
#pragma unroll
    for (int r = 0; r < 4; ++r) sums[k][r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const int vectors = (a.width + 3) / 4;
  const int value_vectors = (a.value_dim + 3) / 4;
  const int items = kRows / 4 * value_vectors;
  const float4* own_queries = shared.queries + warp * kRowsPerWarp * p.stride;
  float* own_weights = shared.weights + lane * kWeightStride + warp * kRowsPerWarp;
  float* own_decays = shared.decays + warp * kRowsPerWarp;

  // Steps whose keys are all in the cache; with two buffers, loaded one step ahead.
  const int common = max(0, min(length, begin + a.chunk) - begin) / kStep;
  const int ahead = p.key_buffers > 1 ? 1 : 0;
  for (int load = 0; load < common + ahead; ++load) {
    if (load < common) {
      const T* from = cache + static_cast<int64_t>(begin + load * kStep) * a.width;
      LoadRows<T>(shared.keys + (load & ahead) * kStep * p.stride, kStep, p,
                  [&](int row) { return from + row * a.width; });
    }
    if (load < ahead) continue;
    if (load < common && ahead > 0) {
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncthreads();
    const float4* keys = shared.keys + ((load - ahead) & ahead) * kStep * p.stride;
    float dots[kRowsPerWarp];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) dots[i] = 0.0f;
    const float4* key = keys + lane * p.stride;
#pragma unroll 2
    for (int c = 0; c < vectors; ++c) {
      const float4 k = key[c];
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        dots[i] = Dot(own_queries[i * p.stride + c], k, dots[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const Weight weight = Advance(states[i], dots[i], true, p.log2_scale);
      own_weights[i] = weight.of_key;
      if (lane == 0) own_decays[i] = weight.decay;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int item = tid + k * kThreads;
      if (item >= items) break;
      const int group = item / value_vectors, column = item % value_vectors;
      const float4* values = keys + column;
      const float* weights = shared.weights + group * 4;
#pragma unroll
      for (int r = 0; r < 4; ++r) Scale(sums[k][r], shared.decays[group * 4 + r]);
#pragma unroll 8
      for (int j = 0; j < kStep; ++j) {
        const float4 value = values[j * p.stride];
        const float4 w = *reinterpret_cast<const float4*>(weights + j * kWeightStride);
        AddScaled(sums[k][0], w.x, value);
        AddScaled(sums[k][1], w.y, value);
        AddScaled(sums[k][2], w.z, value);
        AddScaled(sums[k][3], w.w, value);
      }
    }
    __syncthreads();  // the buffer is free
  }

  for (int position = begin + common * kStep; position < end; position += kStep) {
    const unsigned seeing = __ballot_sync(kAllLanes, own_last >= position);
    for (int group = 0; group < nodes; group += p.key_buffers) {
      // The same in every warp: each holds all nodes of the tile.
      if ((seeing >> group & ((1u << p.key_buffers) - 1)) == 0) continue;
      const auto buffer_of = [&](int row) {
        const int buffer = shared.row_node[row] - group;
        const bool inside = buffer >= 0 && buffer < p.key_buffers;
        return inside && shared.row_last[row] >= position ? buffer : -1;
      };
      for (int i = tid; i < p.key_buffers * kStep; i += kThreads) {
        const int node = group + i / kStep, at = position + i % kStep;
        int source = kNoKey;
        if (node < nodes && at <= shared.node_last[node]) {
          source = at;
          if (at >= length) {
            const int slot = ancestors[node * a.max_ancestors + at - length];
            source = ~Clamp(slot, 0, a.nodes - 1);
          }
        }
        shared.sources[i] = source;
      }
      __syncthreads();
      LoadRows<T>(shared.keys, p.key_buffers * kStep, p, [&](int row) -> const T* {
        const int source = shared.sources[row];
        if (source == kNoKey) return nullptr;
        if (source >= 0) return cache + static_cast<int64_t>(source) * a.width;
        return tree_keys + static_cast<int64_t>(~source) * a.width;
      });
      __pipeline_wait_prior(0);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        const int row = warp * kRowsPerWarp + i;
        const int buffer = buffer_of(row);
        if (buffer < 0) continue;
        const float4* key = shared.keys + (buffer * kStep + lane) * p.stride;
        float dot = 0.0f;
#pragma unroll 4
        for (int c = 0; c < vectors; ++c) {
          dot = Dot(own_queries[i * p.stride + c], key[c], dot);
        }
        const bool seen = position + lane <= shared.row_last[row];
        const Weight weight = Advance(states[i], dot, seen, p.log2_scale);
        own_weights[i] = weight.of_key;
        if (lane == 0) own_decays[i] = weight.decay;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int item = tid + k * kThreads;
        if (item >= items) break;
        const int rows = item / value_vectors * 4, column = item % value_vectors;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int buffer = buffer_of(rows + r);
          if (buffer < 0) continue;
          const float4* values = shared.keys + buffer * kStep * p.stride + column;
          const float* weights = shared.weights + rows + r;
          Scale(sums[k][r], shared.decays[rows + r]);
#pragma unroll 8
          for (int j = 0; j < kStep; ++j) {
            AddScaled(sums[k][r], weights[j * kWeightStride], values[j * p.stride]);
          }
        }
      }
    }
  }

  // Rows that see nothing of this chunk write nothing: the merge knows.
  const int64_t row_base = static_cast<int64_t>(b) * a.nodes * a.heads + first_row;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = warp * kRowsPerWarp + i;
    float sum = states[i].sum;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, offset));
    }
    if (lane == 0 && shared.row_last[row] >= begin) {
      a.maxima[(row_base + row) * a.chunks + chunk] = states[i].maximum;
      a.sums[(row_base + row) * a.chunks + chunk] = sum;
    }
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int item = tid + k * kThreads;
    if (item >= items) break;
    const int rows = item / value_vectors * 4, column = item % value_vectors * 4;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (shared.row_last[rows + r] < begin) continue;
      float* to = a.accumulators +
                  ((row_base + rows + r) * a.chunks + chunk) * a.value_dim + column;
      if (a.value_dim % 4 == 0) {
        *reinterpret_cast<float4*>(to) = sums[k][r];
      } else {
        const float x[4] = {sums[k][r].x, sums[k][r].y, sums[k][r].z, sums[k][r].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (column + c < a.value_dim) to[c] = x[c];
        }
      }
    }
  }
}

KDT_DYNAMIC_SHARED_MEMORY(TreeAttentionSimtKernel, kSharedBytes);

constexpr int DivideUp(int x, int y) { return (x + y - 1) / y; }

// In float4; odd, so that 8 lanes read from distinct banks.
constexpr int StrideOf(int width) { return DivideUp(width, 4) | 1; }

// The smallest tile fits whatever is allowed; 4 columns more do not.
static_assert(Shared<8>::Bytes(StrideOf(kTreeAttentionMaxWidth), 1) <= kSharedBytes);
static_assert(Shared<8>::Bytes(StrideOf(kTreeAttentionMaxWidth + 4), 1) > kSharedBytes);
static_assert(8 / 4 * DivideUp(kTreeAttentionMaxWidth, 4) <= kThreads * kMaxItems);

// Most nodes that `rows` consecutive rows, from a multiple of `rows` on, belong to.
int NodesOfTile(int rows, int heads) {
  if (heads % rows == 0) return 1;
  if (rows % heads == 0) return rows / heads;
  return DivideUp(rows - 1, heads) + 1;
}

template <typename T, int kRows, int kItems>
cudaError_t LaunchTile(cudaStream_t stream, Params p) {
  const TreeAttentionArgs& a = p.a;
  const int nodes = min(a.nodes, NodesOfTile(kRows, a.heads));
  p.key_buffers = max(2, min(kMaxKeyBuffers, nodes));  // 2, to load ahead
  while (p.key_buffers > 1 &&
         Shared<kRows>::Bytes(p.stride, p.key_buffers) > kSharedBytes) {
    --p.key_buffers;
  }
  const size_t bytes = Shared<kRows>::Bytes(p.stride, p.key_buffers);
  const auto kernel = TreeAttentionSimtKernel<T, kRows, kItems>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(DivideUp(a.nodes * a.heads, kRows), a.chunks, a.batch);
  kernel<<<grid, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <int kRows>
bool Fits(const Params& p) {
  return Shared<kRows>::Bytes(p.stride, 1) <= kSharedBytes &&
         kRows / 4 * DivideUp(p.a.value_dim, 4) <= kThreads * kMaxItems;
}

template <typename T, int kRows>
cudaError_t LaunchRows(cudaStream_t stream, const Params& p) {
  if (kRows / 4 * DivideUp(p.a.value_dim, 4) <= kThreads) {
    return LaunchTile<T, kRows, 1>(stream, p);
  }
  return LaunchTile<T, kRows, kMaxItems>(stream, p);
}

// The size of a tile is free to choose: it does not show in the bits.
template <typename T>
cudaError_t LaunchElement(cudaStream_t stream, Params p) {
  const TreeAttentionArgs& a = p.a;
  const int rows = a.nodes * a.heads;
  p.vectors = a.width * sizeof(T) % 16 == 0;
  for (const void* array : {a.q, a.cache, a.tree_keys}) {
    p.vectors = p.vectors && reinterpret_cast<uintptr_t>(array) % 16 == 0;
  }
  if (rows > 16 && Fits<32>(p)) return LaunchRows<T, 32>(stream, p);
  if (rows > 8 && Fits<16>(p)) return LaunchRows<T, 16>(stream, p);
  if (Fits<8>(p)) return LaunchRows<T, 8>(stream, p);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchTreeAttentionSimt(cudaStream_t stream,
                                    const TreeAttentionArgs& args) {
  Params p;
  p.a = args;
  p.stride = StrideOf(args.width);
  p.log2_scale = static_cast<float>(args.scale * 1.4426950408889634);
  if (args.element == Element::kFloat32) return LaunchElement<float>(stream, p);
  return LaunchElement<__nv_bfloat16>(stream, p);
}

}  // namespace kdtree_jax
