#include "compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace kdtree_jax {
namespace {

bool IsFloat(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBf16;
}

template <typename T>
T At(const uint8_t* data, uint64_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

double Value(DType dtype, const uint8_t* data, uint64_t index) {
  switch (dtype) {
    case DType::kF64:
      return At<double>(data, index);
    case DType::kF32:
      return At<float>(data, index);
    case DType::kBf16: {
      const uint32_t bits = uint32_t{At<uint16_t>(data, index)} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

std::string ValueText(DType dtype, const uint8_t* data, uint64_t index) {
  char text[48];
  if (IsFloat(dtype)) {
    const double value = Value(dtype, data, index);
    std::snprintf(text, sizeof(text), "%.9g", value);
    return text;
  }
  switch (dtype) {
    case DType::kI64:
      return std::to_string(At<int64_t>(data, index));
    case DType::kI32:
      return std::to_string(At<int32_t>(data, index));
    case DType::kI16:
      return std::to_string(At<int16_t>(data, index));
    case DType::kI8:
      return std::to_string(At<int8_t>(data, index));
    case DType::kU32:
      return std::to_string(At<uint32_t>(data, index));
    case DType::kF16:
      std::snprintf(text, sizeof(text), "0x%04x", At<uint16_t>(data, index));
      return text;
    default:
      return std::to_string(data[index]);
  }
}

// The bits, where two values of one text differ in them.
std::string BitsText(const uint8_t* element, uint64_t bytes) {
  std::string text = " (0x";
  for (uint64_t i = bytes; i-- > 0;) {
    char digits[4];
    std::snprintf(digits, sizeof(digits), "%02x", element[i]);
    text += digits;
  }
  return text + ")";
}

// Numbers of the dtype in the order of their values; both zeros are 0.
int64_t Rank(DType dtype, const uint8_t* data, uint64_t index) {
  const int64_t bits =
      dtype == DType::kF32 ? At<int32_t>(data, index) : At<int16_t>(data, index);
  const int64_t least = dtype == DType::kF32 ? std::numeric_limits<int32_t>::min()
                                             : std::numeric_limits<int16_t>::min();
  return bits >= 0 ? bits : least - bits;
}

// Error of one element as a share of what the rule allows: right up to 1.
double Share(const Rule& rule, DType output, const uint8_t* got,
             const KdtrTensor& golden, uint64_t i) {
  const double a = Value(output, got, i);
  const double b = Value(golden.dtype, golden.data, i);
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (std::isnan(a) && std::isnan(b)) return 0;
  if (std::isnan(a) || std::isnan(b)) return kWrong;
  if (a == b) return 0;  // infinities too
  if (std::isinf(a) || std::isinf(b)) return kWrong;
  double error = std::fabs(a - b), limit = rule.limit;
  if (rule.kind == Rule::Kind::kUlp) {
    error = std::fabs(static_cast<double>(Rank(output, got, i) -
                                          Rank(golden.dtype, golden.data, i)));
  } else if (rule.kind == Rule::Kind::kBound) {
    limit = Value(rule.bound->dtype, rule.bound->data, i);
  }
  // A bound of NaN or 0 allows no error at all.
  return limit > 0 ? error / limit : kWrong;
}

}  // namespace

bool CanCompare(const Rule& rule, DType output, DType golden) {
  switch (rule.kind) {
    case Rule::Kind::kBits:
      return output == golden && output != DType::kInt4;
    case Rule::Kind::kUlp:
      return output == golden && (output == DType::kF32 || output == DType::kBf16);
    default:
      return IsFloat(output) && IsFloat(golden);
  }
}

Comparison Compare(const Rule& rule, DType output, const uint8_t* got,
                   const KdtrTensor& golden) {
  Comparison result;
  const uint64_t count = ElementCount(golden.shape);
  const uint64_t width = DTypeBits(output) / 8;
  const bool bits = rule.kind == Rule::Kind::kBits;
  for (uint64_t i = 0; i < count; ++i) {
    if (bits) {
      if (std::memcmp(got + i * width, golden.data + i * width, width) == 0) continue;
    } else {
      const double share = Share(rule, output, got, golden, i);
      result.worst = std::max(result.worst, share);
      if (share <= 1) continue;
    }
    if (result.wrong++ > 0) continue;
    result.first = i;
    result.got = ValueText(output, got, i);
    result.want = ValueText(golden.dtype, golden.data, i);
    if (bits && result.got == result.want) {
      result.got += BitsText(got + i * width, width);
      result.want += BitsText(golden.data + i * width, width);
    }
  }
  return result;
}

uint64_t ElementCount(const std::vector<int64_t>& shape) {
  uint64_t count = 1;
  for (const int64_t dimension : shape) count *= static_cast<uint64_t>(dimension);
  return count;
}

std::string PlaceText(const std::vector<int64_t>& shape, uint64_t index) {
  std::vector<int64_t> place(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    place[axis] = static_cast<int64_t>(index % static_cast<uint64_t>(shape[axis]));
    index /= static_cast<uint64_t>(shape[axis]);
  }
  return ShapeText(place);
}

}  // namespace kdtree_jax
