// The token of the largest logit of each row, or none where a logit is not finite.

#ifndef KDTREE_JAX_BEST_TOKEN_H_
#define KDTREE_JAX_BEST_TOKEN_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

struct BestTokenArgs {
  const float* logits;  // [rows, V]
  int32_t* tokens;      // [rows]; equal logits: the lowest id; -1: NaN or +inf among
                        // them, or nothing but -inf
  int rows;
  int vocab;
};

cudaError_t LaunchBestToken(cudaStream_t stream, const BestTokenArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_BEST_TOKEN_H_
