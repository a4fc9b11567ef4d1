// What the handlers of matrix products share: weights and dtypes as MatmulArgs has them.

#ifndef KDTREE_JAX_MATMUL_FFI_H_
#define KDTREE_JAX_MATMUL_FFI_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "ffi_support.h"
#include "matmul.h"

namespace kdtree_jax {

// Of a chunk in a list, which is an array of int32.
constexpr int64_t kChunkInts = sizeof(RowChunk) / sizeof(int32_t);

// Reads the dtype of rows or results: bf16 or float32.
template <typename Buffer>
ffi::Error ReadFloat32(const char* kernel, const char* name, const Buffer& buffer,
                       bool* is_float32) {
  *is_float32 = buffer.element_type() == ffi::F32;
  if (*is_float32) return ffi::Error::Success();
  return CheckType(kernel, name, buffer, ffi::BF16);
}

// Sets the kind, the pointer and the strides of weights [groups, depth, features] for
// rows that are float32 or not. `by_feature` is [groups, features, depth]. Tiles of int4
// are u8 [groups, features / 16, depth / 64, 576], both rounded up.
inline ffi::Error SetWeights(const char* kernel, const char* name,
                             const ffi::AnyBuffer& w, int64_t groups, int64_t depth,
                             int64_t features, bool by_feature, MatmulArgs* args) {
  args->w = w.untyped_data();
  args->w_by_feature = by_feature;
  args->groups = static_cast<int>(groups);
  args->depth = static_cast<int>(depth);
  args->features = static_cast<int>(features);
  if (w.element_type() == ffi::U8) {
    args->kind = WeightKind::kInt4;
    if (depth % kInt4GroupSize != 0) {
      return BadArgument(kernel, std::string(name) + " has depth " +
                                     std::to_string(depth) +
                                     "; int4 needs a multiple of 32");
    }
    const int64_t rows = (features + kInt4TileRows - 1) / kInt4TileRows;
    const int64_t slabs = (depth + kInt4TileDepth - 1) / kInt4TileDepth;
    return CheckShapes(kernel, {{name, w, {groups, rows, slabs, kInt4TileBytes}}});
  }
  bool is_float32 = false;
  if (auto e = ReadFloat32(kernel, name, w, &is_float32); e.failure()) return e;
  args->kind = is_float32 ? WeightKind::kFloat32 : WeightKind::kBf16;
  if (args->x_float32 && !is_float32) {
    return BadArgument(kernel, std::string(name) +
                                   " is bfloat16; with float32 rows it must be float32");
  }
  return ffi::Error::Success();
}

// Rows that a product reads, however many axes they have: [rows, width] in memory.
struct RowsOperand {
  const char* name;
  const void* data;
  ffi::DataType type;
  int64_t rows, width;
};

template <typename Buffer>
RowsOperand RowsOf(const char* name, const Buffer& buffer) {
  const auto dims = buffer.dimensions();
  int64_t width = 1;
  for (size_t i = 1; i < dims.size(); ++i) width *= dims[i];
  return {name, buffer.untyped_data(), buffer.element_type(), dims[0], width};
}

// What the tensor cores' kernel wants of sizes, in bf16.
inline ffi::Error CheckMmaSizes(const char* kernel, const MatmulArgs& args) {
  if (IsSimt(args) || HasMmaSizes(args)) return ffi::Error::Success();
  return BadArgument(kernel,
                     "x and its weights in bfloat16 must have a depth that is a multiple "
                     "of 16; widths of rows, weights, gate and up multiples of 8");
}

// x [M, K] @ w [K, N], or w [N, K] `by_feature` -> out [M, N]; `gated` halves N.
template <typename Buffer>
ffi::Error SetMatmul(const char* kernel, const RowsOperand& x, const ffi::AnyBuffer& w,
                     bool by_feature, bool gated, Buffer& out, MatmulArgs* args) {
  if (auto e = CheckShapes(kernel, {{"w", w, {kAny, kAny}}}); e.failure()) return e;
  const int64_t M = x.rows, K = x.width, N = w.dimensions()[by_feature ? 0 : 1];
  if (gated && N % 2 != 0) {
    return BadArgument(kernel, "w has an odd number of features; gate and up have equal");
  }
  args->x_float32 = x.type == ffi::F32;
  if (auto e = FirstOf({CheckShapes(kernel, {{"w", w, {by_feature ? N : K,
                                                       by_feature ? K : N}},
                                             {"out", out, {M, gated ? N / 2 : N}}}),
                        ReadFloat32(kernel, "out", out, &args->out_float32),
                        SetWeights(kernel, "w", w, 1, K, N, by_feature, args)});
      e.failure()) {
    return e;
  }
  args->x = x.data;
  args->x_row_stride = K;
  args->w_row_stride = by_feature ? K : N;
  args->w_group_stride = K * N;
  args->out = out.untyped_data();
  args->out_row_stride = gated ? N / 2 : N;
  args->rows = args->group_rows = static_cast<int>(M);
  args->gated = gated;
  return CheckMmaSizes(kernel, *args);
}

// out[t, h] = x[t, h, :K] @ w[h], for w [H, K, N] and x [T, H, X].
template <typename Buffer>
ffi::Error SetHeadMatmul(const char* kernel, const RowsOperand& x,
                         const ffi::AnyBuffer& w, Buffer& out, MatmulArgs* args) {
  if (auto e = CheckShapes(kernel, {{"w", w, {kAny, kAny, kAny}}}); e.failure()) return e;
  const int64_t T = x.rows, H = w.dimensions()[0], K = w.dimensions()[1];
  const int64_t N = w.dimensions()[2], X = H > 0 ? x.width / H : 0;
  if (X * H != x.width || X < K) {
    return BadArgument(kernel, std::string(x.name) + " has " + std::to_string(X) +
                                   " columns; w needs " + std::to_string(K));
  }
  args->x_float32 = x.type == ffi::F32;
  if (auto e = FirstOf({CheckShapes(kernel, {{"out", out, {T, H, N}}}),
                        ReadFloat32(kernel, "out", out, &args->out_float32),
                        SetWeights(kernel, "w", w, H, K, N, false, args)});
      e.failure()) {
    return e;
  }
  args->x = x.data;
  args->x_row_stride = H * X;
  args->x_group_stride = X;
  args->w_row_stride = N;
  args->w_group_stride = K * N;
  args->out = out.untyped_data();
  args->out_row_stride = H * N;
  args->out_group_stride = N;
  args->rows = args->group_rows = static_cast<int>(T);
  return CheckMmaSizes(kernel, *args);
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_MATMUL_FFI_H_
