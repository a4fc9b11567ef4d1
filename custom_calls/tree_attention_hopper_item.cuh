// What a block of tree attention for Hopper works on: 64 rows (heads of one node) and
// one chunk of positions; and how keys that are not the same for all nodes are
// gathered.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_ITEM_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_ITEM_CUH_

#include <cuda_bf16.h>

#include "mma.cuh"
#include "tree_attention_hopper_layout.cuh"
#include "wgmma.cuh"

namespace kdtree_jax {
namespace hopper {

struct Item {
  int batch, chunk, node, head;  // the first of up to 64 heads
  int start, length;
  int limit;   // first position that the node does not see, or that is another chunk's
  int prefix;  // tiles wholly below the length
  int tiles;   // none where the node does not reach the chunk
};

__device__ __forceinline__ Item FindItem(const Params& p, int i) {
  const TreeAttentionArgs& a = p.args;
  const int row_tiles = a.nodes * p.row_tiles, row_tile = i % row_tiles;
  Item item;
  item.batch = i / row_tiles / a.chunks;
  item.chunk = i / row_tiles % a.chunks;
  item.start = item.chunk * a.chunk;
  item.length = min(max(a.lengths[item.batch], 0), a.capacity);
  const int end = item.start + a.chunk;
  item.prefix = max(0, min(end, item.length) - item.start) / kTile;
  item.node = row_tile / p.row_tiles;
  const int depth = a.depths[item.batch * a.nodes + item.node];
  item.limit = min(end, item.length + min(max(depth, 0), a.max_ancestors - 1) + 1);
  item.tiles = max(0, item.limit - item.start + kTile - 1) / kTile;
  item.head = row_tile % p.row_tiles * kRows;
  return item;
}

// The items of blocks that share none. Blocks take them in turn. With one sequence, those
// of a last chunk that is less than half begun come after all others and go to the blocks
// that have had one less, if these can take all while the others work on theirs.
class Items {
 public:
  __device__ __forceinline__ explicit Items(const Params& p) : p_(p) {}

  __device__ __forceinline__ int First() const {
    return p_.first + Ordinal(blockIdx.x);
  }

  // p_.end or more where there is none.
  __device__ __forceinline__ int Next(int i) const {
    const int full = Full(), blocks = gridDim.x, at = i - p_.first;
    if (at >= full) return i + blocks - full % blocks;
    return p_.first + Ordinal(at + blocks);
  }

 private:
  // Of a block's item at place `at` of all in turn.
  __device__ __forceinline__ int Ordinal(int at) const {
    const int full = Full(), blocks = gridDim.x;
    if (at < full) return at;
    const int idle_from = full % blocks, block = blockIdx.x;
    return block < idle_from ? p_.end - p_.first : full + block - idle_from;
  }

  // How many come before the last chunk's: all, where these are not kept for last.
  __device__ __forceinline__ int Full() const {
    const TreeAttentionArgs& a = p_.args;
    const int items = p_.end - p_.first;
    if (a.batch > 1 || p_.first > 0) return items;
    const int length = min(max(a.lengths[0], 0), a.capacity);
    const int chunks = (length + a.chunk / 2) / a.chunk;
    const int of_chunk = a.nodes * p_.row_tiles, full = chunks * of_chunk;
    if (full >= items) return items;
    const int rest = min(of_chunk, items - full), idle = gridDim.x - full % gridDim.x;
    // An item takes as long as two tiles more.
    const int positions =
        max(length - chunks * a.chunk, 0) + a.max_ancestors + 2 * kTile;
    return rest <= idle * max(a.chunk / positions, 1) ? full : items;
  }

  const Params& p_;
};

// Row `row` of the item in the workspace, counted in chunks.
__device__ __forceinline__ int64_t PartialOf(const TreeAttentionArgs& a,
                                             const Item& item, int row) {
  const int64_t node = static_cast<int64_t>(item.batch) * a.nodes + item.node;
  return (node * a.heads + item.head + row) * a.chunks + item.chunk;
}

// Where a tile's keys lie that reaches the length, for a warp to gather: committed ones,
// then the node's ancestors. A lane knows of two keys, lane and lane + 32.
class ScatteredTile {
 public:
  __device__ __forceinline__ ScatteredTile(const TreeAttentionArgs& a, const Item& item,
                                           int t, int lane)
      : lane_(lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = item.start + t * kTile + half * 32 + lane;
      const __nv_bfloat16* from = nullptr;
      if (position < item.limit && position < item.length) {
        from = static_cast<const __nv_bfloat16*>(a.cache) +
               (static_cast<int64_t>(item.batch) * a.capacity + position) * kWidth;
      } else if (position < item.limit) {
        const int64_t node = static_cast<int64_t>(item.batch) * a.nodes + item.node;
        const int slot = a.ancestors[node * a.max_ancestors + position - item.length];
        from = static_cast<const __nv_bfloat16*>(a.tree_keys) +
               (static_cast<int64_t>(item.batch) * a.nodes +
                min(max(slot, 0), a.nodes - 1)) *
                   kWidth;
      }
      from_[half] = reinterpret_cast<uint64_t>(from);
    }
    some_ = reinterpret_cast<uint64_t>(a.tree_keys);
  }

  // Starts to copy a group of 64 dimensions, with zeros for keys from the item's limit
  // on. A lane copies its own keys: to exchange what lanes know takes hundreds of cycles
  // where a wait has split the warp.
  __device__ __forceinline__ void CopyGroup(int group, uint32_t to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t row = from_[half];
      const char* from = reinterpret_cast<const char*>(row ? row : some_) + group * 128;
#pragma unroll
      for (int piece = 0; piece < 8; ++piece) {
        CopyAsync16(to + (half * 32 + lane_) * 128 + (piece ^ (lane_ & 7)) * 16,
                    from + piece * 16, row != 0);
      }
    }
  }

  // To be called by the warp after its copies, before one lane tells a barrier:
  // products see what came.
  __device__ __forceinline__ static void Finish() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    FenceForProducts();
    __syncwarp();
  }

 private:
  const int lane_;
  uint64_t from_[2];  // 0 for keys that are not wanted
  uint64_t some_;     // where it is safe to read
};

// Goes round the places of a ring.
template <int kPlaces>
struct Turn {
  int place = 0, phase = 0;

  __device__ __forceinline__ void Next(int places = 1) {
    place += places;
    if (place >= kPlaces) {
      place -= kPlaces;
      phase ^= 1;
    }
  }
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_ITEM_CUH_
