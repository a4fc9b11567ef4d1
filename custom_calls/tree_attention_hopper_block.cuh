// A block of tree attention for Hopper that keeps a whole node's accumulator: 64 rows
// by 512 columns. Persistent: it walks over items, each a tile of 64 rows and one chunk
// of positions, in tiles of 64 keys. Four warpgroups:
//
//   scores   two, S = Q K^T and the softmax of every other tile each, so the products of
//            one lie beside the softmax of the other. They start the copies of their
//            tiles. The weights go through shared memory to
//   values   two, O += P V for half of the columns each.
//
// Shared memory has room for two tiles' keys, one for each scores warpgroup. A tile
// comes in five pieces: the 64 dimensions without values, which are multiplied first and
// whose place the tile's weights take; then 64 dimensions of either half of the values,
// four times. Each place is free for the tile after the next as soon as the weights are
// read, or the products with the values are done.
//
// Tiles that reach the length are gathered. Each item has two tiles at least, of which
// the second may be empty, so that each scores warpgroup has one.
//
// A place is full after one arrival and the bytes that were announced, and empty after
// kReaders arrivals. Who waits for a phase must know that the one before has ended, or
// would take that before it for it: all here wait for all phases, or for others that
// end later.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_BLOCK_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_BLOCK_CUH_

#include <cmath>

#include "bulk_copy.cuh"
#include "mma.cuh"
#include "tree_attention_hopper_item.cuh"
#include "tree_attention_hopper_layout.cuh"
#include "tree_attention_hopper_softmax.cuh"
#include "wgmma.cuh"

namespace kdtree_jax {
namespace hopper {

class Block {
  static constexpr int kReaders = 8;  // warps that add values
  // Where dynamic shared memory begins: addresses that are constants need no registers.
  static constexpr uint32_t kShared = kReservedShared;

