// Best-first search for the most probable prefixes: one warp takes a node at a time.
//
// Each taken node offers one candidate, its best child not yet taken, so the frontier
// is one value per slot. Equal sums are ordered by the tuple of ranks, as a heap of
// such tuples would: the candidate of a node comes after everything below that node
// and before whatever follows it, so candidates are ordered as their parents are in
// post-order. A new node is its parent's last child, hence its post-order index is its
// parent's, and all from there on move up by one.

#ifndef KDTREE_JAX_BEST_FIRST_CUH_
#define KDTREE_JAX_BEST_FIRST_CUH_

#include "build_tree.h"
#include "log_softmax_math.h"

namespace kdtree_jax {

// A whole table of at most this many bytes is searched in shared memory.
constexpr int kTableBytesInShared = 16 * 1024;

__host__ __device__ constexpr bool TableInShared(int depths, int width) {
  return int64_t{depths} * width <= kTableBytesInShared / int64_t{sizeof(float)};
}

// Slots whose frontier fits in the registers of a warp.
constexpr int kSlotsInRegisters = 128;

// Nodes by slot, in shared memory.
struct SearchMemory {
  float* sums;    // from the root down
  int* parents;
  int* depths;
  int* ranks;     // of the child that a node offers
  int* entries;   // index of the node's own token in the table
  uint32_t* keys;  // with orders: the frontier, where it does not fit in registers
  int* orders;
  float* table;
};

// Words per array: one for each slot that a search can fill, in whole warps.
__host__ __device__ constexpr int SlotWords(int budget) {
  return budget / 32 * 32 + 32;
}

__host__ __device__ constexpr bool FrontierInRegisters(int budget, int depths,
                                                       int width) {
  return SlotWords(budget) <= kSlotsInRegisters && TableInShared(depths, width);
}

__host__ __device__ constexpr size_t SearchBytes(int budget, int depths, int width) {
  const int arrays = FrontierInRegisters(budget, depths, width) ? 5 : 7;
  const int table = TableInShared(depths, width) ? depths * width : 0;
  return sizeof(float) * (arrays * SlotWords(budget) + table);
}
constexpr size_t kMostSearchBytes =
    sizeof(float) * 7 * kBuildTreeMaxNodes + kTableBytesInShared;

__device__ inline SearchMemory SplitSearchMemory(void* memory, int budget,
                                                 bool frontier_in_registers) {
  SearchMemory m;
  int* words = static_cast<int*>(memory);
  const int n = SlotWords(budget);
  m.sums = reinterpret_cast<float*>(words);
  m.parents = words + n;
  m.depths = words + 2 * n;
  m.ranks = words + 3 * n;
  m.entries = words + 4 * n;
  words += 5 * n;
  m.keys = reinterpret_cast<uint32_t*>(words);
  m.orders = words + n;
  if (!frontier_in_registers) words += 2 * n;
  m.table = reinterpret_cast<float*>(words);
  return m;
}

// What a lane knows of the candidates of its slots, 32 * j + lane for j < kSlots.
template <int kSlots>
struct Frontier {
  __device__ explicit Frontier(const SearchMemory&) {}
  __device__ uint32_t& key(int j) { return keys[j]; }  // of the candidate's path sum
  __device__ int& order(int j) { return orders[j]; }   // of the slot, in post-order
  uint32_t keys[kSlots];
  int orders[kSlots];
};

// Any number of slots.
template <>
struct Frontier<0> {
  __device__ explicit Frontier(const SearchMemory& m)
      : keys(m.keys + threadIdx.x % 32), orders(m.orders + threadIdx.x % 32) {}
  __device__ uint32_t& key(int j) { return keys[32 * j]; }
  __device__ int& order(int j) { return orders[32 * j]; }
  uint32_t* keys;
  int* orders;
};

// Takes up to `take` nodes and returns the slots in use. Called by one whole warp, for
// which 32 * kSlots must be more than `take`, or kSlots 0. `table` [depths, width].
template <int kSlots>
__device__ int Search(const SearchMemory& m, const float* table, int depths, int width,
                      int take) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kUnroll = kSlots > 0 ? kSlots : 1;
  const int slots = kSlots > 0 ? kSlots : take / 32 + 1;
  const int lane = threadIdx.x % 32;
  // Path sum of a child, by its depth from 0 and rank; -inf if it must not be taken.
  const auto sum_of = [&](float parent, int depth, int rank) {
    if (depth >= depths || rank >= width) return -INFINITY;
    const float sum = Add(parent, table[depth * width + rank]);
    return sum > -INFINITY ? sum : -INFINITY;  // NaN as well
  };
  Frontier<kSlots> frontier(m);
#pragma unroll kUnroll
  for (int j = 0; j < slots; ++j) {
    frontier.key(j) = kKeyOfMinusInfinity;
    frontier.order(j) = 0;
  }
  if (lane == 0) {
    frontier.key(0) = KeyOf(sum_of(0.0f, 0, 0));
    m.sums[0] = 0.0f;
    m.parents[0] = -1;
    m.depths[0] = m.ranks[0] = m.entries[0] = 0;
  }
  __syncwarp();
  int slot = 1;
  for (; slot <= take; ++slot) {
    uint32_t best = kKeyOfMinusInfinity;
#pragma unroll kUnroll
    for (int j = 0; j < slots; ++j) best = max(best, frontier.key(j));
    best = __reduce_max_sync(kAll, best);
    if (best == kKeyOfMinusInfinity) break;
    // Of equal ones the first in post-order; indices are distinct.
    unsigned first = 0xffffffffu;
#pragma unroll kUnroll
    for (int j = 0; j < slots; ++j) {
      const unsigned tag = frontier.order(j) * kBuildTreeMaxNodes + 32 * j + lane;
      if (frontier.key(j) == best) first = min(first, tag);
    }
    first = __reduce_min_sync(kAll, first);
    const int parent = first % kBuildTreeMaxNodes;
    const int order = first / kBuildTreeMaxNodes;
    const float path_sum = FloatOfKey(best);
    const int depth = m.depths[parent];
    const int rank = m.ranks[parent];
    const uint32_t sibling = KeyOf(sum_of(m.sums[parent], depth, rank + 1));
    const uint32_t child = KeyOf(sum_of(path_sum, depth + 1, 0));
#pragma unroll kUnroll
    for (int j = 0; j < slots; ++j) {
      frontier.order(j) += frontier.order(j) >= order;
      if (32 * j + lane == parent) frontier.key(j) = sibling;
      if (32 * j + lane == slot) {
        frontier.key(j) = child;
        frontier.order(j) = order;
      }
    }
    __syncwarp();  // all have read the parent's entries
    if (lane == 0) {
      m.ranks[parent] = rank + 1;
      m.sums[slot] = path_sum;
      m.parents[slot] = parent;
      m.depths[slot] = depth + 1;
      m.ranks[slot] = 0;
      m.entries[slot] = depth * width + rank;
    }
    __syncwarp();
  }
  return slot;
}

