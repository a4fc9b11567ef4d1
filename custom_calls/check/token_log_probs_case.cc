#include "token_log_probs.h"

#include "ops.h"

namespace kdtree_jax {

Launch SetUpTokenLogProbs(CaseSetup& setup) {
  TokenLogProbsArgs args{};
  args.batch = setup.Dim("B", "logits", 0);
  args.nodes = setup.Dim("N", "logits", 1);
  args.vocab = setup.Dim("V", "logits", 2);
  args.path_len = setup.Dim("A", "path", 1);
  if (args.nodes < 1) setup.Refuse("N", "must be 1 or more");
  if (args.vocab < 1) setup.Refuse("V", "must be 1 or more");
  const int64_t B = args.batch, N = args.nodes, A = args.path_len;
  args.logits = setup.InputF32("logits", {B, N, args.vocab});
  args.tokens = setup.InputI32("tokens", {B, N});
  args.path = setup.InputI32("path", {B, A});
  args.log_probs = setup.OutputF32("log_probs", {B, A});
  return [args](cudaStream_t stream) { return LaunchTokenLogProbs(stream, args); };
}

}  // namespace kdtree_jax
