#include "tree_ancestors.h"

#include "ops.h"

namespace kdtree_jax {

Launch SetUpTreeAncestors(CaseSetup& setup) {
  TreeAncestorsArgs args{};
  args.batch = setup.Dim("B", "parents", 0);
  args.nodes = setup.Dim("N", "parents", 1);
  args.max_depth = static_cast<int>(setup.Integer("max_depth", 0, 1 << 16));
  if (args.nodes > kTreeAncestorsMaxNodes) setup.Refuse("N", "is out of range");
  const int64_t B = args.batch, N = args.nodes;
  args.parents = setup.InputI32("parents", {B, N});
  args.depths = setup.InputI32("depths", {B, N});
  args.ancestors = setup.OutputI32("ancestors", {B, N, 1 + args.max_depth});
  return [args](cudaStream_t stream) { return LaunchTreeAncestors(stream, args); };
}

}  // namespace kdtree_jax
