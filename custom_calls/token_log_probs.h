// Log-probability of the token that was chosen at each slot of a path.

#ifndef KDTREE_JAX_TOKEN_LOG_PROBS_H_
#define KDTREE_JAX_TOKEN_LOG_PROBS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

// B sequences, N slots, A slots of a path, V tokens. Only rows on the path are read.
struct TokenLogProbsArgs {
  const float* logits;    // [B, N, V]
  const int32_t* tokens;  // [B, N] by slot; clamped to 0 .. V - 1
  const int32_t* path;    // [B, A]; negative: none; clamped to N - 1
  float* log_probs;       // [B, A]; 0 where the path is negative
  int batch;
  int nodes;
  int path_len;
  int vocab;
};

cudaError_t LaunchTokenLogProbs(cudaStream_t stream, const TokenLogProbsArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TOKEN_LOG_PROBS_H_
