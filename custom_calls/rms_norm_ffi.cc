#include "rms_norm.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

// Rows [rows, D] of `x` and a weight [D] of the same dtype.
ffi::Error SetRows(const char* kernel, const char* name, ffi::AnyBuffer x,
                   ffi::AnyBuffer weight, double eps, RmsNormArgs* args) {
  if (auto e = CheckShapes(kernel, {{name, x, {kAny, kAny}}}); e.failure()) return e;
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  if (width < 1 || width > kRmsNormMaxWidth) {
    return BadArgument(kernel, std::string(name) + " has " + std::to_string(width) +
                                   " features; 1 .. 2^30 are allowed");
  }
  if (auto e = FirstOf({CheckShapes(kernel, {{"weight", weight, {width}}}),
                        ReadElement(kernel, name, x.element_type(), &args->bfloat16),
                        CheckType(kernel, "weight", weight, x.element_type())});
      e.failure()) {
    return e;
  }
  args->x = x.untyped_data();
  args->weight = weight.untyped_data();
  args->rows = static_cast<int>(rows);
  args->width = static_cast<int>(width);
  args->eps = static_cast<float>(eps);
  return ffi::Error::Success();
}

// Another array of the shape and dtype of `x`.
template <typename Buffer>
ffi::Error CheckLike(const char* kernel, const char* name, const Buffer& buffer,
                     ffi::AnyBuffer x) {
  return FirstOf({CheckShapes(kernel, {{name, buffer, x.dimensions()}}),
                  CheckType(kernel, name, buffer, x.element_type())});
}

ffi::Error RmsNorm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                   ffi::Result<ffi::AnyBuffer> out, double eps) {
  constexpr char kName[] = "rms_norm";
  RmsNormArgs args = {};
  if (auto e = FirstOf({SetRows(kName, "x", x, weight, eps, &args),
                        CheckLike(kName, "out", *out, x)});
      e.failure()) {
    return e;
  }
  args.out = out->untyped_data();
  return Launched(kName, LaunchRmsNorm(stream, args));
}

ffi::Error AddRmsNorm(cudaStream_t stream, ffi::AnyBuffer h, ffi::AnyBuffer out,
                      ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> sum,
                      ffi::Result<ffi::AnyBuffer> normed, double eps) {
  constexpr char kName[] = "add_rms_norm";
  RmsNormArgs args = {};
  if (auto e = FirstOf({SetRows(kName, "h", h, weight, eps, &args),
                        CheckLike(kName, "out", out, h),
                        CheckLike(kName, "sum", *sum, h),
                        CheckLike(kName, "normed", *normed, h)});
      e.failure()) {
    return e;
  }
  args.added = out.untyped_data();
  args.sum = sum->untyped_data();
  args.out = normed->untyped_data();
  return Launched(kName, LaunchRmsNorm(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeRmsNorm, RmsNorm,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // weight
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attr<double>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeAddRmsNorm, AddRmsNorm,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()  // h
                                  .Arg<ffi::AnyBuffer>()  // out
                                  .Arg<ffi::AnyBuffer>()  // weight
                                  .Ret<ffi::AnyBuffer>()  // sum
                                  .Ret<ffi::AnyBuffer>()  // normed
                                  .Attr<double>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
