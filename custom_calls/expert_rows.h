// Which rows an expert has: sorts the (token, slot) pairs by expert, and cuts the rows
// of each expert, or of each group of given size, into chunks for the products.

#ifndef KDTREE_JAX_EXPERT_ROWS_H_
#define KDTREE_JAX_EXPERT_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "matmul.h"

namespace kdtree_jax {

// Most experts or groups, what the shared memory of a block holds.
constexpr int kMostGroups = 8192;

// How long a list of chunks must be. A group of c > 0 rows has ceil(c / r) chunks of r
// rows, which is floor((c - 1) / r) + 1. At most min(rows, groups) groups have rows, so
// the ones add up to no more than that, and the floors to no more than rows / r.
constexpr int64_t MaxChunks(int64_t rows, int64_t groups, int64_t rows_per_chunk) {
  return (rows < groups ? rows : groups) + rows / rows_per_chunk;
}

// Shapes: T tokens, k slots, E experts. Chunks are sorted by group, then by row; those
// beyond num_chunks are all zeros.
//
// An id outside of 0 .. E - 1 belongs to no expert: its pair comes behind all others in
// `order`, and no chunk has it, so the products leave its row as it was.
struct ExpertRowsArgs {
  const int32_t* experts;  // [T * k]
  int32_t* order;          // [T * k] pair token * k + slot; stable within an expert
  int32_t* tokens;         // [T * k] order / k
  RowChunk* chunks;        // [MaxChunks(T * k, E, rows_per_chunk)]
  int32_t* num_chunks;     // [1]
  int pairs;               // T * k
  int slots;               // k, 1 or more
  int num_experts;         // 0 .. kMostGroups
  int rows_per_chunk;      // 1 or more
};

// Any sizes are safe: one below 0 counts as 0, and rows from `rows` on do not exist.
// Rows beyond the sum belong to no group; the kernel sets theirs of `out` to zero, which
// the products leave as they are.
struct GroupChunksArgs {
  const int32_t* group_sizes;  // [groups]
  RowChunk* chunks;            // [MaxChunks(rows, groups, rows_per_chunk)]
  int32_t* num_chunks;         // [1]
  void* out;                   // [rows] of out_row_bytes, which are even; or null
  int64_t out_row_bytes;
  int groups;  // 0 .. kMostGroups
  int rows;
  int rows_per_chunk;  // 1 or more
};

cudaError_t LaunchExpertRows(cudaStream_t stream, const ExpertRowsArgs& args);
cudaError_t LaunchGroupChunks(cudaStream_t stream, const GroupChunksArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_EXPERT_ROWS_H_
