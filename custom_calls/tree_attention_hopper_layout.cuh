// How a block of tree attention for Hopper divides its shared memory.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_

#include <cuda.h>

#include <algorithm>
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

// What the system takes of a block's shared memory, before its own.
constexpr int kReservedShared = 1024;

// Of the kernel in tree_attention_hopper_block.cuh.
constexpr int kThreads = 512;
constexpr int kTileBytes = kGroups * kGroupBytes;
constexpr int kPieces = 5;     // of a tile: a group, and four pairs of groups
// Of Block::Told: a tile's is read after its place was given back, and one is in either
// place then.
constexpr int kToldTiles = 8;
__host__ __device__ constexpr int PlaceOfPiece(int piece) {
  return piece == 0 ? 0 : piece * 2 - 1;
}

struct Shared {
  static constexpr int kKeys = 0;  // [tile % 2][group]
  static constexpr int kQueries = 2 * kTileBytes;
  // [tile % 2][row]
  static constexpr int kReferences = kQueries + kGroups * kGroupBytes;
  static constexpr int kTold = kReferences + 2 * kRows * 4;  // [tile % kToldTiles]
  static constexpr int kFull = kTold + kToldTiles * 16;  // [tile % 2][piece]
  static constexpr int kEmpty = kFull + 2 * kPieces * 8;
  static constexpr int kWeightsFull = kEmpty + 2 * kPieces * 8;  // [tile % 2]
  static constexpr int kQueriesFull = kWeightsFull + 2 * 8;
  static constexpr int kQueriesEmpty = kQueriesFull + 8;
  static constexpr int kBytes = kQueriesEmpty + 8;
};
static_assert(kTile == kRows, "a box is 64 keys or 64 queries");
static_assert(kWeightBytes <= kGroupBytes, "weights take the place of a group of keys");

// Of the kernel in tree_attention_hopper_split.cuh.
constexpr int kSplitThreads = 384;

// What the values' warps need of one tile.
struct Message {
  static constexpr int kReferences = kWeightBytes;  // after the weights
  static constexpr int kBytes = kReferences + kRows * 4;
};
static_assert(Message::kBytes == kHopperMessageBytes, "the workspace's size");

template <int kSplit>
struct SplitShared {
  static constexpr int kColumnGroups = kValues / 64 / kSplit;  // of 64, a block's
  // With half of the columns, scores take these of the block's tiles' keys from where
  // their values lie.
  static constexpr bool kKeysAreValues = kSplit == 2;
  static constexpr int kKeyGroups = kKeysAreValues ? kGroups - kColumnGroups : kGroups;
  static constexpr int kKeyBuffers = kKeysAreValues ? 8 : 12;  // of a group each
  static constexpr int kValueStages = kSplit == 2 ? 4 : kSplit == 4 ? 6 : 5;  // of a tile
  static constexpr int kSlots = kSplit == 2 ? 2 : 1;  // for a block's weights
  static constexpr int kValueBytes = kColumnGroups * kGroupBytes;
  static constexpr int kKeys = 0;
  static constexpr int kTheValues = kKeys + kKeyBuffers * kGroupBytes;
  // [slot][block that formed them]
  static constexpr int kMessages = kTheValues + kValueStages * kValueBytes;
  static constexpr int kKeysFull = kMessages + kSlots * kSplit * Message::kBytes;
  static constexpr int kKeysEmpty = kKeysFull + kKeyBuffers * 8;
  static constexpr int kValuesFull = kKeysEmpty + kKeyBuffers * 8;
  static constexpr int kValuesEmpty = kValuesFull + kValueStages * 8;
  static constexpr int kMessagesFull = kValuesEmpty + kValueStages * 8;  // as kMessages
  // [slot], of the block's own by all
  static constexpr int kMessagesTaken = kMessagesFull + kSlots * kSplit * 8;
  static constexpr int kBytes = kMessagesTaken + kSlots * 8;
  static constexpr int kBarriers = (kBytes - kKeysFull) / 8;

  // Where the weights of tile t lie, and their barriers; and these barriers' phase.
  __device__ __forceinline__ static int MessageOf(int t) {
    return kMessages + PlaceOf(t) * Message::kBytes;
  }
  __device__ __forceinline__ static int MessageFullOf(int t) {
    return kMessagesFull + PlaceOf(t) * 8;
  }
  __device__ __forceinline__ static int MessageTakenOf(int t) {
    return kMessagesTaken + t / kSplit % kSlots * 8;
  }
  __device__ __forceinline__ static int MessagePhase(int t) {
    return t / kSplit / kSlots % 2;
  }

 private:
  __device__ __forceinline__ static int PlaceOf(int t) {
    return t / kSplit % kSlots * kSplit + t % kSplit;
  }
};
constexpr int kSplitBytes =
    std::max({SplitShared<2>::kBytes, SplitShared<4>::kBytes, SplitShared<8>::kBytes});
static_assert(kSplitBytes <= 232448, "more than a block may have");

// What the kernels need besides the arguments.
struct Params {
  TreeAttentionArgs args;
  CUtensorMap keys;       // boxes of [kTile positions, 64 dimensions]
  CUtensorMap key_pairs;  // boxes of [2 halves of the values, kTile, 64 dimensions]
  CUtensorMap queries;    // boxes of [kRows rows, 64 dimensions]
  int row_tiles;          // of 64 heads, per node
  int first, end;         // of the items: sequence, chunk, row tile
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_LAYOUT_CUH_
