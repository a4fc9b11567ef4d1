// What every handler shares: error values that name the kernel and what to do, and the
// checks of operands.

#ifndef KDTREE_JAX_FFI_SUPPORT_H_
#define KDTREE_JAX_FFI_SUPPORT_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace kdtree_jax {

namespace ffi = xla::ffi;

// The stream argument that every handler binds first.
inline auto Bind() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>();
}

// Turns the result of a launcher into what XLA reports.
inline ffi::Error Launched(const char* kernel, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  std::string message = std::string("kdtree_jax.") + kernel + ": " +
                        cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) {
    message +=
        "; the library of custom calls has no code for this GPU. Rebuild with "
        "CMAKE_CUDA_ARCHITECTURES set to its architecture, or use "
        "implementation=\"xla\"";
  }
  return ffi::Error::Internal(message);
}

inline ffi::Error BadArgument(const char* kernel, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string("kdtree_jax.") + kernel + ": " + what);
}

using Shape = ffi::AnyBuffer::Dimensions;

// In a wanted shape: any size.
constexpr int64_t kAny = -1;

// An operand or a result: its name, its shape, and the shape that it must have.
class Operand {
 public:
  template <typename Buffer>
  Operand(const char* name, const Buffer& buffer, std::initializer_list<int64_t> wanted)
      : name_(name), shape_(buffer.dimensions()), rank_(wanted.size()) {
    std::copy(wanted.begin(), wanted.end(), wanted_);
  }

  template <typename Buffer>
  Operand(const char* name, const Buffer& buffer, Shape wanted)
      : name_(name), shape_(buffer.dimensions()), rank_(wanted.size()) {
    if (rank_ <= kMaxRank) std::copy(wanted.begin(), wanted.end(), wanted_);
  }

  // Sizes are held as ints from here on, so no larger ones fit either.
  bool Fits() const {
    if (shape_.size() != rank_ || rank_ > kMaxRank) return false;
    for (size_t i = 0; i < rank_; ++i) {
      if (shape_[i] > INT32_MAX) return false;
      if (wanted_[i] != kAny && shape_[i] != wanted_[i]) return false;
    }
    return true;
  }

  std::string WhatIsWrong() const {
    std::ostringstream text;
    text << name_ << " has shape " << Text(shape_.begin(), shape_.size())
         << "; it must be " << Text(wanted_, std::min(rank_, kMaxRank));
    return text.str();
  }

 private:
  static constexpr size_t kMaxRank = 4;

  static std::string Text(const int64_t* sizes, size_t rank) {
    std::string text = "[";
    for (size_t i = 0; i < rank; ++i) {
      if (i > 0) text += ", ";
      text += sizes[i] == kAny ? "any" : std::to_string(sizes[i]);
    }
    return text + "]";
  }

  const char* name_;
  Shape shape_;
  size_t rank_;
  int64_t wanted_[kMaxRank] = {};
};

// An error that names the first operand whose shape is wrong.
inline ffi::Error CheckShapes(const char* kernel,
                              std::initializer_list<Operand> operands) {
  for (const Operand& operand : operands) {
    if (!operand.Fits()) return BadArgument(kernel, operand.WhatIsWrong());
  }
  return ffi::Error::Success();
}

template <typename Buffer>
ffi::Error CheckType(const char* kernel, const char* name, const Buffer& buffer,
                     ffi::DataType wanted) {
  if (buffer.element_type() == wanted) return ffi::Error::Success();
  std::ostringstream text;
  text << name << " has dtype " << buffer.element_type() << "; it must be " << wanted;
  return BadArgument(kernel, text.str());
}

// Whether the rows of an operand hold bf16; otherwise they must hold f32.
inline ffi::Error ReadElement(const char* kernel, const char* name,
                              ffi::DataType dtype, bool* bfloat16) {
  *bfloat16 = dtype == ffi::BF16;
  if (dtype != ffi::BF16 && dtype != ffi::F32) {
    return BadArgument(kernel, std::string(name) + " must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

// A result that is updated in place must be the buffer of its operand.
template <typename Before, typename After>
ffi::Error CheckInPlace(const char* kernel, const char* name, const Before& before,
                        const After& after) {
  if (before.element_count() == 0 || before.untyped_data() == after.untyped_data()) {
    return ffi::Error::Success();
  }
  return BadArgument(kernel, std::string(name) +
                                 " must be one buffer, operand and result: "
                                 "input_output_aliases is missing");
}

// The first error, if there is one.
inline ffi::Error FirstOf(std::initializer_list<ffi::Error> errors) {
  for (const ffi::Error& error : errors) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_FFI_SUPPORT_H_
