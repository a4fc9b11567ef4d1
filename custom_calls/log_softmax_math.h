// The arithmetic of the log-softmax: sums of exponentials that are right to 0.9 * 2^-24
// of themselves, whatever the logits. Compiles for the host too.

#ifndef KDTREE_JAX_LOG_SOFTMAX_MATH_H_
#define KDTREE_JAX_LOG_SOFTMAX_MATH_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KDT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KDT_HOST_DEVICE inline
#endif

namespace kdtree_jax {

// Single rounded operations: nothing here may be contracted but where Fma says so.
#ifdef __CUDA_ARCH__
KDT_HOST_DEVICE float Add(float a, float b) { return __fadd_rn(a, b); }
KDT_HOST_DEVICE float Sub(float a, float b) { return __fsub_rn(a, b); }
KDT_HOST_DEVICE float Mul(float a, float b) { return __fmul_rn(a, b); }
KDT_HOST_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KDT_HOST_DEVICE uint32_t BitsOf(float x) { return __float_as_uint(x); }
KDT_HOST_DEVICE float FloatOf(uint32_t x) { return __uint_as_float(x); }
#else
// Compile with -ffp-contract=off.
KDT_HOST_DEVICE float Add(float a, float b) { return a + b; }
KDT_HOST_DEVICE float Sub(float a, float b) { return a - b; }
KDT_HOST_DEVICE float Mul(float a, float b) { return a * b; }
KDT_HOST_DEVICE float Fma(float a, float b, float c) { return std::fma(a, b, c); }
KDT_HOST_DEVICE uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
KDT_HOST_DEVICE float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
#endif

// Keys order as the floats do (NaN aside); -0.0 comes directly below 0.0.
KDT_HOST_DEVICE uint32_t KeyOf(float x) {
  const uint32_t bits = BitsOf(x);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

KDT_HOST_DEVICE float FloatOfKey(uint32_t key) {
  return FloatOf(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffu;

// Adds exponentials, scaled by 2^64 so that none that matters is subnormal, and keeps
// the rounding errors of the sum in a second float.
struct ExpSum {
  float sum = 0;
  float error = 0;

  // Adds exp(x - top), or nothing if x == top. `top` is finite and not below x; x is
  // not NaN. In units of 2^-26 of exp(r) >= 0.7, rounding r costs 1, rounding p and its
  // last product 1.6 / 0.7, and the polynomial 0.3: together 0.9 * 2^-24. What is
  // rounded from there on is kept in `error`.
  KDT_HOST_DEVICE void Add(float x, float top) {
    // Nothing counts below top - 200, and infinities would only make NaN. Where top is
    // so large that floor is top, no other x counts.
    const float floor = Sub(top, 200.0f);
    const float a = x > floor ? x : floor;
    // a - top, and what its rounding lost (Knuth's two-sum).
    const float d = Sub(a, top);
    const float b = Sub(d, a);
    const float lost = Sub(Sub(a, Sub(d, b)), kdtree_jax::Add(top, b));
    // d = n ln2 + r with |r| <= ln2 / 2; the first product is exact.
    const float shifted = Fma(d, 0x1.715476p+0f, 0x1.8p+23f);
    const float n = Sub(shifted, 0x1.8p+23f);
    const float high = Fma(n, -0x1.62e430p-1f, d);
    const float r = kdtree_jax::Add(high, Fma(n, 0x1.05c610p-29f, lost));
    // exp(r) = 1 + r + r^2 q(r), minimax in relative error: 2^-27.7.
    float q = 0x1.6a2352p-10f;
    q = Fma(q, r, 0x1.123a6cp-7f);
    q = Fma(q, r, 0x1.5558f4p-5f);
    q = Fma(q, r, 0x1.555490p-3f);
    q = Fma(q, r, 0x1.fffffcp-2f);
    const float p = Fma(Mul(r, r), q, r);
    const float e = kdtree_jax::Add(1.0f, p);
    const float e_error = Sub(p, Sub(e, 1.0f));
    // 2^(n + 64) as bits; 0 where that is no normal number, and for a == top.
    int exponent = static_cast<int>(BitsOf(shifted)) - 0x4b400000 + 64 + 127;
    exponent = exponent < 0 || !(a < top) ? 0 : exponent;
    const float scale = FloatOf(static_cast<uint32_t>(exponent) << 23);
    // Two-sum again.
    const float term = Mul(e, scale);
    const float total = kdtree_jax::Add(sum, term);
    const float back = Sub(total, sum);
    const float rounding =
        kdtree_jax::Add(Sub(sum, Sub(total, back)), Sub(term, back));
    sum = total;
    error = kdtree_jax::Add(error, Fma(e_error, scale, rounding));
  }

  KDT_HOST_DEVICE double Value() const {
    return (static_cast<double>(sum) + static_cast<double>(error)) * 0x1p-64;
  }
};

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_LOG_SOFTMAX_MATH_H_
