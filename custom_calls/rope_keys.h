// Cache rows of new tokens: normed latent beside the rotated key.

#ifndef KDTREE_JAX_ROPE_KEYS_H_
#define KDTREE_JAX_ROPE_KEYS_H_

#include "rope.h"

namespace kdtree_jax {

// Shapes: T rows, R latent features, P = 2 * pairs rotated features.
struct RopeKeysArgs {
  const void* kv;            // [T, R + P], as the projection writes it
  const void* weight;        // [R] of the latent norm
  const int32_t* positions;  // [T]
  void* out;                 // [T, R + P]
  int tokens;
  int latent_width;
  float eps;
  bool interleave;
  bool bfloat16;  // else float32
  RopeAngles angles;
};

cudaError_t LaunchRopeKeys(cudaStream_t stream, const RopeKeysArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROPE_KEYS_H_
