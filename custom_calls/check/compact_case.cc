#include "compact.h"

#include "ops.h"

namespace kdtree_jax {

Launch SetUpCompact(CaseSetup& setup) {
  CompactArgs args{};
  args.layers = setup.Dim("layers", "cache", 0);
  args.batch = setup.Dim("B", "cache", 1);
  args.capacity = setup.Dim("S", "cache", 2);
  const int64_t W = setup.Dim("W", "cache", 3);
  args.nodes = setup.Dim("N", "tree_keys", 2);
  args.path_len = setup.Dim("A", "path", 1);
  const DType dtype = setup.Type("cache");
  args.row_bytes = static_cast<size_t>(W) * DTypeBits(dtype) / 8;
  if (args.nodes < 1) setup.Refuse("N", "must be 1 or more");
  const int64_t B = args.batch;
  args.cache = setup.InPlace("cache", dtype, {args.layers, B, args.capacity, W});
  args.tree_keys = setup.Input("tree_keys", dtype, {args.layers, B, args.nodes, W});
  args.path = setup.InputI32("path", {B, args.path_len});
  args.length = setup.InputI32("length", {B});
  args.start = setup.InputI32("start", {B});
  return [args](cudaStream_t stream) { return LaunchCompact(stream, args); };
}

}  // namespace kdtree_jax
