#include "tree_ancestors.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error TreeAncestors(cudaStream_t stream, ffi::BufferR2<ffi::S32> parents,
                         ffi::BufferR2<ffi::S32> depths,
                         ffi::ResultBufferR3<ffi::S32> ancestors) {
  constexpr char kName[] = "ancestors";
  const auto dims = parents.dimensions();
  const int64_t B = dims[0], N = dims[1], A = ancestors->dimensions()[2];
  if (N > kTreeAncestorsMaxNodes) {
    return BadArgument(kName, "parents has " + std::to_string(N) +
                                  " slots; a tree must have at most " +
                                  std::to_string(kTreeAncestorsMaxNodes));
  }
  if (A < 1) {
    return BadArgument(kName, "ancestors has no depth; it must have 1 or more");
  }
  if (auto e = CheckShapes(kName, {{"parents", parents, {B, N}},
                                   {"depths", depths, {B, N}},
                                   {"ancestors", *ancestors, {B, N, A}}});
      e.failure()) {
    return e;
  }
  TreeAncestorsArgs args;
  args.parents = parents.typed_data();
  args.depths = depths.typed_data();
  args.ancestors = ancestors->typed_data();
  args.batch = static_cast<int>(B);
  args.nodes = static_cast<int>(N);
  args.max_depth = static_cast<int>(A) - 1;
  return Launched(kName, LaunchTreeAncestors(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeTreeAncestors, TreeAncestors,
                              Bind()
                                  .Arg<ffi::BufferR2<ffi::S32>>()   // parents
                                  .Arg<ffi::BufferR2<ffi::S32>>()   // depths
                                  .Ret<ffi::BufferR3<ffi::S32>>(),  // ancestors
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
