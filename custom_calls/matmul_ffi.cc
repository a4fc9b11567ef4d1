#include "ffi_support.h"
#include "matmul.h"
#include "matmul_ffi.h"

namespace kdtree_jax {
namespace {

// x [M, K] @ w [K, N], or w [N, K] `by_feature`; `gated` halves N.
ffi::Error Matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Result<ffi::AnyBuffer> out, int64_t by_feature, int64_t gated) {
  constexpr char kName[] = "matmul";
  if (auto e = CheckShapes(kName, {{"x", x, {kAny, kAny}}, {"w", w, {kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1];
  const int64_t N = w.dimensions()[by_feature ? 0 : 1];
  if (gated && N % 2 != 0) {
    return BadArgument(kName, "w has an odd number of features; gate and up have equal");
  }
  MatmulArgs args = {};
  if (auto e = FirstOf({CheckShapes(kName, {{"w", w, {by_feature ? N : K,
                                                      by_feature ? K : N}},
                                            {"out", *out, {M, gated ? N / 2 : N}}}),
                        ReadFloat32(kName, "x", x, &args.x_float32),
                        ReadFloat32(kName, "out", *out, &args.out_float32),
                        SetWeights(kName, "w", w, 1, K, N, by_feature, &args)});
      e.failure()) {
    return e;
  }
  args.x = x.untyped_data();
  args.x_row_stride = K;
  args.w_row_stride = by_feature ? K : N;
  args.w_group_stride = K * N;
  args.out = out->untyped_data();
  args.out_row_stride = gated ? N / 2 : N;
  args.rows = args.group_rows = static_cast<int>(M);
  args.gated = gated;
  if (auto e = CheckMmaSizes(kName, args); e.failure()) return e;
  return Launched(kName, LaunchMatmul(stream, args));
}

// out[t, h] = x[t, h, :K] @ w[h], for w [H, K, N].
ffi::Error HeadMatmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                      ffi::Result<ffi::AnyBuffer> out) {
  constexpr char kName[] = "head_matmul";
  if (auto e = CheckShapes(
          kName, {{"x", x, {kAny, kAny, kAny}}, {"w", w, {kAny, kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const int64_t T = x.dimensions()[0], H = x.dimensions()[1], X = x.dimensions()[2];
  const int64_t K = w.dimensions()[1], N = w.dimensions()[2];
  if (X < K) {
    return BadArgument(kName, "x has " + std::to_string(X) + " columns; w needs " +
                                  std::to_string(K));
  }
  MatmulArgs args = {};
  if (auto e = FirstOf({CheckShapes(kName, {{"w", w, {H, K, N}}, {"out", *out, {T, H, N}}}),
                        ReadFloat32(kName, "x", x, &args.x_float32),
                        ReadFloat32(kName, "out", *out, &args.out_float32),
                        SetWeights(kName, "w", w, H, K, N, false, &args)});
      e.failure()) {
    return e;
  }
  args.x = x.untyped_data();
  args.x_row_stride = H * X;
  args.x_group_stride = X;
  args.w_row_stride = N;
  args.w_group_stride = K * N;
  args.out = out->untyped_data();
  args.out_row_stride = H * N;
  args.out_group_stride = N;
  args.rows = args.group_rows = static_cast<int>(T);
  if (auto e = CheckMmaSizes(kName, args); e.failure()) return e;
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
