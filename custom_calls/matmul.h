// Matrix products whose bits do not depend on the number of rows: out[i] = x[i] @ w[g],
// where g is the group of row i. One group is a dense product.
//
// An output element is summed in fp32 over k in an order that is a function of K, N, the
// kinds of operands and whether there is a list of chunks alone. It does not depend on
// how many rows there are, on where its row stands, or on other rows.

#ifndef KDTREE_JAX_MATMUL_H_
#define KDTREE_JAX_MATMUL_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree_jax {

// Weights of 4 bits lie in tiles of 16 output features by 64 input features, one after
// the other along K, then along N, then by group. A tile has 512 bytes of nibbles, in
// the order in which the lanes of a warp need them, and 64 bytes of bf16 scales, one per
// feature and 32 values of k. Lane l holds rows g = l / 4 and g + 8, t = l % 4:
//   bytes 16 l + 4 j .. + 3, a word for k = 16 j .. 16 j + 15, j = 0..3; its nibbles,
//     from the lowest: (row g, k 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8), then the
//     same four at k + 1;
//   bytes 512 + 8 g + 4 s + 2 h: scale of row g + 8 h and k = 32 s .. 32 s + 31.
// A nibble is value + 8; a weight is bf16(value * scale), rounded once. Where N or K end
// inside of a tile, the rest has value 0.
constexpr int kInt4TileRows = 16;
constexpr int kInt4TileDepth = 64;
constexpr int kInt4TileBytes = 576;
constexpr int kInt4GroupSize = 32;

enum class WeightKind { kBf16, kFloat32, kInt4 };

// Some rows of one group, that one block multiplies at once.
struct RowChunk {
  int32_t group;
  int32_t first;   // Of the rows sorted by group.
  int32_t count;   // At most what the list was made for.
  int32_t index;   // Which chunk of its group this is,
  int32_t chunks;  // of so many.
};

enum class Start {
  kAfter,  // It begins when the kernel before has ended.
  kEarly,  // It begins before, and reads nothing until that has ended.
  // It begins before, and reads weights and the list of chunks at once. The kernel before
  // must not be the one that makes the list: it must be a kEarly one behind that, which
  // lets this one begin only once the list is there.
  kWeights,
};

struct MatmulArgs {
  // Rows in bf16, or in float32 where the weights are float32 or `x_float32`.
  const void* x;
  int64_t x_row_stride;    // In elements, as all strides.
  int64_t x_group_stride;  // Added per group.
  const int32_t* x_rows;   // Row i is row x_rows[i] of x; null: row i.
  bool x_float32;

  // kBf16, kFloat32: element (g, k, n) at g * w_group_stride + k * w_row_stride + n, or,
  // where `w_by_feature`, at g * w_group_stride + n * w_row_stride + k.
  // kInt4: tiles, see above; the strides and `w_by_feature` are not read.
  const void* w;
  WeightKind kind;
  bool w_by_feature;
  int64_t w_row_stride;
  int64_t w_group_stride;

  // Rounded once from fp32, to bf16 unless `out_float32`.
  void* out;
  int64_t out_row_stride;
  int64_t out_group_stride;
  const int32_t* out_rows;  // Row i becomes row out_rows[i]; null: row i.
  bool out_float32;

  int groups;
  int rows;        // Of each group; with a list, of all groups.
  int group_rows;  // No group, or no chunk of the list, has more rows.
  int depth;     // K.
  int features;  // N, gate and up together where `gated`.

  // out = silu(gate) * up, half as wide as w. bf16, float32: gate is the first half of
  // N. kInt4: rows 0..7 of a tile are gate's, rows 8..15 up's.
  bool gated;

  // What rows belong to which group, see expert_rows.h; null: each group has all rows.
  const RowChunk* chunks;
  const int32_t* num_chunks;
  int max_chunks;

  // LaunchMatmulMma: whether the kernel may begin before the one launched before it on the
  // stream has ended, which must have been launched by this library.
  Start start;
};

// Rows that a chunk may have at most.
constexpr int kChunkRowsInt4 = 16;
constexpr int kChunkRowsBf16 = 64;
constexpr int kChunkRowsFloat32 = 64;

// bf16 rows, on the tensor cores. x, w and all their rows are aligned to 16 bytes, gate's
// and up's parts of a row too; depth is a multiple of 16.
cudaError_t LaunchMatmulMma(cudaStream_t stream, const MatmulArgs& args);

// float32 rows, on the ordinary cores, k ascending within fixed parts of K.
cudaError_t LaunchMatmulSimt(cudaStream_t stream, const MatmulArgs& args);

// Whether that is the kernel for the dtypes.
inline bool IsSimt(const MatmulArgs& args) {
  return args.x_float32 || args.kind == WeightKind::kFloat32;
}

inline cudaError_t LaunchMatmul(cudaStream_t stream, const MatmulArgs& args) {
  return IsSimt(args) ? LaunchMatmulSimt(stream, args) : LaunchMatmulMma(stream, args);
}

// What LaunchMatmulMma wants of sizes and strides.
inline bool HasMmaSizes(const MatmulArgs& args) {
  const bool int4 = args.kind == WeightKind::kInt4;
  return args.depth % 16 == 0 && args.x_row_stride % 8 == 0 &&
         args.x_group_stride % 8 == 0 &&
         (int4 || (args.w_row_stride % 8 == 0 && args.w_group_stride % 8 == 0)) &&
         (!args.gated || args.features % (int4 ? 2 : 16) == 0);
}

// Rows of a chunk where all groups together have `rows`, and one has about `group_rows` at
// most. Blocks for few rows are the faster ones where groups have few, which most then do;
// one with more is cut into several chunks. No bit depends on it.
inline int ChunkRows(const MatmulArgs& args, int64_t rows, int64_t group_rows) {
  if (IsSimt(args)) return kChunkRowsFloat32;
  if (args.kind == WeightKind::kInt4) return group_rows <= 8 ? 8 : kChunkRowsInt4;
  const int64_t groups = args.groups < 1 ? 1 : args.groups;
  const int64_t many = 4 * ((rows + groups - 1) / groups);  // Four times the mean.
  const int64_t likely = many < group_rows ? many : group_rows;
  if (likely <= 32) return likely <= 16 ? 16 : 32;
  return kChunkRowsBf16;
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_MATMUL_H_
