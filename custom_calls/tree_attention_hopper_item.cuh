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
  int tiles;   // none where there is no such node, or it does not reach the chunk
};

__device__ __forceinline__ Item FindItem(const Params& p, int batch, int chunk,
                                         int row_tile) {
  const TreeAttentionArgs& a = p.args;
  Item item;
  item.batch = batch;
  item.chunk = chunk;
  item.start = chunk * a.chunk;
  item.length = min(max(a.lengths[batch], 0), a.capacity);
  const int end = item.start + a.chunk;
  item.prefix = max(0, min(end, item.length) - item.start) / kTile;
  const int node = row_tile / p.row_tiles;
  item.limit = 0;
  if (node < a.nodes) {
    const int depth = a.depths[batch * a.nodes + node];
    item.limit = min(end, item.length + min(max(depth, 0), a.max_ancestors - 1) + 1);
  }
  item.tiles = max(0, item.limit - item.start + kTile - 1) / kTile;
  item.node = min(node, a.nodes - 1);
  item.head = row_tile % p.row_tiles * kRows;
  return item;
}

// The items of a cluster of the persistent kernel: two row tiles of one chunk with
// kCluster = 2. Clusters take them in turn. With one sequence, those of a last chunk
// that is hardly begun come after all others and go to the clusters that have had one
// less.
template <int kCluster>
class Items {
 public:
  __device__ __forceinline__ Items(const Params& p, int rank) : p_(p), rank_(rank) {}

  __device__ __forceinline__ int First() const {
    const int full = Full(), cluster = blockIdx.x / kCluster;
    return cluster < full ? cluster : FirstOfRest(full);
  }

  __device__ __forceinline__ int Next(int i) const {
    const int full = Full(), clusters = gridDim.x / kCluster;
    if (i >= full) return i + clusters - full % clusters;
    return i + clusters < full ? i + clusters : FirstOfRest(full);
  }

  // This block's part of item i, and the most tiles that a block of the cluster has.
  // False where that is none.
  __device__ __forceinline__ bool Find(int i, Item& item, int& rounds) const {
    const int pair = i % p_.pairs, chunk = i / p_.pairs % p_.args.chunks;
    const int batch = i / p_.pairs / p_.args.chunks;
    item = FindItem(p_, batch, chunk, pair * kCluster + rank_);
    rounds = item.tiles;
    if constexpr (kCluster == 2) {
      const Item other = FindItem(p_, batch, chunk, pair * kCluster + (rank_ ^ 1));
      rounds = max(rounds, other.tiles);
    }
    return rounds > 0;
  }

 private:
  __device__ __forceinline__ int Full() const {
    const TreeAttentionArgs& a = p_.args;
    if (a.batch > 1) return p_.items;
    const int length = min(max(a.lengths[0], 0), a.capacity);
    return min(a.chunks, (length + a.chunk / 2) / a.chunk) * p_.pairs;
  }

  __device__ __forceinline__ int FirstOfRest(int full) const {
    const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const int idle_from = full % clusters;
    return cluster < idle_from ? p_.items : full + cluster - idle_from;
  }

  const Params& p_;
  const int rank_;
};

// Row `row` of the item in the workspace, counted in chunks.
__device__ __forceinline__ int64_t PartialOf(const TreeAttentionArgs& a,
                                             const Item& item, int row) {
  const int64_t node = static_cast<int64_t>(item.batch) * a.nodes + item.node;
  return (node * a.heads + item.head + row) * a.chunks + item.chunk;
}

// Copies groups kFirst .. of a tile that reaches the length to `to`: committed keys,
// then the node's ancestors, zeros from the item's limit on. For kThreads threads, at
// the end of which products see what they wrote.
template <int kThreads>
__device__ __forceinline__ void GatherTile(const TreeAttentionArgs& a, const Item& item,
                                           int t, int first_group, int groups,
                                           uint32_t to, int thread) {
  const int lane = thread % 4;
#pragma unroll 1
  for (int key = thread / 4; key < kTile; key += kThreads / 4) {
    const int position = item.start + t * kTile + key;
    const bool wanted = position < item.limit;
    const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(a.tree_keys);
    if (wanted && position < item.length) {
      from = static_cast<const __nv_bfloat16*>(a.cache) +
             (static_cast<int64_t>(item.batch) * a.capacity + position) * kWidth;
    } else if (wanted) {
      const int64_t node = static_cast<int64_t>(item.batch) * a.nodes + item.node;
      const int slot = a.ancestors[node * a.max_ancestors + position - item.length];
      from += (static_cast<int64_t>(item.batch) * a.nodes +
               min(max(slot, 0), a.nodes - 1)) *
              kWidth;
    }
    from += first_group * kGroupDims;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int piece = lane + half * 4;
        CopyAsync16(to + g * kGroupBytes + key * 128 + (piece ^ (key & 7)) * 16,
                    from + g * kGroupDims + piece * 8, wanted);
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  FenceForProducts();
}

// Goes round the places of a ring.
template <int kPlaces>
struct Turn {
  int place = 0, phase = 0;

  __device__ __forceinline__ void Next() {
    if (++place == kPlaces) {
      place = 0;
      phase ^= 1;
    }
  }
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_ITEM_CUH_
