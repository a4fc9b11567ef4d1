#include "ffi_support.h"
#include "matmul.h"
#include "matmul_ffi.h"

namespace kdtree_jax {
namespace {

ffi::Error Matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Result<ffi::AnyBuffer> out, int64_t by_feature, int64_t gated) {
  constexpr char kName[] = "matmul";
  MatmulArgs args = {};
  bool ignored;
  if (auto e = FirstOf({CheckShapes(kName, {{"x", x, {kAny, kAny}}}),
                        ReadFloat32(kName, "x", x, &ignored)});
      e.failure()) {
    return e;
  }
  if (auto e = SetMatmul(kName, RowsOf("x", x), w, by_feature, gated, *out, &args);
      e.failure()) {
    return e;
  }
  return Launched(kName, LaunchMatmul(stream, args));
}

ffi::Error HeadMatmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                      ffi::Result<ffi::AnyBuffer> out) {
  constexpr char kName[] = "head_matmul";
  MatmulArgs args = {};
  bool ignored;
  if (auto e = FirstOf({CheckShapes(kName, {{"x", x, {kAny, kAny, kAny}},
                                            {"w", w, {kAny, kAny, kAny}}}),
                        ReadFloat32(kName, "x", x, &ignored)});
      e.failure()) {
    return e;
  }
  if (auto e = CheckShapes(kName, {{"x", x, {kAny, w.dimensions()[0], kAny}}});
      e.failure()) {
    return e;
  }
  if (auto e = SetHeadMatmul(kName, RowsOf("x", x), w, *out, &args); e.failure()) {
    return e;
  }
  return Launched(kName, LaunchMatmul(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeMatmul, Matmul,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // w
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attr<int64_t>("by_feature")
                                  .Attr<int64_t>("gated"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeHeadMatmul, HeadMatmul,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()   // x
                                  .Arg<ffi::AnyBuffer>()   // w
                                  .Ret<ffi::AnyBuffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
