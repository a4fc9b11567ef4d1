#include "rope_ffi.h"

namespace kdtree_jax {
namespace {

// x [T, H, 2 pairs] -> out, of the same shape.
ffi::Error Rope(cudaStream_t stream, ffi::AnyBuffer x,
                ffi::BufferR1<ffi::S32> positions, ffi::RemainingArgs tables,
                ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  constexpr char kName[] = "rope";
  int64_t interleave;
  if (auto e = FirstOf({CheckShapes(kName, {{"x", x, {kAny, kAny, kAny}}}),
                        ReadAttribute(kName, attributes, "interleave", &interleave)});
      e.failure()) {
    return e;
  }
  const auto dims = x.dimensions();
  if (dims[2] % 2 != 0) return BadArgument(kName, "x must have pairs of features");
  RopeArgs args = {};
  if (auto e = FirstOf(
          {CheckShapes(kName,
                       {{"positions", positions, {dims[0]}}, {"out", *out, dims}}),
           ReadElement(kName, "x", x.element_type(), &args.bfloat16),
           CheckType(kName, "out", *out, x.element_type()),
           ReadAngles(kName, tables, attributes, 1, dims[2] / 2, &args.angles)});
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
  args.interleave = interleave != 0;
  return Launched(kName, LaunchRope(stream, args));
}

// absorbed [B, N, H, R]; q [B, N, H, C + P], whose columns from `offset` = C on are
// rotated -> out [B, N, H, R + P].
ffi::Error RopeQueries(cudaStream_t stream, ffi::AnyBuffer absorbed, ffi::AnyBuffer q,
                       ffi::BufferR2<ffi::S32> positions, ffi::RemainingArgs tables,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  constexpr char kName[] = "rope_queries";
  int64_t interleave, offset;
  if (auto e = FirstOf({CheckShapes(kName, {{"q", q, {kAny, kAny, kAny, kAny}}}),
                        ReadAttribute(kName, attributes, "interleave", &interleave),
                        ReadAttribute(kName, attributes, "offset", &offset)});
      e.failure()) {
    return e;
  }
  const auto dims = q.dimensions();
  if (offset < 0 || offset >= dims[3] || (dims[3] - offset) % 2 != 0) {
    return BadArgument(kName, "offset " + std::to_string(offset) + " with q " +
                                  std::to_string(dims[3]) +
                                  " wide leaves no pairs of features");
  }
  const int64_t width = dims[3] - offset;
  if (auto e = CheckShapes(kName, {{"absorbed", absorbed,
                                    {dims[0], dims[1], dims[2], kAny}},
                                   {"positions", positions, {dims[0], dims[1]}}});
      e.failure()) {
    return e;
  }
  const auto copied = absorbed.dimensions();
  RopeArgs args = {};
  if (auto e = FirstOf(
          {CheckShapes(kName, {{"out", *out,
                                {dims[0], dims[1], dims[2], copied[3] + width}}}),
           ReadElement(kName, "q", q.element_type(), &args.bfloat16),
           CheckType(kName, "absorbed", absorbed, q.element_type()),
           CheckType(kName, "out", *out, q.element_type()),
           CheckRows(kName, "q", dims[0] * dims[1]),
           ReadAngles(kName, tables, attributes, 2, width / 2, &args.angles)});
      e.failure()) {
    return e;
  }
  const int64_t size = args.bfloat16 ? 2 : 4;
  args.x = static_cast<const char*>(q.untyped_data()) + offset * size;
  args.copied = absorbed.untyped_data();
  args.positions = positions.typed_data();
  args.out = out->untyped_data();
  args.x_token_stride = dims[2] * dims[3];
  args.x_head_stride = dims[3];
  args.copied_token_stride = dims[2] * copied[3];
  args.copied_head_stride = copied[3];
  args.copied_width = static_cast<int>(copied[3]);
  args.tokens = static_cast<int>(dims[0] * dims[1]);
  args.heads = static_cast<int>(dims[2]);
  args.interleave = interleave != 0;
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
