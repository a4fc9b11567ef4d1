#include "rope_ffi.h"

namespace kdtree_jax {
namespace {

// x [T, H, 2 pairs] -> out, of the same shape.
ffi::Error Rope(cudaStream_t stream, ffi::AnyBuffer x,
                ffi::BufferR1<ffi::S32> positions, ffi::RemainingArgs tables,
                ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  const auto dims = x.dimensions();
  const auto interleave = attributes.get<int64_t>("interleave");
  if (interleave.has_error()) return interleave.error();
  if (dims.size() != 3 || dims[2] % 2 != 0 || !SameShape(out->dimensions(), dims) ||
      out->element_type() != x.element_type() ||
      positions.dimensions()[0] != dims[0]) {
    return BadArgument("rope", "x must be [T, H, 2 pairs], and positions [T]");
  }
  RopeArgs args = {};
  if (auto e = ReadElement("rope", x.element_type(), &args.bfloat16); e.failure()) {
    return e;
  }
  if (auto e = ReadAngles("rope", tables, attributes, dims[2] / 2, &args.angles);
      e.failure()) {
    return e;
  }
  args.x = x.untyped_data();
  args.positions = positions.typed_data();
  args.out = out->untyped_data();
  args.x_token_stride = dims[1] * dims[2];
  args.x_head_stride = dims[2];
  args.tokens = static_cast<int>(dims[0]);
  args.heads = static_cast<int>(dims[1]);
  args.interleave = *interleave != 0;
  return Launched("rope", LaunchRope(stream, args));
}

// absorbed [B, N, H, R], heads outermost in memory; q [B, N, H, C + P], whose columns
// from `offset` = C on are rotated -> out [B, N, H, R + P].
ffi::Error RopeQueries(cudaStream_t stream, ffi::AnyBuffer absorbed, ffi::AnyBuffer q,
                       ffi::BufferR2<ffi::S32> positions, ffi::RemainingArgs tables,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  constexpr char kName[] = "rope_queries";
  const auto interleave = attributes.get<int64_t>("interleave");
  const auto offset = attributes.get<int64_t>("offset");
  if (interleave.has_error()) return interleave.error();
  if (offset.has_error()) return offset.error();
  const auto copied = absorbed.dimensions();
  const auto dims = q.dimensions();
  const auto rows = out->dimensions();
  if (copied.size() != 4 || dims.size() != 4 || rows.size() != 4) {
    return BadArgument(kName, "absorbed, q and the result must have rank 4");
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (copied[axis] != dims[axis] || rows[axis] != dims[axis]) {
      return BadArgument(kName, "absorbed, q and the result must agree in [B, N, H]");
    }
  }
  const int64_t width = dims[3] - *offset;
  const auto place = positions.dimensions();
  if (*offset < 0 || width < 2 || width % 2 != 0 || rows[3] != copied[3] + width ||
      place[0] != dims[0] || place[1] != dims[1] ||
      absorbed.element_type() != q.element_type() ||
      out->element_type() != q.element_type()) {
    return BadArgument(kName, "widths, dtypes or positions do not fit together");
  }
  RopeArgs args = {};
  if (auto e = ReadElement(kName, q.element_type(), &args.bfloat16); e.failure()) {
    return e;
  }
  if (auto e = ReadAngles(kName, tables, attributes, width / 2, &args.angles);
      e.failure()) {
    return e;
  }
  const int64_t size = args.bfloat16 ? 2 : 4;
  args.x = static_cast<const char*>(q.untyped_data()) + *offset * size;
  args.copied = absorbed.untyped_data();
  args.positions = positions.typed_data();
  args.out = out->untyped_data();
  args.x_token_stride = dims[2] * dims[3];
  args.x_head_stride = dims[3];
  args.copied_token_stride = copied[3];
  args.copied_head_stride = dims[0] * dims[1] * copied[3];
  args.copied_width = static_cast<int>(copied[3]);
  args.tokens = static_cast<int>(dims[0] * dims[1]);
  args.heads = static_cast<int>(dims[2]);
  args.interleave = *interleave != 0;
  return Launched(kName, LaunchRope(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeRope, Rope,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // positions
                                  .RemainingArgs()                 // cos, sin or none
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeRopeQueries, RopeQueries,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // absorbed
                                  .Arg<ffi::AnyBuffer>()           // q
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // positions
                                  .RemainingArgs()                 // cos, sin or none
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
