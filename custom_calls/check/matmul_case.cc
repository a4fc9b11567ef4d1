#include "matmul.h"

#include <climits>

#include "ops.h"
#include "product_weights.h"

namespace kdtree_jax {

// One group. Tiles do not say how many features they have; an attribute does.
Launch SetUpMatmul(CaseSetup& setup) {
  MatmulArgs args{};
  const int64_t M = args.rows = args.group_rows = setup.Dim("M", "x", 0);
  const int64_t K = args.depth = setup.Dim("K", "x", 1);
  const DType x_type = FloatType(setup, "x");
  args.x_float32 = x_type == DType::kF32;
  args.kind = KindOfWeights(setup, "w", args.x_float32);
  args.w_by_feature = setup.Flag("by_feature");
  args.gated = setup.Flag("gated");
  args.out_float32 = setup.Flag("out_float32");
  args.groups = 1;
  args.features = args.kind == WeightKind::kInt4
                      ? static_cast<int>(setup.Integer("features", 1, INT_MAX))
                      : setup.Dim("N", "w", args.w_by_feature ? 0 : 1);
  if (args.gated && args.features % 2 != 0) setup.Refuse("w", "is gated, but N is odd");
  const int64_t N = args.features, width = args.gated ? N / 2 : N;
  const CaseSetup::Shape shape =
      args.w_by_feature ? CaseSetup::Shape{N, K} : CaseSetup::Shape{K, N};
  args.x = setup.Input("x", x_type, {M, K});
  args.x_row_stride = K;
  args.w = InputWeights(setup, "w", args.kind, shape, 1, K, N);
  args.w_row_stride = args.w_by_feature ? K : N;
  args.w_group_stride = K * N;
  args.out =
      setup.Output("out", args.out_float32 ? DType::kF32 : DType::kBf16, {M, width});
  args.out_row_stride = width;
  CheckSizes(setup, args);
  return [args](cudaStream_t stream) { return LaunchMatmul(stream, args); };
}

// A group for each head; rows and results of the heads lie beside each other.
Launch SetUpHeadMatmul(CaseSetup& setup) {
  MatmulArgs args{};
  const int64_t T = args.rows = args.group_rows = setup.Dim("T", "x", 0);
  const int64_t H = args.groups = setup.Dim("H", "w", 0);
  const int64_t X = setup.Dim("X", "x", 2);
  const int64_t K = args.depth = setup.Dim("K", "w", 1);
  const int64_t N = args.features = setup.Dim("N", "w", 2);
  if (X < K) setup.Refuse("x", "has less columns than w has rows");
  const DType dtype = FloatType(setup, "x");
  args.x_float32 = args.out_float32 = dtype == DType::kF32;
  args.kind = args.x_float32 ? WeightKind::kFloat32 : WeightKind::kBf16;
  args.x = setup.Input("x", dtype, {T, H, X});
  args.x_row_stride = H * X;
  args.x_group_stride = X;
  args.w = setup.Input("w", dtype, {H, K, N});
  args.w_row_stride = N;
  args.w_group_stride = K * N;
  args.out = setup.Output("out", dtype, {T, H, N});
  args.out_row_stride = H * N;
  args.out_group_stride = N;
  CheckSizes(setup, args);
  return [args](cudaStream_t stream) { return LaunchMatmul(stream, args); };
}

}  // namespace kdtree_jax
