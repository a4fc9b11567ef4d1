// Tokens through their experts: four launches. In bf16 and int4 the second to the fourth
// begin before the one before has ended.

#ifndef KDTREE_JAX_ROUTED_EXPERTS_H_
#define KDTREE_JAX_ROUTED_EXPERTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "combine_experts.h"
#include "expert_rows.h"
#include "matmul.h"

namespace kdtree_jax {

// Shapes: T tokens, k slots, E experts, D features, F between the products.
struct RoutedExpertsArgs {
  const void* x;           // [T, D], float32 where `is_float32`, else bf16
  const int32_t* experts;  // [T, k]; an id outside of 0 .. E - 1 adds nothing
  const float* weights;    // [T, k]
  const void* gate_up;     // [E, D, 2F], or [D, E, 2F] `beside`, or gated tiles
  const void* down;        // [E, F, D] or tiles
  void* out;               // [T, D]
  int tokens, slots, num_experts, width, inner_width;
  bool is_float32;  // x, out, inner, outputs, and weights that are not int4
  bool int4;
  bool beside;

  // Workspace.
  int32_t* order;       // [2, T * k]: the pairs by expert, and their tokens
  RowChunk* chunks;     // [MaxChunks(T * k, E, rows of a chunk)]
  int32_t* num_chunks;  // [1]
  void* inner;          // [T * k, F]
  void* outputs;        // [T * k, D]
};

struct RoutedExpertsSteps {
  ExpertRowsArgs rows;
  MatmulArgs up;
  MatmulArgs down;
  CombineExpertsArgs sum;
};

// The four launches of these arguments; pointers may be null.
inline RoutedExpertsSteps StepsOf(const RoutedExpertsArgs& args) {
  const int64_t D = args.width, F = args.inner_width, E = args.num_experts;
  RoutedExpertsSteps steps = {};
  MatmulArgs& up = steps.up;
  up.x_float32 = up.out_float32 = args.is_float32;
  up.kind = args.int4         ? WeightKind::kInt4
            : args.is_float32 ? WeightKind::kFloat32
                              : WeightKind::kBf16;
  up.groups = args.num_experts;

  ExpertRowsArgs& rows = steps.rows;
  rows.pairs = args.tokens * args.slots;
  rows.slots = args.slots;
  rows.num_experts = args.num_experts;
  rows.rows_per_chunk = ChunkRows(up, rows.pairs, args.tokens);
  rows.experts = args.experts;
  rows.order = args.order;
  rows.tokens = args.order == nullptr ? nullptr : args.order + rows.pairs;
  rows.chunks = args.chunks;
  rows.num_chunks = args.num_chunks;

  up.rows = rows.pairs;
  // An expert that a token names twice may have more rows than there are tokens, but
  // no chunk of it has.
  up.group_rows = rows.rows_per_chunk;
  up.chunks = rows.chunks;
  up.num_chunks = rows.num_chunks;
  up.max_chunks = static_cast<int>(MaxChunks(rows.pairs, E, rows.rows_per_chunk));
  MatmulArgs& down = steps.down = up;

  up.x = args.x;
  up.x_row_stride = D;
  up.x_rows = rows.tokens;
  up.w = args.gate_up;
  up.w_row_stride = args.beside ? E * 2 * F : 2 * F;
  up.w_group_stride = args.beside ? 2 * F : D * 2 * F;
  up.depth = args.width;
  up.features = 2 * args.inner_width;
  up.gated = true;
  up.out = args.inner;
  up.out_row_stride = F;
  up.start = Start::kEarly;

  down.x = args.inner;
  down.x_row_stride = F;
  down.w = args.down;
  down.w_row_stride = D;
  down.w_group_stride = F * D;
  down.depth = args.inner_width;
  down.features = args.width;
  down.out = args.outputs;
  down.out_row_stride = D;
  down.out_rows = rows.order;
  down.start = Start::kWeights;

  CombineExpertsArgs& sum = steps.sum;
  sum.y = args.outputs;
  sum.weights = args.weights;
  sum.experts = args.experts;
  sum.out = args.out;
  sum.tokens = args.tokens;
  sum.slots = args.slots;
  sum.width = args.width;
  sum.num_experts = args.num_experts;
  sum.is_float32 = args.is_float32;
  sum.early = true;
  return steps;
}

inline cudaError_t LaunchRoutedExperts(cudaStream_t stream,
                                       const RoutedExpertsArgs& args) {
  const RoutedExpertsSteps steps = StepsOf(args);
  cudaError_t status = LaunchExpertRows(stream, steps.rows);
  if (status == cudaSuccess) status = LaunchMatmul(stream, steps.up);
  if (status == cudaSuccess) status = LaunchMatmul(stream, steps.down);
  if (status == cudaSuccess) status = LaunchCombineExperts(stream, steps.sum);
  return status;
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROUTED_EXPERTS_H_
