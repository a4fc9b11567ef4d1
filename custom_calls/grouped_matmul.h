// Rows sorted by group, times the weights of their groups: two launches.

#ifndef KDTREE_JAX_GROUPED_MATMUL_H_
#define KDTREE_JAX_GROUPED_MATMUL_H_

#include <cuda_runtime_api.h>

#include "expert_rows.h"
#include "matmul.h"

namespace kdtree_jax {

// Both have the list of chunks, `product` reads what `chunks` writes.
struct GroupedMatmulArgs {
  GroupChunksArgs chunks;
  MatmulArgs product;
};

// Completes args.chunks and args.product. Set before: chunks.group_sizes, .chunks and
// .num_chunks; of the product x, w and their kinds, out, sizes, but neither strides nor
// what belongs to the list.
inline void Connect(GroupedMatmulArgs* args) {
  GroupChunksArgs& chunks = args->chunks;
  MatmulArgs& product = args->product;
  const int64_t K = product.depth, N = product.features;
  chunks.groups = product.groups;
  chunks.rows = product.rows;
  chunks.rows_per_chunk = ChunkRows(product, product.rows, product.rows);
  chunks.out = product.out;
  chunks.out_row_bytes = N * (product.out_float32 ? 4 : 2);
  product.x_row_stride = K;
  product.w_row_stride = N;
  product.w_group_stride = K * N;
  product.out_row_stride = N;
  product.group_rows = chunks.rows_per_chunk;
  product.chunks = chunks.chunks;
  product.num_chunks = chunks.num_chunks;
  product.max_chunks = static_cast<int>(
      MaxChunks(product.rows, product.groups, chunks.rows_per_chunk));
  product.start = Start::kEarly;
}

inline cudaError_t LaunchGroupedMatmul(cudaStream_t stream,
                                       const GroupedMatmulArgs& args) {
  const cudaError_t status = LaunchGroupChunks(stream, args.chunks);
  return status == cudaSuccess ? LaunchMatmul(stream, args.product) : status;
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_GROUPED_MATMUL_H_
