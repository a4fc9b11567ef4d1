// The best draft tree under a node budget, from drafter logits or from the table of
// the candidates of each depth.

#ifndef KDTREE_JAX_BUILD_TREE_H_
#define KDTREE_JAX_BUILD_TREE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kdtree_jax {

// Slots that a search can fill, the root included.
constexpr int kBuildTreeMaxNodes = 1024;
constexpr int kBuildTreeMaxWidth = kBuildTreeMaxNodes - 1;

// A row of logits is cut into slices of this many, whatever the batch, the depth and
// the type: sums then depend on the row alone.
constexpr int kLogitsPerSlice = 20480;

// Shapes: B sequences, L depths, V vocabulary, k candidates per depth, N slots of the
// result. All arrays are row-major on the device.
struct CandidateArgs {
  const void* logits;     // [B, logit_depths, V], float or bfloat16
  bool is_bfloat16;
  float* log_probs;       // [B, L, k]
  int32_t* token_ids;     // [B, L, k]
  void* workspace;        // CandidateWorkspaceBytes
  int batch;
  int logit_depths;       // at least L; the rows behind L are not read
  int depths;             // L
  int vocab;              // V, at least k
  int width;              // k, 1 .. kBuildTreeMaxWidth
};

// Multiple of 8; the workspace must be aligned to 8.
size_t CandidateWorkspaceBytes(int batch, int depths, int vocab, int width);

struct TreeArgs {
  const float* table;          // [B, L, k] log-probabilities
  const int32_t* table_tokens; // [B, L, k]
  const int32_t* root_tokens;  // [B]
  const int32_t* limit;        // [B], or one for all
  const int32_t* max_depth;    // [B], or one for all
  int limit_stride;            // 1, or 0 for one value
  int max_depth_stride;
  int32_t* token_ids;          // [B, N]
  int32_t* parents;            // [B, N]
  int32_t* depths_out;         // [B, N]
  float* log_probs;            // [B, N]
  int32_t* size;               // [B]
  int batch;
  int depths;                  // L
  int width;                   // k
  int budget;                  // 0 .. kBuildTreeMaxNodes - 1
  int rows;                    // N, at least 1 + budget
};

// The k most probable tokens of each row and their log-probabilities.
cudaError_t LaunchLogSoftmaxTopK(cudaStream_t stream, const CandidateArgs& args);

// The tree of a table.
cudaError_t LaunchTreeFromTable(cudaStream_t stream, const TreeArgs& args);

// Both at once, in two launches. The tables of the two must be the same memory.
cudaError_t LaunchBuildTree(cudaStream_t stream, const CandidateArgs& candidates,
                            const TreeArgs& tree);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_BUILD_TREE_H_
