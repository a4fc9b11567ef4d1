// Appends a round's tokens to the texts and finds out which of them ended: all that a
// round keeps in step besides the caches.

#ifndef KDTREE_JAX_EMIT_H_
#define KDTREE_JAX_EMIT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

// B sequences, N slots, A slots of a path, K stop tokens, room for M tokens a text.
// kdtree_jax/decoding/emit.py and state.py define what is computed; slots of the path
// are clamped to 0 .. N - 1. `finish` holds the values of DecodeState.
struct EmitArgs {
  // The round.
  const int32_t* token_ids;  // [B, N] of the tree
  const int32_t* choices;    // [B, N] the target's token at each slot
  const int32_t* path;       // [B, A]
  const int32_t* length;     // [B] accepted slots
  const int32_t* bonus;      // [B]; -1: the logits were not finite
  const float* log_probs;    // [B, A] of the chosen tokens
  const int32_t* lengths;    // [B] positions committed before the round
  // What ends a text.
  const int32_t* stop_tokens;  // [K]
  const int32_t* capacity;     // []
  // State, updated in place.
  int32_t* root;          // [B]
  int32_t* finish;        // [B]
  int32_t* generated;     // [B]
  int32_t* rounds;        // [B]
  int32_t* tokens;        // [B, M]
  float* text_log_probs;  // [B, M]
  int32_t* accepted;      // [B, M]
  // Results.
  int32_t* committed;    // [B] slots to commit to the caches
  int32_t* new_lengths;  // [B]
  int32_t* kept;         // [B] tokens appended
  int32_t* path_tokens;  // [B, A] the path's own tokens
  int batch;
  int nodes;
  int path_len;
  int stops;
  int room;
};

cudaError_t LaunchEmit(cudaStream_t stream, const EmitArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_EMIT_H_
