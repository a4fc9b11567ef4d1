#include "best_token.h"

#include "ops.h"

namespace kdtree_jax {

Launch SetUpBestToken(CaseSetup& setup) {
  BestTokenArgs args{};
  args.rows = setup.Dim("rows", "logits", 0);
  args.vocab = setup.Dim("V", "logits", 1);
  if (args.vocab < 1) setup.Refuse("V", "must be 1 or more");
  args.logits = setup.InputF32("logits", {args.rows, args.vocab});
  args.tokens = setup.OutputI32("tokens", {args.rows});
  return [args](cudaStream_t stream) { return LaunchBestToken(stream, args); };
}

}  // namespace kdtree_jax
