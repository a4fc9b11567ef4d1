#include "compact.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

// The cache is both operand and result: one buffer, by `input_output_aliases`.
ffi::Error Compact(cudaStream_t stream, ffi::AnyBuffer cache, ffi::AnyBuffer tree_keys,
                   ffi::BufferR2<ffi::S32> path, ffi::BufferR1<ffi::S32> length,
                   ffi::BufferR1<ffi::S32> start,
                   ffi::Result<ffi::AnyBuffer> new_cache) {
  const auto dims = cache.dimensions();
  const auto key_dims = tree_keys.dimensions();
  if (dims.size() != 4 || key_dims.size() != 4 || key_dims[0] != dims[0] ||
      key_dims[1] != dims[1] || key_dims[3] != dims[3] ||
      cache.element_type() != tree_keys.element_type()) {
    return BadArgument("compact", "cache and tree_keys do not fit together");
  }
  if (new_cache->untyped_data() != cache.untyped_data()) {
    return BadArgument("compact", "the new cache must be the buffer of the old one");
  }
  CompactArgs args;
  args.cache = new_cache->untyped_data();
  args.tree_keys = tree_keys.untyped_data();
  args.path = path.typed_data();
  args.length = length.typed_data();
  args.start = start.typed_data();
  args.layers = static_cast<int>(dims[0]);
  args.batch = static_cast<int>(dims[1]);
  args.capacity = static_cast<int>(dims[2]);
  args.nodes = static_cast<int>(key_dims[2]);
  args.path_len = static_cast<int>(path.dimensions()[1]);
  args.row_bytes = dims[3] * ffi::ByteWidth(cache.element_type());
  return Launched("compact", LaunchCompact(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeCompact, Compact,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // cache
                                  .Arg<ffi::AnyBuffer>()           // tree_keys
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // path
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // length
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // start
                                  .Ret<ffi::AnyBuffer>(),          // new cache
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
