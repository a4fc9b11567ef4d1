#include "combine_experts.h"
#include "expert_rows.h"
#include "ffi_support.h"
#include "matmul.h"
#include "matmul_ffi.h"

namespace kdtree_jax {
namespace {

// Tokens x [T, D] through their k experts: gate_up, SwiGLU, down, weighted sum. gate_up is
// [E, D, 2F], [D, E, 2F] with `experts_axis` 1, or gated tiles; down [E, F, D] or tiles.
ffi::Error RoutedExperts(cudaStream_t stream, ffi::AnyBuffer x,
                         ffi::BufferR2<ffi::S32> experts, ffi::BufferR2<ffi::F32> weights,
                         ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                         ffi::Result<ffi::AnyBuffer> out,
                         ffi::ResultBufferR2<ffi::S32> order,
                         ffi::ResultBufferR2<ffi::S32> chunks,
                         ffi::ResultBufferR1<ffi::S32> num_chunks,
                         ffi::Result<ffi::AnyBuffer> inner,
                         ffi::Result<ffi::AnyBuffer> outputs, int64_t experts_axis) {
  constexpr char kName[] = "routed_experts";
  if (auto e = CheckShapes(kName, {{"x", x, {kAny, kAny}},
                                   {"experts", experts, {kAny, kAny}},
                                   {"inner", *inner, {kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const int64_t T = x.dimensions()[0], D = x.dimensions()[1];
  const int64_t k = experts.dimensions()[1], F = inner->dimensions()[1], pairs = T * k;
  if (gate_up.dimensions().size() < 3) {
    return BadArgument(kName, "gate_up must have three axes, or four in int4");
  }
  const bool int4 = gate_up.element_type() == ffi::U8;
  const int64_t E = gate_up.dimensions()[!int4 && experts_axis ? 1 : 0];
  if (E > kMostGroups || k < 1) {
    return BadArgument(kName, "there are " + std::to_string(E) + " experts and " +
                                  std::to_string(k) +
                                  " slots; 8192, and 1 or more, are allowed");
  }
  MatmulArgs up = {};
  bool is_float32 = false, ignored = false;
  if (auto e = FirstOf({ReadFloat32(kName, "x", x, &is_float32),
                        CheckType(kName, "out", *out, x.element_type()),
                        CheckType(kName, "inner", *inner, x.element_type()),
                        CheckType(kName, "outputs", *outputs, x.element_type()),
                        CheckType(kName, "down", down, gate_up.element_type())});
      e.failure()) {
    return e;
  }
  up.x_float32 = up.out_float32 = is_float32;
  MatmulArgs back = up;
  if (auto e = FirstOf({SetWeights(kName, "gate_up", gate_up, E, D, 2 * F, false, &up),
                        SetWeights(kName, "down", down, E, F, D, false, &back)});
      e.failure()) {
    return e;
  }
  if (!int4) {
    if (auto e = FirstOf(
            {experts_axis
                 ? CheckShapes(kName, {{"gate_up", gate_up, {D, E, 2 * F}}})
                 : CheckShapes(kName, {{"gate_up", gate_up, {E, D, 2 * F}}}),
             CheckShapes(kName, {{"down", down, {E, F, D}}}),
             ReadFloat32(kName, "down", down, &ignored)});
        e.failure()) {
      return e;
    }
    if (ignored != is_float32) {
      return BadArgument(kName, "gate_up and down must be int4 or have the dtype of x");
    }
  }
  const int rows_per_chunk = ChunkRows(up, T);
  const int64_t most = MaxChunks(pairs, E, rows_per_chunk);
  if (auto e = CheckShapes(kName, {{"weights", weights, {T, k}},
                                   {"experts", experts, {T, k}},
                                   {"out", *out, {T, D}},
                                   {"order", *order, {2, pairs}},
                                   {"chunks", *chunks, {most, kChunkInts}},
                                   {"num_chunks", *num_chunks, {1}},
                                   {"inner", *inner, {pairs, F}},
                                   {"outputs", *outputs, {pairs, D}}});
      e.failure()) {
    return e;
  }

  ExpertRowsArgs rows = {};
  rows.experts = experts.typed_data();
  rows.order = order->typed_data();
  rows.tokens = order->typed_data() + pairs;
  rows.chunks = reinterpret_cast<RowChunk*>(chunks->typed_data());
  rows.num_chunks = num_chunks->typed_data();
  rows.pairs = static_cast<int>(pairs);
  rows.slots = static_cast<int>(k);
  rows.num_experts = static_cast<int>(E);
  rows.rows_per_chunk = rows_per_chunk;

  for (MatmulArgs* args : {&up, &back}) {
    args->rows = static_cast<int>(pairs);
    // An expert that a token names twice may have more rows than there are tokens, but
    // no chunk of it has.
    args->group_rows = rows_per_chunk;
    args->chunks = rows.chunks;
    args->num_chunks = rows.num_chunks;
    args->max_chunks = static_cast<int>(most);
  }
  up.x = x.untyped_data();
  up.x_row_stride = D;
  up.x_rows = rows.tokens;
  up.w_row_stride = experts_axis ? E * 2 * F : 2 * F;
  up.w_group_stride = experts_axis ? 2 * F : D * 2 * F;
  up.gated = true;
  up.out = inner->untyped_data();
  up.out_row_stride = F;
  up.start = Start::kEarly;
  back.x = inner->untyped_data();
  back.x_row_stride = F;
  back.w_row_stride = D;
  back.w_group_stride = F * D;
  back.out = outputs->untyped_data();
  back.out_row_stride = D;
  back.out_rows = rows.order;
  back.start = Start::kWeights;
  if (auto e = FirstOf({CheckMmaSizes(kName, up), CheckMmaSizes(kName, back)});
      e.failure()) {
    return e;
  }

  CombineExpertsArgs sum = {};
  sum.y = outputs->untyped_data();
  sum.weights = weights.typed_data();
  sum.experts = experts.typed_data();
  sum.out = out->untyped_data();
  sum.tokens = static_cast<int>(T);
  sum.slots = static_cast<int>(k);
  sum.width = static_cast<int>(D);
  sum.num_experts = static_cast<int>(E);
  sum.is_float32 = is_float32;
  sum.early = true;

  cudaError_t status = LaunchExpertRows(rows, stream);
  if (status == cudaSuccess) status = LaunchMatmul(stream, up);
  if (status == cudaSuccess) status = LaunchMatmul(stream, back);
  if (status == cudaSuccess) status = LaunchCombineExperts(sum, stream);
  return Launched(kName, status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeRoutedExperts, RoutedExperts,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // experts
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // weights
                                  .Arg<ffi::AnyBuffer>()           // gate_up
                                  .Arg<ffi::AnyBuffer>()           // down
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // order, tokens
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // chunks
                                  .Ret<ffi::BufferR1<ffi::S32>>()  // num_chunks
                                  .Ret<ffi::AnyBuffer>()           // inner
                                  .Ret<ffi::AnyBuffer>()           // outputs
                                  .Attr<int64_t>("experts_axis"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
