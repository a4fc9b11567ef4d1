#include "rope_keys.h"

#include "rope_ffi.h"

namespace kdtree_jax {
namespace {

// kv [B, N, R + P], weight [R] -> out [B, N, R + P].
ffi::Error RopeKeys(cudaStream_t stream, ffi::AnyBuffer kv, ffi::AnyBuffer weight,
                    ffi::BufferR2<ffi::S32> positions, ffi::RemainingArgs tables,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  constexpr char kName[] = "rope_keys";
  int64_t interleave;
  double eps;
  if (auto e = FirstOf(
          {CheckShapes(kName,
                       {{"kv", kv, {kAny, kAny, kAny}}, {"weight", weight, {kAny}}}),
           ReadAttribute(kName, attributes, "interleave", &interleave),
           ReadAttribute(kName, attributes, "eps", &eps)});
      e.failure()) {
    return e;
  }
  const auto dims = kv.dimensions();
  const int64_t latent = weight.dimensions()[0];
  const int64_t width = dims[2] - latent;
  if (latent < 1 || width < 2 || width % 2 != 0) {
    return BadArgument(kName, "weight has " + std::to_string(latent) +
                                  " features and kv " + std::to_string(dims[2]) +
                                  ": what is left are no pairs");
  }
  RopeKeysArgs args = {};
  if (auto e = FirstOf(
          {CheckShapes(kName, {{"positions", positions, {dims[0], dims[1]}},
                               {"out", *out, dims}}),
           ReadElement(kName, "kv", kv.element_type(), &args.bfloat16),
           CheckType(kName, "weight", weight, kv.element_type()),
           CheckType(kName, "out", *out, kv.element_type()),
           CheckRows(kName, "kv", dims[0] * dims[1]),
           ReadAngles(kName, tables, attributes, 2, width / 2, &args.angles)});
      e.failure()) {
    return e;
  }
  args.kv = kv.untyped_data();
  args.weight = weight.untyped_data();
  args.positions = positions.typed_data();
  args.out = out->untyped_data();
  args.tokens = static_cast<int>(dims[0] * dims[1]);
  args.latent_width = static_cast<int>(latent);
  args.eps = static_cast<float>(eps);
  args.interleave = interleave != 0;
  return Launched(kName, LaunchRopeKeys(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeRopeKeys, RopeKeys,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // kv
                                  .Arg<ffi::AnyBuffer>()           // weight
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // positions
                                  .RemainingArgs()                 // cos, sin or none
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
