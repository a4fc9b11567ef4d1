// RMSNorm of rows, with the residual sum before it or without.

#ifndef KDTREE_JAX_RMS_NORM_H_
#define KDTREE_JAX_RMS_NORM_H_

#include <cuda_runtime_api.h>

namespace kdtree_jax {

// Features of a row: offsets into it are ints.
constexpr int kRmsNormMaxWidth = 1 << 30;

struct RmsNormArgs {
  const void* x;       // [rows, width]
  const void* added;   // [rows, width], rounded into x first; null: nothing is added
  const void* weight;  // [width]
  void* sum;           // [rows, width]: x + added; not written where nothing is added
  void* out;           // [rows, width]
  int rows;
  int width;
  float eps;
  bool bfloat16;  // All arrays; else float32.
  bool early;     // Begins before the kernel before, which makes x or `added`, has ended.
};

cudaError_t LaunchRmsNorm(cudaStream_t stream, const RmsNormArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_RMS_NORM_H_
