// How handlers read where their angles come from.

#ifndef KDTREE_JAX_ROPE_FFI_H_
#define KDTREE_JAX_ROPE_FFI_H_

#include <algorithm>

#include "ffi_support.h"
#include "rope.h"

namespace kdtree_jax {

inline bool SameShape(ffi::AnyBuffer::Dimensions a, ffi::AnyBuffer::Dimensions b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Operands `tables` are (cos, sin), both f32 [length, pairs], or none. Without them the
// attributes give the frequencies (float64 [pairs]), amplitude, float32_angles and
// length.
inline ffi::Error ReadAngles(const char* kernel, ffi::RemainingArgs tables,
                             ffi::Dictionary attributes, int64_t pairs,
                             RopeAngles* angles) {
  if (pairs < 1 || pairs > kRopeMaxPairs) {
    return BadArgument(kernel, "there must be 1 to 128 pairs of features");
  }
  *angles = {};
  angles->pairs = static_cast<int>(pairs);
  if (tables.size() == 2) {
    const auto cos = tables.get<ffi::BufferR2<ffi::F32>>(0);
    const auto sin = tables.get<ffi::BufferR2<ffi::F32>>(1);
    if (cos.has_error()) return cos.error();
    if (sin.has_error()) return sin.error();
    const auto dims = cos->dimensions();
    if (!SameShape(dims, sin->dimensions()) || dims[0] < 1 || dims[1] != pairs) {
      return BadArgument(kernel, "cos and sin must be [length, pairs]");
    }
    angles->cos = cos->typed_data();
    angles->sin = sin->typed_data();
    angles->length = static_cast<int>(dims[0]);
    return ffi::Error::Success();
  }
  if (tables.size() != 0) return BadArgument(kernel, "cos and sin come together");
  const auto frequencies = attributes.get<ffi::Span<const double>>("frequencies");
  const auto amplitude = attributes.get<double>("amplitude");
  const auto float32_angles = attributes.get<int64_t>("float32_angles");
  const auto length = attributes.get<int64_t>("length");
  if (frequencies.has_error()) return frequencies.error();
  if (amplitude.has_error()) return amplitude.error();
  if (float32_angles.has_error()) return float32_angles.error();
  if (length.has_error()) return length.error();
  if (static_cast<int64_t>(frequencies->size()) != pairs || *length < 1) {
    return BadArgument(kernel, "needs one frequency per pair and a positive length");
  }
  std::copy(frequencies->begin(), frequencies->end(), angles->frequencies);
  angles->amplitude = *amplitude;
  angles->float32_angles = *float32_angles != 0;
  angles->length = static_cast<int>(*length);
  return ffi::Error::Success();
}

// Whether rows hold bf16; otherwise they must hold f32.
inline ffi::Error ReadElement(const char* kernel, ffi::DataType dtype, bool* bfloat16) {
  *bfloat16 = dtype == ffi::BF16;
  if (dtype != ffi::BF16 && dtype != ffi::F32) {
    return BadArgument(kernel, "the features must be f32 or bf16");
  }
  return ffi::Error::Success();
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROPE_FFI_H_
