#include "tree_ancestors.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error TreeAncestors(cudaStream_t stream, ffi::BufferR2<ffi::S32> parents,
                         ffi::BufferR2<ffi::S32> depths,
                         ffi::ResultBufferR3<ffi::S32> ancestors) {
  const auto dims = parents.dimensions();
  if (dims[1] > kTreeAncestorsMaxNodes) {
    return BadArgument("ancestors", "a tree has too many slots");
  }
  TreeAncestorsArgs args;
  args.parents = parents.typed_data();
  args.depths = depths.typed_data();
  args.ancestors = ancestors->typed_data();
  args.batch = static_cast<int>(dims[0]);
  args.nodes = static_cast<int>(dims[1]);
  args.max_depth = static_cast<int>(ancestors->dimensions()[2]) - 1;
  return Launched("ancestors", LaunchTreeAncestors(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeTreeAncestors, TreeAncestors,
                              Bind()
                                  .Arg<ffi::BufferR2<ffi::S32>>()   // parents
                                  .Arg<ffi::BufferR2<ffi::S32>>()   // depths
                                  .Ret<ffi::BufferR3<ffi::S32>>(),  // ancestors
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
