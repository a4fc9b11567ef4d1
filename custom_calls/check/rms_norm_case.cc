#include "rms_norm.h"

#include "ops.h"

namespace kdtree_jax {
namespace {

RmsNormArgs SetUpNorm(CaseSetup& setup) {
  RmsNormArgs args{};
  args.rows = setup.Dim("rows", "x", 0);
  args.width = setup.Dim("D", "x", 1);
  const DType dtype = setup.Type("x");
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    setup.Refuse("x", "must be f32 or bf16");
  }
  if (args.width < 1 || args.width > kRmsNormMaxWidth) {
    setup.Refuse("D", "must be from 1 to " + std::to_string(kRmsNormMaxWidth));
  }
  args.bfloat16 = dtype == DType::kBf16;
  args.eps = static_cast<float>(setup.Number("eps"));
  args.x = setup.Input("x", dtype, {args.rows, args.width});
  args.weight = setup.Input("weight", dtype, {args.width});
  args.out = setup.Output("out", dtype, {args.rows, args.width});
  return args;
}

}  // namespace

Launch SetUpRmsNorm(CaseSetup& setup) {
  const RmsNormArgs args = SetUpNorm(setup);
  return [args](cudaStream_t stream) { return LaunchRmsNorm(stream, args); };
}

Launch SetUpAddRmsNorm(CaseSetup& setup) {
  RmsNormArgs args = SetUpNorm(setup);
  const DType dtype = args.bfloat16 ? DType::kBf16 : DType::kF32;
  args.added = setup.Input("added", dtype, {args.rows, args.width});
  args.sum = setup.Output("sum", dtype, {args.rows, args.width});
  return [args](cudaStream_t stream) { return LaunchRmsNorm(stream, args); };
}

}  // namespace kdtree_jax
