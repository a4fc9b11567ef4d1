// How an output is held to its golden values.

#ifndef KDTREE_JAX_CHECK_COMPARE_H_
#define KDTREE_JAX_CHECK_COMPARE_H_

#include <cstdint>
#include <string>

#include "kdtr.h"

namespace kdtree_jax {

struct Rule {
  enum class Kind {
    kBits,    // the same bytes
    kUlp,     // at most `limit` floating-point numbers apart
    kMaxAbs,  // at most `limit` apart
    kBound,   // at most the element of `bound` apart
  };
  Kind kind = Kind::kBits;
  double limit = 0;
  const KdtrTensor* bound = nullptr;  // f32, of the output's shape
};

struct Comparison {
  uint64_t wrong = 0;      // elements that break the rule
  uint64_t first = 0;      // row-major index of the first of them
  double worst = 0;        // largest error, as a share of what the rule allows
  std::string got, want;   // the first wrong element and its golden value
};

// Whether values of this dtype can be held to the rule.
bool CanCompare(const Rule& rule, DType output, DType golden);

// Compares an output in host memory with its golden tensor, whose shape it has. NaN
// equals NaN and an infinity itself under every rule but kBits, which wants the bytes.
Comparison Compare(const Rule& rule, DType output, const uint8_t* got,
                   const KdtrTensor& golden);

// Elements of a shape.
uint64_t ElementCount(const std::vector<int64_t>& shape);

// "[1,3]": the place of an element, given its row-major index.
std::string PlaceText(const std::vector<int64_t>& shape, uint64_t index);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_COMPARE_H_
