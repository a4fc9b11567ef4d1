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
constexpr int kTile = 64;       // keys
constexpr int kGroupDims = 64;  // dimensions in a line of 128 bytes
constexpr int kGroups = kWidth / kGroupDims;
constexpr int kGroupBytes = kTile * 128;  // of a tile, and of 64 queries
constexpr int kWeightBytes = kRows * kTile * 2;  // of a tile

// The order in which a tile's groups are copied and multiplied: the one that no values
// lie in first, then those of both halves of the values in turn.
__host__ __device__ constexpr int GroupAt(int place) {
  return place == 0 ? kGroups - 1 : (place - 1) / 2 + (place - 1) % 2 * 4;
}

// The second operand of products that sum weights: 16 x 8 ones.
constexpr int kOnesBytes = 16 * 8 * 2;
constexpr uint16_t kOne = 0x3f80;

// What the system takes of a block's shared memory, before its own.
constexpr int kReservedShared = 1024;

// Of the kernel in tree_attention_hopper_block.cuh.
constexpr int kThreads = 512;
constexpr int kTileBytes = kGroups * kGroupBytes;
constexpr int kPieces = 5;     // of a tile: a group, and four pairs of groups
constexpr int kToldTiles = 8;  // see Block::Told
__host__ __device__ constexpr int PlaceOfPiece(int piece) {
  return piece == 0 ? 0 : piece * 2 - 1;
}

struct Shared {
  static constexpr int kKeys = 0;  // [tile % 2][group]
  static constexpr int kQueries = 2 * kTileBytes;
  static constexpr int kFactors = kQueries + kGroups * kGroupBytes;  // [tile % 2][row]
  static constexpr int kBases = kFactors + 2 * kRows * 4;            // [tile % 2][row]
  static constexpr int kOnes = kBases + 2 * kRows * 4;
  static constexpr int kTold = kOnes + kOnesBytes;       // [tile % kToldTiles]
  static constexpr int kFull = kTold + kToldTiles * 16;  // [tile % 2][piece]
  static constexpr int kEmpty = kFull + 2 * kPieces * 8;
  static constexpr int kWeightsFull = kEmpty + 2 * kPieces * 8;  // [tile % 2]
  static constexpr int kBaseFull = kWeightsFull + 2 * 8;         // [tile % 2]
  static constexpr int kQueriesFull = kBaseFull + 2 * 8;
  static constexpr int kQueriesEmpty = kQueriesFull + 8;
  static constexpr int kBytes = kQueriesEmpty + 8;
};
static_assert(kTile == kRows, "a box is 64 keys or 64 queries");
static_assert(kWeightBytes <= kGroupBytes, "weights take the place of a group of keys");

// What the kernels need besides the arguments.
struct Params {
  TreeAttentionArgs args;
  CUtensorMap keys;     // boxes of [kTile positions, 64 dimensions]
  CUtensorMap key_pairs;  // boxes of [2 halves of the values, kTile, 64 dimensions]
  CUtensorMap queries;  // boxes of [kRows rows, 64 dimensions]
  int row_tiles;        // of 64 heads, per node
  int items;            // sequence, chunk, row tile
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_
