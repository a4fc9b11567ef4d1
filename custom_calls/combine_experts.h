// The sum of a token's expert outputs, weighted, in the order of its slots.

#ifndef KDTREE_JAX_COMBINE_EXPERTS_H_
#define KDTREE_JAX_COMBINE_EXPERTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

// Shapes: T tokens, k slots, D features. out[t] is the fp32 sum over slots, ascending,
// of weights[t, slot] * y[t * k + slot], each product and each sum rounded, rounded
// once to the dtype of y. A slot whose id is outside of 0 .. num_experts - 1 adds
// nothing, and its row of y is not read.
struct CombineExpertsArgs {
  const void* y;           // [T * k, D]
  const float* weights;    // [T, k]
  const int32_t* experts;  // [T, k]; null: all ids are valid
  void* out;               // [T, D]
  int tokens;
  int slots;
  int width;  // D
  int num_experts;
  bool is_float32;  // y and out; else bf16
  bool early;       // May be started before the kernel before has ended, see matmul.h.
};

cudaError_t LaunchCombineExperts(cudaStream_t stream, const CombineExpertsArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_COMBINE_EXPERTS_H_