 public:
  __device__ Block(const Params& p, char* shared)
      : p_(p),
        a_(p.args),
        shared_(shared),
        thread_(threadIdx.x % 128),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ __forceinline__ void Run() {
    if (SharedAddress(shared_) != kShared) __trap();
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * kPieces; ++i) {
        InitBarrier(kShared + Shared::kFull + i * 8, 1);
        InitBarrier(kShared + Shared::kEmpty + i * 8, kReaders * kArrivingLanes);
      }
      for (int i = 0; i < 2; ++i) {
        InitBarrier(kShared + Shared::kWeightsFull + i * 8, 4 * kArrivingLanes);
      }
      InitBarrier(kShared + Shared::kQueriesFull, 1);
      InitBarrier(kShared + Shared::kQueriesEmpty, 8 * kArrivingLanes);
      FenceBarrierInit();
    }
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == 0) {
      GiveRegisters<80>();
      Score<0>();
    } else if (group == 1) {
      GiveRegisters<80>();
      Score<1>();
    } else if (group == 2) {
      TakeRegisters<176>();
      AddValues<0>();
    } else {
      TakeRegisters<176>();
      AddValues<1>();
    }
  }

 private:
  // Piece `piece` of the tiles of scores warpgroup `which`.
  __device__ __forceinline__ uint32_t At(int which, int piece) const {
    return kShared + which * kTileBytes + PlaceOfPiece(piece) * kGroupBytes;
  }
  __device__ __forceinline__ uint32_t Full(int which, int piece) const {
    return kShared + Shared::kFull + (which * kPieces + piece) * 8;
  }
  __device__ __forceinline__ uint32_t Empty(int which, int piece) const {
    return kShared + Shared::kEmpty + (which * kPieces + piece) * 8;
  }

  // What a scores warpgroup says of a tile to those that add values.
  struct alignas(16) Told {
    int flags;  // of the following
    int row;    // the first, of all rows
    int place;  // chunk * 128 + rows
  };
  enum : int {
    kFirst = 1,  // tile of the item
    kLast = 2,   // tile of the item that the node needs
    kSkip = 4,   // It is empty.
    kEnd = 8,    // There is none.
  };
  __device__ __forceinline__ Told* ToldOf(int number) const {
    return reinterpret_cast<Told*>(shared_ + Shared::kTold) + number % kToldTiles;
  }

  __device__ __forceinline__ char* References(int which) const {
    return shared_ + Shared::kReferences + which * kRows * 4;
  }

  // Row `row` of a tile in the workspace, counted in chunks.
  __device__ __forceinline__ int64_t PartialOf(const Told& tile, int row) const {
    return static_cast<int64_t>(tile.row + row) * a_.chunks + tile.place / 128;
  }

  // ---- Copies, of a scores warpgroup's own tiles.

  // A piece of a tile below the length; to be called by a thread. `phase` is the one in
  // which it becomes full.
  __device__ __forceinline__ void CopyPiece(int which, int phase, int piece, int batch,
                                            int position) {
    const uint32_t full = Full(which, piece), to = At(which, piece);
    WaitForPhase(Empty(which, piece), phase ^ 1);
    ArriveExpecting(full, (piece == 0 ? 1 : 2) * kGroupBytes);
    if (piece == 0) {
      CopyBox4(to, &p_.keys, 0, position, kGroups - 1, batch, full);
    } else {
      CopyBox5(to, &p_.key_pairs, 0, position, 0, piece - 1, batch, full);
    }
  }

  // A tile that reaches the length, by all threads. Its end is awaited.
  template <int which>
  __device__ __forceinline__ void Gather(int phase, int i, int t) {
    const Item item = FindItem(p_, i);
#pragma unroll 1
    for (int piece = 0; piece < kPieces && thread_ == 0; ++piece) {
      WaitForPhase(Empty(which, piece), phase ^ 1);
    }
    WarpsSync(1 + which, 128);
    if (t < item.tiles) {
      const ScatteredTile tile(a_, item, t, lane_);
#pragma unroll 1
      for (int place = warp_; place < kGroups; place += 4) {
        tile.CopyGroup(GroupAt(place),
                       kShared + which * kTileBytes + place * kGroupBytes);
      }
      tile.Finish();
    }
    WarpsSync(1 + which, 128);
#pragma unroll 1
    for (int piece = 0; piece < kPieces && thread_ == 0; ++piece) {
      Arrive(Full(which, piece));
    }
    __syncwarp();
  }

  // Queries lie in the order of keys.
  __device__ __forceinline__ void CopyQueries(int row, int phase) {
    const uint32_t full = kShared + Shared::kQueriesFull;
    WaitForPhase(kShared + Shared::kQueriesEmpty, phase ^ 1);
    ArriveExpecting(full, kGroups * kGroupBytes);
#pragma unroll 1
    for (int place = 0; place < kGroups; ++place) {
      CopyBox4(kShared + Shared::kQueries + place * kGroupBytes, &p_.queries, 0,
               row % a_.heads, GroupAt(place), row / a_.heads, full);
    }
  }

  // ---- Scores.

  // Tiles go to the two warpgroups in turn, from item to item.
  template <int which>
  __device__ __forceinline__ void Score() {
    const Items items(p_);
    int number = 0;         // of tiles so far
    int queries_phase = 0;  // of the item's queries
#pragma unroll 1
    for (int i = items.First(); i < p_.end; i = items.Next(i)) {
      int tiles, prefix, keys, start, batch, row, place;
      {
        const Item item = FindItem(p_, i);
        tiles = item.tiles;
        if (tiles == 0) continue;
        prefix = item.prefix;
        keys = item.limit - item.start;
        start = item.start;
        batch = item.batch;
        row = (item.batch * a_.nodes + item.node) * a_.heads + item.head;
        place = item.chunk * 128 + min(kRows, a_.heads - item.head);
      }
      const int rounds = max(tiles, 2);
#pragma unroll 1
      for (int t = (number ^ which) & 1; t < rounds; t += 2) {
        const int phase = (number + t) / 2 % 2;
        const bool copies = t < prefix && lane_ == 0;
        if (t >= prefix) Gather<which>(phase, i, t);
        const int flags = (t == 0 ? kFirst : 0) | (t == tiles - 1 ? kLast : 0) |
                          (t >= tiles ? kSkip : 0);
        float s[kScores];
        if (t < tiles) {
          Multiply<which>(s, phase, copies, t, batch, start + t * kTile, row,
                          queries_phase);
        } else {
          Skip<which>(phase, t, queries_phase);
        }
        if (t + 2 >= rounds) ArriveAsWarp(kShared + Shared::kQueriesEmpty);
        if (thread_ == 0) {
          ToldOf(number + t)->flags = flags;
          if (flags & kLast) {
            ToldOf(number + t)->row = row;
            ToldOf(number + t)->place = place;
          }
        }
        __syncwarp();
        if (t < tiles) Finish<which>(s, keys - t * kTile);
        ArriveAsWarp(kShared + Shared::kWeightsFull + which * 8);
      }
      number += rounds;
      queries_phase ^= 1;
    }
    if ((number ^ which) & 1) return;  // The other one tells it.
    // They have passed this warpgroup's last tile, or would take this phase for that.
    WaitForPhase(Empty(which, 0), number / 2 % 2 ^ 1);
    if (thread_ == 0) ToldOf(number)->flags = kEnd;
    ArriveAsWarp(kShared + Shared::kWeightsFull + which * 8);
  }

  // An empty tile.
  template <int which>
  __device__ __forceinline__ void Skip(int phase, int t, int queries_phase) {
    if (t < 2) WaitForPhase(kShared + Shared::kQueriesFull, queries_phase);
    for (int piece = 0; piece < kPieces; ++piece) {
      WaitForPhase(Full(which, piece), phase);
    }
    __syncwarp();
  }

  // S = Q K^T of tile t. A thread of each warp starts copies: one takes longer to start
  // than a product.
  template <int which>
  __device__ __forceinline__ void Multiply(float (&s)[kScores], int phase, bool copies,
                                           int t, int batch, int position, int row,
                                           int queries_phase) {
    if (copies) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        if (warp_ == (piece == 0 ? 0 : piece - 1)) {
          CopyPiece(which, phase, piece, batch, position);
        }
      }
    }
    __syncwarp();
    if (t < 2) {
      if (t == 0 && thread_ == 0) CopyQueries(row, queries_phase);
      WaitForPhase(kShared + Shared::kQueriesFull, queries_phase);
    }
    const Operand queries = Swizzled128(kShared + Shared::kQueries);
    const Operand keys = Swizzled128(kShared + which * kTileBytes);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      WaitForPhase(Full(which, piece), phase);
      WgmmaFence();
      const int groups = piece == 0 ? 1 : 2;
