#include "rope.h"

#include "ops.h"
#include "rope_angles.h"

namespace kdtree_jax {

// x and what may be copied in front of it are contiguous.
Launch SetUpRope(CaseSetup& setup) {
  RopeArgs args{};
  args.tokens = setup.Dim("T", "x", 0);
  args.heads = setup.Dim("H", "x", 1);
  const int64_t T = args.tokens, H = args.heads, P = setup.Dim("P", "x", 2);
  const DType dtype = setup.Type("x");
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    setup.Refuse("x", "must be f32 or bf16");
  }
  args.bfloat16 = dtype == DType::kBf16;
  args.interleave = setup.Flag("interleave");
  args.x = setup.Input("x", dtype, {T, H, P});
  args.x_token_stride = H * P;
  args.x_head_stride = P;
  args.positions = setup.InputI32("positions", {T});
  if (setup.Has("copied")) {
    args.copied_width = setup.Dim("R", "copied", 2);
    const int64_t R = args.copied_width;
    args.copied = setup.Input("copied", dtype, {T, H, R});
    args.copied_token_stride = H * R;
    args.copied_head_stride = R;
  }
  args.angles = SetUpAngles(setup, P);
  args.out = setup.Output("out", dtype, {T, H, args.copied_width + P});
  return [args](cudaStream_t stream) { return LaunchRope(stream, args); };
}

}  // namespace kdtree_jax
