#include "rope_keys.h"

#include "rope_ffi.h"

namespace kdtree_jax {
namespace {

// kv [B, N, R + P], weight [R] -> out [B, N, R + P].
ffi::Error RopeKeys(cudaStream_t stream, ffi::AnyBuffer kv, ffi::AnyBuffer weight,
                    ffi::BufferR2<ffi::S32> positions, ffi::RemainingArgs tables,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  constexpr char kName[] = "rope_keys";
  const auto interleave = attributes.get<int64_t>("interleave");
  const auto eps = attributes.get<double>("eps");
  if (interleave.has_error()) return interleave.error();
  if (eps.has_error()) return eps.error();
  const auto dims = kv.dimensions();
  if (dims.size() != 3 || weight.dimensions().size() != 1 ||
      !SameShape(out->dimensions(), dims)) {
    return BadArgument(kName, "kv must be [B, N, R + P], and weight [R]");
  }
  const int64_t latent = weight.dimensions()[0];
  const int64_t width = dims[2] - latent;
  const auto place = positions.dimensions();
  if (latent < 1 || width < 2 || width % 2 != 0 || place[0] != dims[0] ||
      place[1] != dims[1] || weight.element_type() != kv.element_type() ||
      out->element_type() != kv.element_type()) {
    return BadArgument(kName, "widths, dtypes or positions do not fit together");
  }
  RopeKeysArgs args = {};
  if (auto e = ReadElement(kName, kv.element_type(), &args.bfloat16); e.failure()) {
    return e;
  }
  if (auto e = ReadAngles(kName, tables, attributes, width / 2, &args.angles);
      e.failure()) {
    return e;
  }
  args.kv = kv.untyped_data();
  args.weight = weight.untyped_data();
  args.positions = positions.typed_data();
  args.out = out->untyped_data();
  args.tokens = static_cast<int>(dims[0] * dims[1]);
  args.latent_width = static_cast<int>(latent);
  args.eps = static_cast<float>(*eps);
  args.interleave = *interleave != 0;
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
