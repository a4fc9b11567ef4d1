// How handlers read where their angles come from.

#ifndef KDTREE_JAX_ROPE_FFI_H_
#define KDTREE_JAX_ROPE_FFI_H_

#include <algorithm>
#include <string>

#include "ffi_support.h"
#include "rope.h"

namespace kdtree_jax {

template <typename T>
ffi::Error ReadAttribute(const char* kernel, ffi::Dictionary attributes,
                         const char* name, T* value) {
  const auto found = attributes.get<T>(name);
  if (found.has_error()) {
    return BadArgument(kernel, std::string(name) + ": " + found.error().message());
  }
  *value = *found;
  return ffi::Error::Success();
}

// Operands `tables` are (cos, sin), both f32 [length, pairs], or none. Without them the
// attributes give the frequencies (float64 [pairs]), amplitude, float32_angles and
// length, beside the `own` ones of the handler.
inline ffi::Error ReadAngles(const char* kernel, ffi::RemainingArgs tables,
                             ffi::Dictionary attributes, size_t own, int64_t pairs,
                             RopeAngles* angles) {
  if (pairs < 1 || pairs > kRopeMaxPairs) {
    return BadArgument(kernel, "there are " + std::to_string(pairs) +
                                   " pairs of features; 1 .. 128 are allowed");
  }
  *angles = {};
  angles->pairs = static_cast<int>(pairs);
  if (tables.size() != 0 && tables.size() != 2) {
    return BadArgument(kernel, "cos and sin come together and last");
  }
  const size_t wanted = own + (tables.size() == 0 ? 4 : 0);
  if (attributes.size() != wanted) {
    return BadArgument(kernel, std::to_string(attributes.size()) +
                                   " attributes were given; there must be " +
                                   std::to_string(wanted));
  }
  if (tables.size() == 2) {
    const auto cos = tables.get<ffi::AnyBuffer>(0);
    const auto sin = tables.get<ffi::AnyBuffer>(1);
    if (cos.has_error()) return cos.error();
    if (sin.has_error()) return sin.error();
    if (auto e = FirstOf({CheckShapes(kernel, {{"cos", *cos, {kAny, pairs}}}),
                          CheckShapes(kernel, {{"sin", *sin, cos->dimensions()}}),
                          CheckType(kernel, "cos", *cos, ffi::F32),
                          CheckType(kernel, "sin", *sin, ffi::F32)});
        e.failure()) {
      return e;
    }
    const int64_t rows = cos->dimensions()[0];
    if (rows < 1) return BadArgument(kernel, "cos has no row; it must have 1 or more");
    angles->cos = cos->typed_data<float>();
    angles->sin = sin->typed_data<float>();
    angles->length = static_cast<int>(rows);
    return ffi::Error::Success();
  }
  ffi::Span<const double> frequencies;
  int64_t float32_angles, length;
  if (auto e = FirstOf(
          {ReadAttribute(kernel, attributes, "frequencies", &frequencies),
           ReadAttribute(kernel, attributes, "amplitude", &angles->amplitude),
           ReadAttribute(kernel, attributes, "float32_angles", &float32_angles),
           ReadAttribute(kernel, attributes, "length", &length)});
      e.failure()) {
    return e;
  }
  if (static_cast<int64_t>(frequencies.size()) != pairs) {
    return BadArgument(kernel, "frequencies has " + std::to_string(frequencies.size()) +
                                   " values; it must have one for each of the " +
                                   std::to_string(pairs) + " pairs");
  }
  if (length < 1 || length > INT32_MAX) {
    return BadArgument(kernel, "length " + std::to_string(length) +
                                   " is not allowed: it must be 1 .. 2^31 - 1");
  }
  std::copy(frequencies.begin(), frequencies.end(), angles->frequencies);
  angles->float32_angles = float32_angles != 0;
  angles->length = static_cast<int>(length);
  return ffi::Error::Success();
}

// The kernels count rows in ints.
inline ffi::Error CheckRows(const char* kernel, const char* name, int64_t rows) {
  if (rows <= INT32_MAX) return ffi::Error::Success();
  return BadArgument(kernel, std::string(name) + " has more than 2^31 - 1 rows");
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROPE_FFI_H_
