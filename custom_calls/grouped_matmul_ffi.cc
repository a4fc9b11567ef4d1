#include "expert_rows.h"
#include "ffi_support.h"
#include "matmul.h"
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
  MatmulArgs args = {};
  if (auto e = FirstOf({ReadFloat32(kName, "x", x, &args.x_float32),
                        ReadFloat32(kName, "out", *out, &args.out_float32),
                        SetWeights(kName, "w", w, G, K, N, false, &args)});
      e.failure()) {
    return e;
  }
  const int rows_per_chunk = ChunkRows(args, M);
  const int64_t most = MaxChunks(M, G, rows_per_chunk);
  if (auto e = CheckShapes(kName, {{"out", *out, {M, N}},
                                   {"chunks", *chunks, {most, kChunkInts}},
                                   {"num_chunks", *num_chunks, {1}}});
      e.failure()) {
    return e;
  }
  if (args.kind != WeightKind::kInt4) {
    if (auto e = CheckShapes(kName, {{"w", w, {G, K, N}}}); e.failure()) return e;
  }
  args.x = x.untyped_data();
  args.x_row_stride = K;
  args.w_row_stride = N;
  args.w_group_stride = K * N;
  args.out = out->untyped_data();
  args.out_row_stride = N;
  args.rows = static_cast<int>(M);
  args.group_rows = rows_per_chunk;
  args.start = Start::kEarly;
  args.chunks = reinterpret_cast<const RowChunk*>(chunks->typed_data());
  args.num_chunks = num_chunks->typed_data();
  args.max_chunks = static_cast<int>(most);
  if (auto e = CheckMmaSizes(kName, args); e.failure()) return e;

  GroupChunksArgs groups = {};
  groups.group_sizes = group_sizes.typed_data();
  groups.chunks = reinterpret_cast<RowChunk*>(chunks->typed_data());
  groups.num_chunks = num_chunks->typed_data();
  groups.groups = static_cast<int>(G);
  groups.rows = static_cast<int>(M);
  groups.rows_per_chunk = rows_per_chunk;
  groups.out = out->untyped_data();
  groups.out_row_bytes = N * (args.out_float32 ? 4 : 2);
  if (cudaError_t e = LaunchGroupChunks(groups, stream); e != cudaSuccess) {
    return Launched(kName, e);
  }
  return Launched(kName, LaunchMatmul(stream, args));
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
