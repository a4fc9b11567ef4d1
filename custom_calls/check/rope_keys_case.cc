#include "rope_keys.h"

#include "ops.h"
#include "rope_angles.h"

namespace kdtree_jax {

Launch SetUpRopeKeys(CaseSetup& setup) {
  RopeKeysArgs args{};
  args.tokens = setup.Dim("T", "kv", 0);
  args.latent_width = setup.Dim("R", "weight", 0);
  const int64_t T = args.tokens, R = args.latent_width;
  const int64_t width = setup.Dim("width", "kv", 1);
  const DType dtype = setup.Type("kv");
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    setup.Refuse("kv", "must be f32 or bf16");
  }
  if (R < 1) setup.Refuse("R", "must be 1 or more");
  args.bfloat16 = dtype == DType::kBf16;
  args.eps = static_cast<float>(setup.Number("eps"));
  args.interleave = setup.Flag("interleave");
  args.kv = setup.Input("kv", dtype, {T, width});
  args.weight = setup.Input("weight", dtype, {R});
  args.positions = setup.InputI32("positions", {T});
  args.angles = SetUpAngles(setup, width - R);
  args.out = setup.Output("out", dtype, {T, width});
  return [args](cudaStream_t stream) { return LaunchRopeKeys(stream, args); };
}

}  // namespace kdtree_jax
