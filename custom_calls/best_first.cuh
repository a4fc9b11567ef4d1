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
constexpr int kTableBytesInShared = 14 * 1024;
// Slots whose frontier fits in the registers of a warp.
constexpr int kSlotsInRegisters = 128;

// The table in shared memory is padded with -inf: by a column, which ends each list of
// siblings, and by two rows, for what is offered below the deepest nodes.
__host__ __device__ constexpr int64_t PaddedTable(int depths, int width) {
  return (int64_t{depths > 0 ? depths : 1} + 2) * (int64_t{width} + 1);
}
__host__ __device__ constexpr bool TableInShared(int depths, int width) {
  return PaddedTable(depths, width) <= kTableBytesInShared / int64_t{sizeof(float)};
}

// Slots that a search can fill, in whole warps.
__host__ __device__ constexpr int SlotsOf(int budget) { return budget / 32 * 32 + 32; }

__host__ __device__ constexpr bool FrontierInRegisters(int budget, int depths,
                                                       int width) {
  return SlotsOf(budget) <= kSlotsInRegisters && TableInShared(depths, width);
}

// A taken node, and what its candidate will offer in turn when it is taken: sums as
// keys, -inf where there is nothing.
struct alignas(16) Node {
  uint32_t sibling;
  uint32_t child;
  float sum;       // of the node itself, from the root down
  uint32_t place;  // of the candidate: its row of the table << 16 | its rank
};

// Everything by slot, in shared memory.
struct SearchMemory {
  Node* nodes;
  int* parents;
  int* entries;    // index of the slot's token in the table
  uint32_t* keys;  // with tags: the frontier, where it does not fit in registers
  uint32_t* tags;
  float* table;
};

__host__ __device__ constexpr size_t SearchBytes(int budget, int depths, int width) {
  const int arrays = FrontierInRegisters(budget, depths, width) ? 2 : 4;
  const size_t table = TableInShared(depths, width) ? PaddedTable(depths, width) : 0;
  return SlotsOf(budget) * (sizeof(Node) + arrays * sizeof(int)) +
         sizeof(float) * table;
}
constexpr size_t kMostSearchBytes =
    kBuildTreeMaxNodes * (sizeof(Node) + 4 * sizeof(int)) + kTableBytesInShared;

__device__ inline SearchMemory SplitSearchMemory(void* memory, int budget,
                                                 bool frontier_in_registers) {
  SearchMemory m;
  const int n = SlotsOf(budget);
  m.nodes = static_cast<Node*>(memory);
  int* words = reinterpret_cast<int*>(m.nodes + n);
  m.parents = words;
  m.entries = words + n;
  words += 2 * n;
  m.keys = reinterpret_cast<uint32_t*>(words);
  m.tags = m.keys + n;
  if (!frontier_in_registers) words += 2 * n;
  m.table = reinterpret_cast<float*>(words);
  return m;
}

// The table where it was written to: -inf behind its ends. NaN is never taken either.
struct WholeTable {
  const float* entries;
  int depths, width;
  __device__ float operator()(int depth, int rank) const {
    if (depth >= depths || rank >= width) return -INFINITY;
    return fmaxf(__ldcg(entries + static_cast<int64_t>(depth) * width + rank),
                 -INFINITY);
  }
};

// The same in shared memory, padded. After the last rank, rank == width + 1 reads the
// next row's first entry: in bounds, as two rows follow those of the table, and never
// used, since the candidate's own key, of rank == width, is -inf.
struct PaddedInShared {
  const float* entries;
  int stride;
  __device__ float operator()(int depth, int rank) const {
    return entries[depth * stride + rank];
  }
};

// What a lane knows of the candidates of its slots, 32 * j + lane for j < kSlots: the
// key of the sum, and a tag that orders equal sums: post-order index and slot.
template <int kSlots>
struct Frontier {
  __device__ explicit Frontier(const SearchMemory&) {}
  __device__ uint32_t& key(int j) { return keys[j]; }
  __device__ uint32_t& tag(int j) { return tags[j]; }
  uint32_t keys[kSlots], tags[kSlots];
};

// Any number of slots.
template <>
struct Frontier<0> {
  __device__ explicit Frontier(const SearchMemory& m)
      : keys(m.keys + threadIdx.x % 32), tags(m.tags + threadIdx.x % 32) {}
  __device__ uint32_t& key(int j) { return keys[32 * j]; }
  __device__ uint32_t& tag(int j) { return tags[32 * j]; }
  uint32_t *keys, *tags;
};

// Takes up to `take` nodes and returns the slots in use. Called by one whole warp, for
// which 32 * kSlots must be more than `take`, or kSlots 0. `width` of the table.
//
// What a node offers is computed an iteration before it can be needed, so that it is
// there when the node is found; else a node would wait for two more loads.
template <int kSlots, typename Table>
__device__ int Search(const SearchMemory& m, Table table, int width, int take) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kUnroll = kSlots > 0 ? kSlots : 1;
  constexpr uint32_t kOrder = kBuildTreeMaxNodes;  // of tags: index * kOrder + slot
  const int slots = kSlots > 0 ? kSlots : take / 32 + 1;
  const uint32_t lane = threadIdx.x % 32;
  const auto sum_key = [](float a, float b) {
    return KeyOf(fmaxf(Add(a, b), -INFINITY));  // NaN is never taken
  };

  Frontier<kSlots> frontier(m);
