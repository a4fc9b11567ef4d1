#include "grouped_matmul.h"

#include "ffi_support.h"
#include "matmul_ffi.h"

namespace kdtree_jax {
namespace {

// Rows of x [M, K], sorted by group, times their group's of w [G, K, N] or of its tiles.
ffi::Error GroupedMatmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::BufferR1<ffi::S32> group_sizes,
                         ffi::Result<ffi::AnyBuffer> out,
                         ffi::ResultBufferR2<ffi::S32> chunks,
                         ffi::ResultBufferR1<ffi::S32> num_chunks) {
  constexpr char kName[] = "grouped_matmul";
  if (auto e = CheckShapes(kName, {{"x", x, {kAny, kAny}},
                                   {"group_sizes", group_sizes, {kAny}},
                                   {"out", *out, {kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1];
  const int64_t G = group_sizes.dimensions()[0], N = out->dimensions()[1];
  if (G > kMostGroups) {
    return BadArgument(kName, "w has " + std::to_string(G) + " groups; 8192 are allowed");
  }
  GroupedMatmulArgs args = {};
  MatmulArgs& product = args.product;
  if (auto e = FirstOf({ReadFloat32(kName, "x", x, &product.x_float32),
                        ReadFloat32(kName, "out", *out, &product.out_float32),
                        SetWeights(kName, "w", w, G, K, N, false, &product)});
      e.failure()) {
    return e;
  }
  product.x = x.untyped_data();
  product.out = out->untyped_data();
  product.rows = static_cast<int>(M);
  args.chunks.group_sizes = group_sizes.typed_data();
  args.chunks.chunks = reinterpret_cast<RowChunk*>(chunks->typed_data());
  args.chunks.num_chunks = num_chunks->typed_data();
  Connect(&args);
  if (auto e = CheckShapes(kName, {{"out", *out, {M, N}},
                                   {"chunks", *chunks, {product.max_chunks, kChunkInts}},
                                   {"num_chunks", *num_chunks, {1}}});
      e.failure()) {
    return e;
  }
  if (product.kind != WeightKind::kInt4) {
    if (auto e = CheckShapes(kName, {{"w", w, {G, K, N}}}); e.failure()) return e;
  }
  if (auto e = CheckMmaSizes(kName, product); e.failure()) return e;
  return Launched(kName, LaunchGroupedMatmul(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeGroupedMatmul, GroupedMatmul,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()            // x
                                  .Arg<ffi::AnyBuffer>()            // w
                                  .Arg<ffi::BufferR1<ffi::S32>>()   // group_sizes
                                  .Ret<ffi::AnyBuffer>()            // out
                                  .Ret<ffi::BufferR2<ffi::S32>>()   // chunks
                                  .Ret<ffi::BufferR1<ffi::S32>>(),  // num_chunks
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
