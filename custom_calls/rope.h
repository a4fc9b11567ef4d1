// Rotary position embedding of the last columns of rows; the others are copied.

#ifndef KDTREE_JAX_ROPE_H_
#define KDTREE_JAX_ROPE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

constexpr int kRopeMaxPairs = 128;

// Where the cosine and sine of a pair at a position come from: rows of tables, or the
// frequencies. Both give the same bits. Positions are clamped to 0 .. length - 1.
struct RopeAngles {
  const float* cos;  // [length, pairs] on the device, or null: from the frequencies
  const float* sin;  // [length, pairs]
  int length;
  int pairs;
  bool float32_angles;  // form position * frequency in float32 instead of float64
  double amplitude;     // factor on both, in float64 before the one rounding
  double frequencies[kRopeMaxPairs];  // radians per position
};

// A row is one (token, head). Of `x` the 2 * pairs features of a row are rotated; they
// lie behind the row's copied columns in `out`, in half-split order.
struct RopeArgs {
  const void* x;             // first rotated feature of row (0, 0)
  const void* copied;        // columns to copy, or null
  const int32_t* positions;  // [tokens]
  void* out;                 // [tokens, heads, copied_width + 2 * pairs]
  int64_t x_token_stride;    // in elements, as all strides
  int64_t x_head_stride;
  int64_t copied_token_stride;
  int64_t copied_head_stride;
  int copied_width;
  int tokens;
  int heads;
  bool interleave;  // of x: (2i, 2i + 1) form a pair, else (i, i + pairs)
  bool bfloat16;    // else float32
  RopeAngles angles;
};

cudaError_t LaunchRope(cudaStream_t stream, const RopeArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROPE_H_
