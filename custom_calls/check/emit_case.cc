#include "emit.h"

#include "ops.h"

namespace kdtree_jax {

// The seven arrays of the state are updated in place, as the handler's aliases have it.
Launch SetUpEmit(CaseSetup& setup) {
  EmitArgs args{};
  args.batch = setup.Dim("B", "token_ids", 0);
  args.nodes = setup.Dim("N", "token_ids", 1);
  args.path_len = setup.Dim("A", "path", 1);
  args.stops = setup.Dim("K", "stop_tokens", 0);
  args.room = setup.Dim("M", "tokens", 1);
  if (args.nodes < 1) setup.Refuse("N", "must be 1 or more");
  if (args.path_len < 1) setup.Refuse("A", "must be 1 or more");
  const int64_t B = args.batch, N = args.nodes, A = args.path_len, M = args.room;
  const auto state = [&](const char* name, const CaseSetup::Shape& shape) {
    return static_cast<int32_t*>(setup.InPlace(name, DType::kI32, shape));
  };
  args.token_ids = setup.InputI32("token_ids", {B, N});
  args.choices = setup.InputI32("choices", {B, N});
  args.path = setup.InputI32("path", {B, A});
  args.length = setup.InputI32("length", {B});
  args.bonus = setup.InputI32("bonus", {B});
  args.log_probs = setup.InputF32("log_probs", {B, A});
  args.lengths = setup.InputI32("lengths", {B});
  args.stop_tokens = setup.InputI32("stop_tokens", {args.stops});
  args.capacity = setup.InputI32("capacity", {});
  args.root = state("root", {B});
  args.finish = state("finish", {B});
  args.generated = state("generated", {B});
  args.rounds = state("rounds", {B});
  args.tokens = state("tokens", {B, M});
  args.text_log_probs =
      static_cast<float*>(setup.InPlace("logprobs", DType::kF32, {B, M}));
  args.accepted = state("accepted", {B, M});
  args.committed = setup.OutputI32("committed", {B});
  args.new_lengths = setup.OutputI32("new_lengths", {B});
  args.kept = setup.OutputI32("kept", {B});
  args.path_tokens = setup.OutputI32("path_tokens", {B, A});
  return [args](cudaStream_t stream) { return LaunchEmit(stream, args); };
}

}  // namespace kdtree_jax
