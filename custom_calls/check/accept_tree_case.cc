#include "accept_tree.h"

#include "ops.h"

namespace kdtree_jax {

Launch SetUpAcceptTree(CaseSetup& setup) {
  AcceptTreeArgs args{};
  args.batch = setup.Dim("B", "token_ids", 0);
  args.nodes = setup.Dim("N", "token_ids", 1);
  args.max_depth = static_cast<int>(setup.Integer("max_depth", 0, 1 << 20));
  if (args.nodes < 1 || args.nodes > kAcceptTreeMaxNodes) {
    setup.Refuse("N", "must be from 1 to " + std::to_string(kAcceptTreeMaxNodes));
  }
  const int64_t B = args.batch, N = args.nodes;
  args.token_ids = setup.InputI32("token_ids", {B, N});
  args.parents = setup.InputI32("parents", {B, N});
  args.size = setup.InputI32("size", {B});
  args.target_tokens = setup.InputI32("target_tokens", {B, N});
  args.path = setup.OutputI32("path", {B, args.max_depth + 1});
  args.length = setup.OutputI32("length", {B});
  args.bonus = setup.OutputI32("bonus", {B});
  return [args](cudaStream_t stream) { return LaunchAcceptTree(stream, args); };
}

}  // namespace kdtree_jax
