// How a block of tree attention for Hopper divides its shared memory.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_

#include <cuda.h>

#include <cstdint>

#include "tree_attention.h"

namespace kdtree_jax {
namespace hopper {

constexpr int kWidth = kHopperWidth;
constexpr int kValues = kHopperValueDim;
constexpr int kRows = kHopperRows;
constexpr int kTile = 32;       // keys
constexpr int kGroupDims = 64;  // dimensions in a line of 128 bytes
constexpr int kGroups = kWidth / kGroupDims;
constexpr int kGroupBytes = kTile * 128;
constexpr int kTileBytes = kGroups * kGroupBytes;
constexpr int kQueryGroupBytes = kRows * 128;
constexpr int kWeightBytes = kRows * kTile * 2;  // of one tile

// Of the kernel in tree_attention_hopper_block.cuh.
constexpr int kThreads = 512;
constexpr int kStages = 5;
constexpr int kSlots = 3;        // of weights on their way to the values' warps
constexpr int kInRegisters = 5;  // groups of Q; the others lie in shared memory
constexpr int kQueryStages = 2;  // of the ring, that bring the former: 32 rows each

struct Shared {
  static constexpr int kStage = 0;
  static constexpr int kQueries = kStages * kTileBytes;
  static constexpr int kWeights =
      kQueries + (kGroups - kInRegisters) * kQueryGroupBytes;
  static constexpr int kFactors = kWeights + kSlots * kWeightBytes;  // [slot][row]
  static constexpr int kFull = kFactors + kSlots * kRows * 4;
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kWeightsFull = kEmpty + kStages * 8;
  static constexpr int kWeightsEmpty = kWeightsFull + kSlots * 8;
  static constexpr int kQueriesFull = kWeightsEmpty + kSlots * 8;
  static constexpr int kQueriesEmpty = kQueriesFull + 8;
  static constexpr int kBytes = kQueriesEmpty + 8 + 1024;  // and to begin at 1024
};

// What the kernels need besides the arguments.
struct Params {
  TreeAttentionArgs args;
  CUtensorMap keys;     // boxes of [groups, kTile positions, 64 dimensions]
  CUtensorMap values;   // boxes of [1 group, kTile positions, 64 dimensions]
  CUtensorMap queries;  // boxes of [1 group, 32 rows, 64 dimensions]
  int row_tiles;        // of 64 heads, per node
  int items;            // of the persistent kernel: sequence, chunk, pair of row tiles
  int pairs;
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_
