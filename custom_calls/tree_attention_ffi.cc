#include <cstddef>

#include "ffi_support.h"
#include "tree_attention.h"

namespace kdtree_jax {
namespace {

ffi::Error TreeAttention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer cache,
                         ffi::AnyBuffer tree_keys, ffi::BufferR3<ffi::S32> ancestors,
                         ffi::BufferR2<ffi::S32> depths,
                         ffi::BufferR1<ffi::S32> lengths,
                         ffi::Result<ffi::AnyBuffer> out,
                         ffi::ResultBufferR4<ffi::F32> accumulators,
                         ffi::ResultBufferR3<ffi::F32> maxima,
                         ffi::ResultBufferR3<ffi::F32> sums, int64_t layer,
                         int64_t chunk, int64_t rows_per_block, double scale) {
  const auto refuse = [](const char* what) {
    return BadArgument("tree_attention", what);
  };
  const auto q_dims = q.dimensions();
  const auto cache_dims = cache.dimensions();
  if (q_dims.size() != 4 || cache_dims.size() != 4 || out->dimensions().size() != 4) {
    return refuse("q, cache and out must have 4 dimensions");
  }
  const ffi::DataType dtype = q.element_type();
  if (dtype != ffi::DataType::F32 && dtype != ffi::DataType::BF16) {
    return refuse("q must be float32 or bfloat16");
  }
  if (cache.element_type() != dtype || tree_keys.element_type() != dtype ||
      out->element_type() != dtype) {
    return refuse("cache, tree_keys and out must have the dtype of q");
  }
  if (layer < 0 || layer >= cache_dims[0]) return refuse("the cache lacks this layer");
  if (rows_per_block != 0 && rows_per_block != 16 && rows_per_block != 32 &&
      rows_per_block != 64) {
    return refuse("rows_per_block must be 0, 16, 32 or 64");
  }
  if (chunk <= 0 || chunk % 16 != 0) return refuse("chunk must be a multiple of 16");

  TreeAttentionArgs args;
  args.element = dtype == ffi::DataType::F32 ? Element::kFloat32 : Element::kBFloat16;
  args.batch = static_cast<int>(q_dims[0]);
  args.nodes = static_cast<int>(q_dims[1]);
  args.heads = static_cast<int>(q_dims[2]);
  args.width = static_cast<int>(q_dims[3]);
  args.value_dim = static_cast<int>(out->dimensions()[3]);
  args.capacity = static_cast<int>(cache_dims[2]);
  args.max_ancestors = static_cast<int>(ancestors.dimensions()[2]);
  args.chunk = static_cast<int>(chunk);
  args.chunks = static_cast<int>(maxima->dimensions()[2]);
  args.rows_per_block = static_cast<int>(rows_per_block);
  args.scale = static_cast<float>(scale);
  if (args.chunks * chunk < args.capacity + args.max_ancestors) {
    return refuse("the workspace has too few chunks");
  }
  const size_t element_bytes = args.element == Element::kFloat32 ? 4 : 2;
  const size_t layer_bytes =
      element_bytes * cache_dims[1] * cache_dims[2] * cache_dims[3];
  args.q = q.untyped_data();
  args.cache =
      static_cast<const std::byte*>(cache.untyped_data()) + layer * layer_bytes;
  args.tree_keys = tree_keys.untyped_data();
  args.ancestors = ancestors.typed_data();
  args.depths = depths.typed_data();
  args.lengths = lengths.typed_data();
  args.out = out->untyped_data();
  args.accumulators = accumulators->typed_data();
  args.maxima = maxima->typed_data();
  args.sums = sums->typed_data();
  return Launched("tree_attention", LaunchTreeAttention(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeTreeAttention, TreeAttention,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()             // q
                                  .Arg<ffi::AnyBuffer>()             // cache
                                  .Arg<ffi::AnyBuffer>()             // tree_keys
                                  .Arg<ffi::BufferR3<ffi::S32>>()    // ancestors
                                  .Arg<ffi::BufferR2<ffi::S32>>()    // depths
                                  .Arg<ffi::BufferR1<ffi::S32>>()    // lengths
                                  .Ret<ffi::AnyBuffer>()             // out
                                  .Ret<ffi::BufferR4<ffi::F32>>()    // accumulators
                                  .Ret<ffi::BufferR3<ffi::F32>>()    // maxima
                                  .Ret<ffi::BufferR3<ffi::F32>>()    // sums
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("rows_per_block")
                                  .Attr<double>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
