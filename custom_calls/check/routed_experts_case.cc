#include "routed_experts.h"

#include <climits>

#include "ops.h"
#include "product_weights.h"

namespace kdtree_jax {

Launch SetUpRoutedExperts(CaseSetup& setup) {
  RoutedExpertsArgs args{};
  const int64_t T = args.tokens = setup.Dim("T", "x", 0);
  const int64_t k = args.slots = setup.Dim("k", "experts", 1);
  const int64_t E = args.num_experts = setup.Dim("E", "down", 0);
  const int64_t D = args.width = setup.Dim("D", "x", 1);
  const int64_t F = args.inner_width =
      static_cast<int>(setup.Integer("inner_width", 1, INT_MAX / 2));
  if (k < 1 || E > kMostGroups) setup.Refuse("k", "must be 1 or more, E at most 8192");
  const DType dtype = FloatType(setup, "x");
  args.is_float32 = dtype == DType::kF32;
  args.beside = setup.Flag("beside");
  const WeightKind kind = KindOfWeights(setup, "gate_up", args.is_float32);
  args.int4 = kind == WeightKind::kInt4;
  if (!args.int4 && (kind == WeightKind::kFloat32) != args.is_float32) {
    setup.Refuse("gate_up", "must be int4 or have the dtype of x");
  }
  const CaseSetup::Shape shape =
      args.beside ? CaseSetup::Shape{D, E, 2 * F} : CaseSetup::Shape{E, D, 2 * F};
  args.x = setup.Input("x", dtype, {T, D});
  args.experts = setup.InputI32("experts", {T, k});
  args.weights = setup.InputF32("weights", {T, k});
  args.gate_up = InputWeights(setup, "gate_up", kind, shape, E, D, 2 * F);
  args.down = InputWeights(setup, "down", kind, {E, F, D}, E, F, D);
  args.out = setup.Output("out", dtype, {T, D});

  const RoutedExpertsSteps steps = StepsOf(args);
  CheckSizes(setup, steps.up);
  CheckSizes(setup, steps.down);
  const uint64_t pairs = steps.rows.pairs, bytes = args.is_float32 ? 4 : 2;
  args.order =
      static_cast<int32_t*>(setup.Workspace("order", 2 * pairs * sizeof(int32_t)));
  args.chunks = static_cast<RowChunk*>(
      setup.Workspace("chunks", steps.up.max_chunks * sizeof(RowChunk)));
  args.num_chunks =
      static_cast<int32_t*>(setup.Workspace("num_chunks", sizeof(int32_t)));
  args.inner = setup.Workspace("inner", pairs * F * bytes);
  args.outputs = setup.Workspace("outputs", pairs * D * bytes);
  return [args](cudaStream_t stream) { return LaunchRoutedExperts(stream, args); };
}

}  // namespace kdtree_jax
