// Commits the keys of accepted tree slots to the cache, all layers in one launch.

#ifndef KDTREE_JAX_COMPACT_H_
#define KDTREE_JAX_COMPACT_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kdtree_jax {

// B sequences, S cache positions, N tree slots, A slots of a path. Keys are copied as
// bytes, whatever their dtype. tree_keys[:, b, path[b, i]] goes to position start[b] + i
// for i < min(length[b], A); positions outside 0 .. S - 1 are dropped, path entries are
// clamped to 0 .. N - 1.
struct CompactArgs {
  void* cache;            // [layers, B, S] rows of row_bytes, updated in place
  const void* tree_keys;  // [layers, B, N] rows of row_bytes
  const int32_t* path;    // [B, A]
  const int32_t* length;  // [B]
  const int32_t* start;   // [B]
  int layers;
  int batch;
  int capacity;
  int nodes;
  int path_len;
  size_t row_bytes;
};

cudaError_t LaunchCompact(cudaStream_t stream, const CompactArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_COMPACT_H_
