#include "grouped_matmul.h"

#include <climits>

#include "ops.h"
#include "product_weights.h"

namespace kdtree_jax {

Launch SetUpGroupedMatmul(CaseSetup& setup) {
  GroupedMatmulArgs args{};
  MatmulArgs& product = args.product;
  const int64_t M = product.rows = setup.Dim("M", "x", 0);
  const int64_t K = product.depth = setup.Dim("K", "x", 1);
  const int64_t G = product.groups = setup.Dim("G", "group_sizes", 0);
  const DType dtype = FloatType(setup, "x");
  product.x_float32 = product.out_float32 = dtype == DType::kF32;
  product.kind = KindOfWeights(setup, "w", product.x_float32);
  const int64_t N = product.features =
      product.kind == WeightKind::kInt4
          ? static_cast<int>(setup.Integer("features", 1, INT_MAX))
          : setup.Dim("N", "w", 2);
  if (G > kMostGroups) setup.Refuse("G", "must be 8192 or less");
  product.x = setup.Input("x", dtype, {M, K});
  product.w = InputWeights(setup, "w", product.kind, {G, K, N}, G, K, N);
  product.out = setup.Output("out", dtype, {M, N});
  const int64_t most = MaxChunks(M, G, ChunkRows(product, M, M));
  args.chunks.group_sizes = setup.InputI32("group_sizes", {G});
  args.chunks.chunks =
      static_cast<RowChunk*>(setup.Workspace("chunks", most * sizeof(RowChunk)));
  args.chunks.num_chunks =
      static_cast<int32_t*>(setup.Workspace("num_chunks", sizeof(int32_t)));
  Connect(&args);
  CheckSizes(setup, product);
  return [args](cudaStream_t stream) { return LaunchGroupedMatmul(stream, args); };
}

}  // namespace kdtree_jax