#pragma unroll kUnroll
  for (int j = 0; j < slots; ++j) {
    frontier.key(j) = kKeyOfMinusInfinity;
    frontier.tag(j) = 32 * j + lane;
  }
  // At the head of the loop nodes 0 .. slot - 1 are taken. `parent` is the one whose
  // candidate was taken last and became node slot - 1. These two have new candidates:
  // the parent's is (row, rank) of the table, with parent_key as key of its sum, the
  // new node's is (row + 1, 0), with slot_key; parent_sum and slot_sum are the nodes'
  // own. At first there is the root alone, whose candidate is the best token. What is
  // then written for a new node goes to slot 1, which is set again before its use.
  int parent = 0, slot = 1;
  int row = 0, rank = 0;
  float parent_sum = 0.0f, slot_sum = -INFINITY;
  uint32_t parent_key = sum_key(0.0f, table(0, 0)), slot_key = kKeyOfMinusInfinity;
  if (lane == 0) {
    frontier.key(0) = parent_key;
    m.nodes[0].sum = 0.0f;
    m.nodes[0].place = 0;
    m.parents[0] = -1;
    m.entries[0] = 0;
  }
  for (; slot <= take; ++slot) {
    const float next_sibling = table(row, rank + 1), next_child = table(row + 1, 0);
    const float slot_sibling = table(row + 1, 1), slot_child = table(row + 2, 0);
    uint32_t best = kKeyOfMinusInfinity;
#pragma unroll kUnroll
    for (int j = 0; j < slots; ++j) best = max(best, frontier.key(j));
    best = __reduce_max_sync(kAll, best);
    const uint2 parent_offers =
        make_uint2(sum_key(parent_sum, next_sibling),
                   sum_key(FloatOfKey(parent_key), next_child));
    const uint2 slot_offers = make_uint2(sum_key(slot_sum, slot_sibling),
                                         sum_key(FloatOfKey(slot_key), slot_child));
    // The slot's number is one less than now, but at first.
    const int last = max(slot - 1, 1);
    if (lane == 0) {
      *reinterpret_cast<uint2*>(&m.nodes[last]) = slot_offers;
      *reinterpret_cast<uint2*>(&m.nodes[parent]) = parent_offers;
    }
    if (best == kKeyOfMinusInfinity) break;
    // Of equal ones the first in post-order; indices are distinct.
    uint32_t first = 0xffffffffu;
#pragma unroll kUnroll
    for (int j = 0; j < slots; ++j) {
      if (frontier.key(j) == best) first = min(first, frontier.tag(j));
    }
    first = __reduce_min_sync(kAll, first);
    __syncwarp();  // what lane 0 wrote is there
    parent = first % kOrder;
    const uint32_t order = first - parent;
    const Node node = m.nodes[parent];
    row = node.place >> 16;
    rank = node.place & 0xffff;
    parent_sum = node.sum;
    parent_key = node.sibling;
    slot_sum = FloatOfKey(best);
    slot_key = node.child;
#pragma unroll kUnroll
    for (int j = 0; j < slots; ++j) {
      const uint32_t own = 32 * j + lane;
      if (frontier.tag(j) >= order) frontier.tag(j) += kOrder;
      if (own == static_cast<uint32_t>(parent)) frontier.key(j) = parent_key;
      if (own == static_cast<uint32_t>(slot)) {
        frontier.key(j) = slot_key;
        frontier.tag(j) = order + own;
      }
    }
    __syncwarp();  // all have read the node
    if (lane == 0) {
      m.nodes[parent].place = node.place + 1;
      m.nodes[slot].sum = slot_sum;
      m.nodes[slot].place = (row + 1) << 16;
      m.parents[slot] = parent;
      m.entries[slot] = row * width + rank;
    }
    ++rank;
  }
  return slot;
}

// Builds and writes the tree of sequence b. Called by a whole block; `memory` is shared
// and SearchBytes large, and nobody else uses it meanwhile.
__device__ inline void BuildOneTree(const TreeArgs& a, int b, void* memory) {
  __shared__ int size;
  const bool in_shared = TableInShared(a.depths, a.width);
  const bool in_registers = FrontierInRegisters(a.budget, a.depths, a.width);
  const SearchMemory m = SplitSearchMemory(memory, a.budget, in_registers);
  const int64_t first_entry = static_cast<int64_t>(b) * a.depths * a.width;
  const int depths = max(0, min(a.depths, a.max_depth[b * a.max_depth_stride]));
  const int take = max(0, min(a.budget, a.limit[b * a.limit_stride]));
  // Not through L1: another block may have written the table just now.
  const WholeTable whole{a.table + first_entry, depths, a.width};
  const PaddedInShared padded{m.table, a.width + 1};
  if (in_shared) {
    const int entries = static_cast<int>(PaddedTable(a.depths, a.width));
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      m.table[i] = whole(i / padded.stride, i % padded.stride);
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int found;
    if (in_registers) {
      found = Search<kSlotsInRegisters / 32>(m, padded, a.width, take);
    } else if (in_shared) {
      found = Search<0>(m, padded, a.width, take);
    } else {
      found = Search<0>(m, whole, a.width, take);
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
    // A node's candidate lies in the row below the node.
    a.depths_out[first_slot + slot] =
        live ? static_cast<int>(m.nodes[slot].place >> 16) : 0;
    a.log_probs[first_slot + slot] = live ? m.nodes[slot].sum : -INFINITY;
  }
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_BEST_FIRST_CUH_
