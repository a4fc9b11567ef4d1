#include "rope.h"

#include <algorithm>
#include <climits>

#include "ops.h"

namespace kdtree_jax {

// x and what may be copied in front of it are contiguous; the angles come from tables
// where the case has them, else from frequencies.
Launch SetUpRope(CaseSetup& setup) {
  RopeArgs args{};
  args.tokens = setup.Dim("T", "x", 0);
  args.heads = setup.Dim("H", "x", 1);
  const int64_t T = args.tokens, H = args.heads, P = setup.Dim("P", "x", 2);
  args.angles.pairs = static_cast<int>(P / 2);
  if (P < 2 || P % 2 != 0 || args.angles.pairs > kRopeMaxPairs) {
    setup.Refuse("P", "must be even, from 2 to " + std::to_string(2 * kRopeMaxPairs));
  }
  const int64_t pairs = setup.error().empty() ? P / 2 : 0;
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
  if (setup.Has("cos")) {
    args.angles.length = setup.Dim("length", "cos", 0);
    args.angles.cos = setup.InputF32("cos", {args.angles.length, pairs});
    args.angles.sin = setup.InputF32("sin", {args.angles.length, pairs});
  } else {
    args.angles.length = static_cast<int>(setup.Integer("length", 1, INT_MAX));
    args.angles.float32_angles = setup.Flag("float32_angles");
    args.angles.amplitude = setup.Number("amplitude");
    const double* frequencies = setup.HostF64("frequencies", {pairs});
    if (frequencies != nullptr) {
      std::copy(frequencies, frequencies + pairs, args.angles.frequencies);
    }
  }
  args.out = setup.Output("out", dtype, {T, H, args.copied_width + P});
  return [args](cudaStream_t stream) { return LaunchRope(stream, args); };
}

}  // namespace kdtree_jax
