// Absorbed MLA attention of draft-tree nodes over the latent cache.
//
// A row is one (node, head). Node n of a sequence sits at absolute position
// length + depth[n] and attends to positions 0 .. length + depth[n]: below `length`
// the key is a row of the cache, from there on the tree key of the node's
// ancestor-or-self at depth position - length. Keys are reduced in position order:
// within a chunk of `chunk` absolute positions online, step by step, into a partial
// (maximum, sum, accumulator); the partials of a row are merged in chunk order. Chunk
// and step do not depend on the numbers of rows or sequences, so a row's bits depend
// on the row and its keys alone.

#ifndef KDTREE_JAX_TREE_ATTENTION_H_
#define KDTREE_JAX_TREE_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

enum class Element { kFloat32, kBFloat16 };

// Which kernel runs. Each is exact in itself, but their bits differ.
enum class TreeAttentionKernel {
  kAuto,      // the one for Hopper where it can run and TreeAttentionFillsHopper
  kPortable,  // tensor cores by mma.sync, or the ordinary cores; sm_90 and sm_120
  kHopper,    // sm_90a alone
};

// Keys of 32 positions and 8 queries of this width fill a block's shared memory.
constexpr int kTreeAttentionMaxWidth = 620;
constexpr int kTreeAttentionMaxChunk = 1 << 20;
// Chunks and sequences are the grid's y and z.
constexpr int kTreeAttentionMaxChunks = 65535;
constexpr int kTreeAttentionMaxBatch = 65535;

// The shape that the kernel for Hopper is compiled for.
constexpr int kHopperWidth = 576;
constexpr int kHopperValueDim = 512;
constexpr int kHopperRows = 64;  // heads of one node to a block

// Where four or eight of its blocks share a chunk, they send each other weights by way of
// memory: a message each, of 64 rows and 64 keys, and a reference per row. So many blocks
// run at most.
constexpr int kHopperSplitBlocks = 256;
constexpr int kHopperMessageBytes = 64 * 64 * 2 + 64 * 4;
constexpr int64_t kHopperMessagesBytes =
    int64_t{kHopperSplitBlocks} * kHopperMessageBytes;

// B sequences, N nodes, H heads, W key width, R value width, S cache positions,
// A ancestors a node may have (itself included), C = ceil(S + A, chunk) chunks.
struct TreeAttentionArgs {
  const void* q;             // [B, N, H, W]
  const void* cache;         // [B, S, W], one layer
  const void* tree_keys;     // [B, N, W]
  const int32_t* ancestors;  // [B, N, A]; -1 beyond the node's own depth
  const int32_t* depths;     // [B, N]
  const int32_t* lengths;    // [B]
  void* out;                 // [B, N, H, R]
  float* accumulators;       // [B, N * H, C, R] workspace
  // [B, N * H, C] workspace, in units of log2; of the kernel for Hopper, what its rows'
  // weights refer to: whole numbers close to the maxima.
  float* maxima;
  float* sums;               // [B, N * H, C] workspace
  // [kHopperMessagesBytes] workspace, for the kernel for Hopper alone.
  void* messages;
  int batch;
  int nodes;
  int heads;
  int width;      // 1 .. kTreeAttentionMaxWidth
  int value_dim;  // 1 .. width
  int capacity;
  int max_ancestors;
  int chunk;   // a multiple of 16, at most kTreeAttentionMaxChunk
  int chunks;  // chunks * chunk is an int
  float scale;
  Element element;
  // Rows per block of the tensor-core form: 16, 32, 64, or 0 to choose. It changes the
  // speed, never a bit. Ignored where it does not divide the heads: then 32.
  int rows_per_block = 0;
  TreeAttentionKernel kernel = TreeAttentionKernel::kAuto;
  // The kernel for Hopper takes larger chunks: positions per chunk, a multiple of 16,
  // at least `chunk`, so that the workspace is large enough.
  int chunk_on_hopper = 0;
  // Blocks that share a chunk of 64 rows there: 1, 2, 4, 8, or 0 to choose. It changes
  // the speed, never a bit.
  int blocks_per_item = 0;
};

// Whether the kernel for Hopper takes these arguments, on a GPU that it is for.
inline bool TreeAttentionHopperTakes(const TreeAttentionArgs& a) {
  return a.element == Element::kBFloat16 && a.width == kHopperWidth &&
         a.value_dim == kHopperValueDim && a.scale > 0 && a.scale <= 1e30f &&
         a.capacity <= 1 << 30;
}

// Whether no row of its blocks is idle. Where some are, the portable kernel is faster.
inline bool TreeAttentionFillsHopper(const TreeAttentionArgs& a) {
  return TreeAttentionHopperTakes(a) && a.heads % kHopperRows == 0;
}

// Tensor-core form for bf16 and the shapes it is compiled for. cache and tree_keys must
// lie on multiples of 16 bytes.
bool TreeAttentionMmaSupports(const TreeAttentionArgs& args);
cudaError_t LaunchTreeAttentionMma(cudaStream_t stream, const TreeAttentionArgs& args);

// Any dtype and alignment, widths up to kTreeAttentionMaxWidth, in fp32 arithmetic on
// the ordinary cores.
cudaError_t LaunchTreeAttentionSimt(cudaStream_t stream, const TreeAttentionArgs& args);

// For what TreeAttentionHopperTakes. Takes `chunk` and `chunks`, not `chunk_on_hopper`.
cudaError_t LaunchTreeAttentionHopper(cudaStream_t stream,
                                      const TreeAttentionArgs& args);

// Whether the current device is one that its machine code is for, and the code is
// there.
cudaError_t TreeAttentionHopperRuns(bool* runs);

// Merges a row's partials in chunk order and writes `out`.
cudaError_t LaunchTreeAttentionMerge(cudaStream_t stream,
                                     const TreeAttentionArgs& args);

// All of it: the form that fits, then the merge.
cudaError_t LaunchTreeAttention(cudaStream_t stream, const TreeAttentionArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_H_