#pragma unroll
      for (int k = 0; k < 4 * groups; ++k) {
        const int from = (PlaceOfPiece(piece) + k / 4) * kGroupBytes + k % 4 * 32;
        Wgmma(s, queries.At(from), keys.At(from), piece > 0 || k > 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepBehind(s);
  }

  // From scores to weights. `keys`: how many the node sees, from the tile's first on.
  template <int which>
  __device__ __forceinline__ void Finish(float (&s)[kScores], int keys) {
    if (keys < kTile) Mask(s, keys - lane_ % 4 * 2);
    float top[2];
    FindReferences(s, a_.scale, top);
    FormWeights(s, a_.scale, top);
    StoreReferences(top, References(which), thread_);
    // No warp reads the keys any more that the weights replace.
    WarpsSync(1 + which, 128);
    StoreWeights(s, shared_ + which * kTileBytes, thread_);
  }

  // ---- Values.

  template <int half>
  __device__ __forceinline__ void AddValues() {
    float out[2][64], sums[2], base[2];
#pragma unroll 1
    for (int number = 0;; number += 2) {
      if (!AddTileIfAny<half, 0>(out, sums, base, number)) return;
      if (!AddTileIfAny<half, 1>(out, sums, base, number + 1)) return;
    }
  }

  template <int half, int which>
  __device__ __forceinline__ bool AddTileIfAny(float (&out)[2][64], float (&sums)[2],
                                               float (&base)[2], int number) {
    WaitForPhase(kShared + Shared::kWeightsFull + which * 8, number / 2 % 2);
    const int flags = ToldOf(number)->flags;
    if (flags & kEnd) return false;
    if (flags & kSkip) {
      __syncwarp();
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) Release(which, piece);
    } else {
      AddTile<half, which>(out, sums, base, !(flags & kFirst));
      if (flags & kLast) StoreOutput<half>(*ToldOf(number), out, sums, base);
    }
    return true;
  }

  // This warp's products have read a piece, or its lanes have behind __syncwarp.
  __device__ __forceinline__ void Release(int which, int piece) {
    if (lane_ < kArrivingLanes) Arrive(Empty(which, piece));
  }

  // O += P V of one tile, whose weights are those of scores warpgroup `which`. The first
  // half sums the weights.
  template <int half, int which>
  __device__ __forceinline__ void AddTile(float (&out)[2][64], float (&sums)[2],
                                          float (&base)[2], bool add) {
    float top[2];
    LoadReferences(References(which), thread_, top);
    uint32_t weights[kKeySteps][4];
    LoadWeights(shared_ + which * kTileBytes, thread_, weights);
    if (!add) {
      base[0] = base[1] = -INFINITY;
      sums[0] = sums[1] = 0.f;
    }
    const float factor[2] = {Follow(base[0], top[0]), Follow(base[1], top[1])};
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f) && add) {
#pragma unroll
      for (int j = 0; j < 128; ++j) {
        float& x = out[j / 64][j % 64];
        x = __fmul_rn(x, factor[RowOf(j)]);
      }
    }
    ChangeReferences(weights, top, base);
    const Operand values = Swizzled128(
        kShared + which * kTileBytes + (1 + half) * kGroupBytes, 2 * kGroupBytes);
    WgmmaFence();
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // of pieces
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
        WgmmaByKey(out[pair], weights[k],
                   values.At(pair * 4 * kGroupBytes + k * 16 * 128), add || k > 0);
      }
      WgmmaCommit();
    }
    FenceForProducts();  // It is bulk copies that write there next.
    __syncwarp();
    Release(which, 0);
    if (half == 0) AddWeights(weights, factor, sums);
    WgmmaWait<1>();
    Release(which, 1);
    Release(which, 2);
    WgmmaWait<0>();
    Release(which, 3);
    Release(which, 4);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) KeepBehind(out[pair]);
    KeepUntilHere(weights);
  }

  template <int half>
  __device__ __forceinline__ void StoreOutput(const Told& tile,
                                              const float (&out)[2][64],
                                              const float (&sums)[2],
                                              const float (&base)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = half == 0 ? SumOfRow(sums[r]) : 0.f;
      const int row = warp_ * 16 + lane_ / 4 + r * 8;
      if (row >= tile.place % 128) continue;
      const int64_t partial = PartialOf(tile, row);
      if (half == 0 && lane_ % 4 == 0) {
        a_.sums[partial] = sum;
        a_.maxima[partial] = base[r];
      }
      float* to = a_.accumulators + partial * kValues + half * 256 + lane_ % 4 * 2;
#pragma unroll
      for (int c = 0; c < 32; ++c) {
        *reinterpret_cast<float2*>(to + c * 8) =
            make_float2(out[c / 16][c % 16 * 4 + r * 2],
                        out[c / 16][c % 16 * 4 + r * 2 + 1]);
      }
    }
  }

  const Params& p_;
  const TreeAttentionArgs& a_;
  char* const shared_;
  const int thread_, warp_, lane_;
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_BLOCK_CUH_