// Builds and writes the tree of sequence b. Called by a whole block; `memory` is shared
// and SearchBytes large, and nobody else uses it meanwhile.
__device__ inline void BuildOneTree(const TreeArgs& a, int b, void* memory) {
  __shared__ int size;
  const bool in_registers = FrontierInRegisters(a.budget, a.depths, a.width);
  const SearchMemory m = SplitSearchMemory(memory, a.budget, in_registers);
  const int64_t first_entry = static_cast<int64_t>(b) * a.depths * a.width;
  const float* table = a.table + first_entry;
  const int depths = max(0, min(a.depths, a.max_depth[b * a.max_depth_stride]));
  const int take = max(0, min(a.budget, a.limit[b * a.limit_stride]));
  const bool in_shared = TableInShared(a.depths, a.width);
  if (in_shared) {
    // Not through L1: another block may have written the table just now.
    for (int i = threadIdx.x; i < depths * a.width; i += blockDim.x) {
      m.table[i] = __ldcg(table + i);
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int found;
    if (in_registers) {
      found = Search<kSlotsInRegisters / 32>(m, m.table, depths, a.width, take);
    } else {
      found = Search<0>(m, in_shared ? m.table : table, depths, a.width, take);
    }
    if (threadIdx.x == 0) {
      size = found;
      a.size[b] = found;
    }
  }
  __syncthreads();
  const int64_t first_slot = static_cast<int64_t>(b) * a.rows;
  const int32_t root_token = a.root_tokens[b];
  for (int slot = threadIdx.x; slot < a.rows; slot += blockDim.x) {
    const bool live = slot < size;
    int32_t token = 0;
    if (slot == 0) {
      token = root_token;
    } else if (live) {
      token = __ldcg(a.table_tokens + first_entry + m.entries[slot]);
    }
    a.token_ids[first_slot + slot] = token;
    a.parents[first_slot + slot] = live ? m.parents[slot] : -1;
    a.depths_out[first_slot + slot] = live ? m.depths[slot] : 0;
    a.log_probs[first_slot + slot] = live ? m.sums[slot] : -INFINITY;
  }
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_BEST_FIRST_CUH_
