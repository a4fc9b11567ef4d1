#include "compact.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

// The cache is both operand and result: one buffer, by `input_output_aliases`.
ffi::Error Compact(cudaStream_t stream, ffi::AnyBuffer cache, ffi::AnyBuffer tree_keys,
                   ffi::BufferR2<ffi::S32> path, ffi::BufferR1<ffi::S32> length,
                   ffi::BufferR1<ffi::S32> start,
                   ffi::Result<ffi::AnyBuffer> new_cache) {
  constexpr char kName[] = "compact";
  if (auto e = CheckShapes(kName, {{"cache", cache, {kAny, kAny, kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const auto dims = cache.dimensions();
  const int64_t B = dims[1], A = path.dimensions()[1];
  if (auto e = FirstOf(
          {CheckShapes(kName, {{"tree_keys", tree_keys, {dims[0], B, kAny, dims[3]}},
                               {"path", path, {B, A}},
                               {"length", length, {B}},
                               {"start", start, {B}},
                               {"new_cache", *new_cache, dims}}),
           CheckType(kName, "tree_keys", tree_keys, cache.element_type()),
           CheckType(kName, "new_cache", *new_cache, cache.element_type()),
           CheckInPlace(kName, "cache", cache, *new_cache)});
      e.failure()) {
    return e;
  }
  CompactArgs args;
  args.cache = new_cache->untyped_data();
  args.tree_keys = tree_keys.untyped_data();
  args.path = path.typed_data();
  args.length = length.typed_data();
  args.start = start.typed_data();
  args.layers = static_cast<int>(dims[0]);
  args.batch = static_cast<int>(B);
  args.capacity = static_cast<int>(dims[2]);
  args.nodes = static_cast<int>(tree_keys.dimensions()[2]);
  args.path_len = static_cast<int>(A);
  args.row_bytes = dims[3] * ffi::ByteWidth(cache.element_type());
  return Launched(kName, LaunchCompact(stream, args));
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
