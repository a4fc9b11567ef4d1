#include "routed_experts.h"

#include "ffi_support.h"
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
  bool is_float32 = false, ignored = false;
  if (auto e = FirstOf({ReadFloat32(kName, "x", x, &is_float32),
                        CheckType(kName, "out", *out, x.element_type()),
                        CheckType(kName, "inner", *inner, x.element_type()),
                        CheckType(kName, "outputs", *outputs, x.element_type()),
                        CheckType(kName, "down", down, gate_up.element_type())});
      e.failure()) {
    return e;
  }
  MatmulArgs weight = {};  // For the checks of SetWeights.
  weight.x_float32 = is_float32;
  if (auto e = FirstOf({SetWeights(kName, "gate_up", gate_up, E, D, 2 * F, false, &weight),
                        SetWeights(kName, "down", down, E, F, D, false, &weight)});
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

  RoutedExpertsArgs args = {};
  args.x = x.untyped_data();
  args.experts = experts.typed_data();
  args.weights = weights.typed_data();
  args.gate_up = gate_up.untyped_data();
  args.down = down.untyped_data();
  args.out = out->untyped_data();
  args.tokens = static_cast<int>(T);
  args.slots = static_cast<int>(k);
  args.num_experts = static_cast<int>(E);
  args.width = static_cast<int>(D);
  args.inner_width = static_cast<int>(F);
  args.is_float32 = is_float32;
  args.int4 = int4;
  args.beside = experts_axis;
  args.order = order->typed_data();
  args.chunks = reinterpret_cast<RowChunk*>(chunks->typed_data());
  args.num_chunks = num_chunks->typed_data();
  args.inner = inner->untyped_data();
  args.outputs = outputs->untyped_data();
  const RoutedExpertsSteps steps = StepsOf(args);
  if (auto e = FirstOf(
          {CheckShapes(kName, {{"weights", weights, {T, k}},
                               {"experts", experts, {T, k}},
                               {"out", *out, {T, D}},
                               {"order", *order, {2, pairs}},
                               {"chunks", *chunks, {steps.up.max_chunks, kChunkInts}},
                               {"num_chunks", *num_chunks, {1}},
                               {"inner", *inner, {pairs, F}},
                               {"outputs", *outputs, {pairs, D}}}),
           CheckMmaSizes(kName, steps.up), CheckMmaSizes(kName, steps.down)});
      e.failure()) {
    return e;
  }
  return Launched(kName, LaunchRoutedExperts(stream, args));
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
