// A cluster of c = 2, 4 or 8 blocks for one row tile and one chunk, where there are too
// few of them to fill the GPU. Block r forms the scores and weights of tiles r, r + c,
// .. and sums the values of all tiles for its 512 / c columns. Three warpgroups:
//
//   copies   three warps: tiles for the scores, the block's columns of all tiles, and
//            the weights to the other blocks.
//   scores   S = Q K^T, with Q in registers, and the softmax.
//   values   O += P V.
//
// Each score, weight and sum comes about as in tree_attention_hopper_block.cuh, so
// which kernel runs does not show in the bits.
//
// A tile's weights have the same place in all blocks of the cluster. Whoever forms them
// writes them to its own, from where the block's values take them as they are and a copy
// brings them to the others. The next ones to this place follow when all warps that add
// values, of all blocks, have taken the last. By then each block expects them. An item's
// first weights may come before their barrier expects them, but its phase does not end
// without that arrival.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_SPLIT_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_SPLIT_CUH_

#include <cmath>

#include "bulk_copy.cuh"
#include "mma.cuh"
#include "tree_attention_hopper_item.cuh"
#include "tree_attention_hopper_layout.cuh"
#include "tree_attention_hopper_softmax.cuh"
#include "wgmma.cuh"

namespace kdtree_jax {
namespace hopper {

// `shared` must lie on a multiple of 1024.
template <int kSplit>
class SplitBlock {
  using S = SplitShared<kSplit>;
  static constexpr int kColumnGroups = S::kColumnGroups;
  static constexpr int kColumns = kColumnGroups * 64;
  static constexpr int kValueStages = S::kValueStages;
  // Columns are added in products of up to 128.
  static constexpr int kParts = kColumns == 256 ? 2 : 1;
  static constexpr int kResults = kColumns / 2 / kParts;  // a thread's, of a part
  using Sums = float[kParts][kResults];
  static constexpr bool kOneSet = S::kKeysAreValues;  // of weights, see AddValues
  using KeyTurn = Turn<S::kKeyBuffers>;
  using ValueTurn = Turn<kValueStages>;

 public:
  __device__ __forceinline__ SplitBlock(const Params& p, char* shared)
      : p_(p),
        a_(p.args),
        shared_(shared),
        address_(SharedAddress(shared)),
        rank_(ClusterRank()),
        thread_(threadIdx.x % 128),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ __forceinline__ void Run() {
    const int group = threadIdx.x / 128;
    if (group == 0) {
      // Of 3 x 168. Those of the values keep theirs, unless they have many columns.
      GiveRegisters<kSplit == 2 ? 80 : 96>();
      ForItems([&] {
        if (warp_ == 0) CopyKeys();
        if (warp_ == 1) CopyValues();
        if (warp_ == 2) SendMessages();
      });
    } else if (group == 1) {
      TakeRegisters<240>();
      ForItems([&] { Score(); });
    } else {
      if (kSplit == 2) TakeRegisters<184>();
      ForItems([&] { AddValues(); });
    }
  }

 private:
  // Calls `work` for each item of the cluster, in all warps at a time.
  template <typename Work>
  __device__ __forceinline__ void ForItems(Work work) {
    bool first = true;
#pragma unroll 1
    for (int i = p_.first + blockIdx.x / kSplit; i < p_.end; i += gridDim.x / kSplit) {
      item_ = FindItem(p_, i);
      if (item_.tiles == 0) continue;  // As do all blocks of the cluster.
      if (threadIdx.x == 0) SetBarriers(first);
      first = false;
      ClusterSync();
      work();
      __syncwarp();
      ClusterSync();  // No block may end, or begin, while another sends it something.
    }
  }

  __device__ __forceinline__ void SetBarriers(bool first) {
    if (!first) {
#pragma unroll 1
      for (int k = 0; k < S::kBarriers; ++k) EndBarrier(address_ + S::kKeysFull + k * 8);
    }
    for (int k = 0; k < S::kKeyBuffers; ++k) {
      InitBarrier(address_ + S::kKeysFull + k * 8, 1);
      InitBarrier(address_ + S::kKeysEmpty + k * 8, 4 * kArrivingLanes);
    }
    for (int k = 0; k < kValueStages; ++k) {
      InitBarrier(address_ + S::kValuesFull + k * 8, 1);
      InitBarrier(address_ + S::kValuesEmpty + k * 8, 4 * kArrivingLanes);
    }
    // The block's own weights are full when the warps that formed them say so, others
    // when they have come.
    for (int k = 0; k < S::kSlots * kSplit; ++k) {
      InitBarrier(address_ + S::kMessagesFull + k * 8,
                  k % kSplit == rank_ ? 4 * kArrivingLanes : 1);
    }
    for (int k = 0; k < S::kSlots; ++k) {
      InitBarrier(address_ + S::kMessagesTaken + k * 8, kSplit * 4 * kArrivingLanes);
    }
    FenceBarrierInit();
  }

  // ---- Copies. One lane waits and starts copies, except for gathered tiles. Keys are
  // read twice, by the block that forms a tile's scores and as values, but for the first
  // of a tile's groups and, where S::kKeysAreValues, the block's columns of its tiles.

  __device__ __forceinline__ uint32_t Keys(const KeyTurn& turn) const {
    return address_ + S::kKeys + turn.place * kGroupBytes;
  }
  __device__ __forceinline__ uint32_t KeysFull(const KeyTurn& turn) const {
    return address_ + S::kKeysFull + turn.place * 8;
  }
  __device__ __forceinline__ uint32_t KeysEmpty(const KeyTurn& turn) const {
    return address_ + S::kKeysEmpty + turn.place * 8;
  }

  // Whether the group of keys at this place comes to the buffers of keys: see GroupAt.
  __device__ __forceinline__ bool IsBuffered(int place) const {
    return !S::kKeysAreValues || place == 0 || place % 2 == rank_;
  }

  __device__ __forceinline__ uint32_t Values(int stage) const {
    return address_ + S::kTheValues + stage * S::kValueBytes;
  }
  __device__ __forceinline__ uint32_t ValuesFull(int stage) const {
    return address_ + S::kValuesFull + stage * 8;
  }
  __device__ __forceinline__ uint32_t ValuesEmpty(int stage) const {
    return address_ + S::kValuesEmpty + stage * 8;
  }

  __device__ __forceinline__ uint32_t MessageFull(int t) const {
    return address_ + S::MessageFullOf(t);
  }
  __device__ __forceinline__ uint32_t MessageTaken(int t) const {
    return address_ + S::MessageTakenOf(t);
  }

  // Queries come through the buffers of keys, as the first tile.
  __device__ __forceinline__ void CopyKeys() {
    KeyTurn turn;
    if (lane_ == 0) {
      CopyGroups(&p_.queries, item_.head, item_.batch * a_.nodes + item_.node, true,
                 turn);
    }
    turn.Next(kGroups);
#pragma unroll 1
    for (int t = rank_; t < item_.tiles; t += kSplit) {
      if (t >= item_.prefix) {
        GatherKeys(t, turn);
      } else if (lane_ == 0) {
        CopyGroups(&p_.keys, item_.start + t * kTile, item_.batch, false, turn);
      }
      __syncwarp();
      turn.Next(S::kKeyGroups);
    }
  }

  __device__ __forceinline__ void CopyGroups(const CUtensorMap* map, int row, int of,
                                             bool all, KeyTurn turn) {
#pragma unroll 1
    for (int place = 0; place < kGroups; ++place) {
      if (!all && !IsBuffered(place)) continue;
      WaitForPhase(KeysEmpty(turn), turn.phase ^ 1);
      ArriveExpecting(KeysFull(turn), kGroupBytes);
      CopyBox4(Keys(turn), map, 0, row, GroupAt(place), of, KeysFull(turn),
               place == 0 ? EvictFirst() : EvictNormal());
      turn.Next();
    }
  }

  // Takes all of the tile's buffers before it tells of any. They do become free: no one
  // waits for this tile to release the one before.
  __device__ __forceinline__ void GatherKeys(int t, KeyTurn turn) {
    const ScatteredTile tile(a_, item_, t, lane_);
    KeyTurn full = turn;
#pragma unroll 1
    for (int place = 0; place < kGroups; ++place) {
      if (!IsBuffered(place)) continue;
      WaitAsWarp(KeysEmpty(turn), turn.phase ^ 1);
      tile.CopyGroup(GroupAt(place), Keys(turn));
      turn.Next();
    }
    tile.Finish();
#pragma unroll 1
    for (int k = 0; k < S::kKeyGroups; ++k, full.Next()) {
      if (lane_ == 0) Arrive(KeysFull(full));
    }
  }

  __device__ __forceinline__ void CopyValues() {
    ValueTurn turn;
    const int first = rank_ * kColumnGroups;
#pragma unroll 1
    for (int t = 0; t < item_.tiles; ++t) {
      const uint32_t to = Values(turn.place), full = ValuesFull(turn.place);
      const uint32_t empty = ValuesEmpty(turn.place);
      if (t >= item_.prefix) {
        WaitAsWarp(empty, turn.phase ^ 1);
        const ScatteredTile tile(a_, item_, t, lane_);
#pragma unroll 1
        for (int g = 0; g < kColumnGroups; ++g) {
          tile.CopyGroup(first + g, to + g * kGroupBytes);
        }
        tile.Finish();
        if (lane_ == 0) Arrive(full);
      } else if (lane_ == 0) {
        WaitForPhase(empty, turn.phase ^ 1);
        ArriveExpecting(full, S::kValueBytes);
        for (int g = 0; g < kColumnGroups; ++g) {
          CopyBox4(to + g * kGroupBytes, &p_.keys, 0, item_.start + t * kTile,
                   first + g, item_.batch, full, EvictFirst());
        }
      }
      __syncwarp();
      turn.Next();
    }
  }

  // Sends the weights of the block's own tiles to the others: to one directly, to several
  // by way of memory, from where one copy reaches all.
  __device__ __forceinline__ void SendMessages() {
    if (lane_ != 0) return;
    char* const place = static_cast<char*>(a_.messages) +
                        static_cast<int64_t>(blockIdx.x) * Message::kBytes;
#pragma unroll 1
    for (int t = rank_; t < item_.tiles; t += kSplit) {
      const uint32_t message = address_ + S::MessageOf(t), full = MessageFull(t);
      WaitForPhase(full, S::MessagePhase(t));
      if (kSplit == 2) {
        CopyBulkToBlock(message, Message::kBytes, full, rank_ ^ 1);
      } else {
        static_assert(kSplit == 2 || S::kSlots == 1, "one at a time has the place");
        StoreBulk(place, message, Message::kBytes);
        FenceForCopies();
        CopyBulkToAll(message, place, Message::kBytes, full,
                      ((1 << kSplit) - 1) ^ (1 << rank_));
      }
    }
  }

  // ---- Scores.

  // This block's tiles, one after the other: a tile's weights leave as soon as they can,
  // and do not wait for the next one's keys. Meanwhile these come.
  __device__ __forceinline__ void Score() {
    KeyTurn turn;
    uint32_t q[kGroups * 4][4];
    float s[kScores];
    LoadQueries(q, turn);
    // In registers that a warp shares: others are few.
    item_.prefix = __reduce_max_sync(~0u, item_.prefix);
    item_.tiles = __reduce_max_sync(~0u, item_.tiles);
#pragma unroll 1
    for (int t = rank_; t < item_.tiles; t += kSplit) {
      Multiply(t, s, q, turn);
      SendWeights(t, s);
    }
  }

  __device__ __forceinline__ void LoadQueries(uint32_t (&q)[kGroups * 4][4],
                                              KeyTurn& turn) {
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int place = 0; place < kGroups; ++place) {
      WaitForPhase(KeysFull(turn), turn.phase);
      const uint32_t from = Keys(turn) + row * 128;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int piece = k * 2 + lane_ / 16;
        LoadMatrix4(q[place * 4 + k], from + (piece ^ (row & 7)) * 16);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) WaitForLoads(q[place * 4 + k]);
      ReleaseKeys(turn);
    }
  }

  __device__ __forceinline__ void ReleaseKeys(KeyTurn& turn) {
    ArriveAsWarp(KeysEmpty(turn));
    turn.Next();
  }

  // S = Q K^T of tile t. Keys go back while later products are under way.
  __device__ __forceinline__ void Multiply(int t, float (&s)[kScores],
                                           const uint32_t (&q)[kGroups * 4][4],
                                           KeyTurn& turn) {
    KeyTurn done = turn;
    const int stage = t % kValueStages;
#pragma unroll
    for (int place = 0; place < kGroups; ++place) {
      // Without a branch, at which the compiler would wait for products.
      const bool buffered = IsBuffered(place);
      WaitForPhase(buffered ? KeysFull(turn) : ValuesFull(stage),
                   buffered ? turn.phase : t / kValueStages % 2);
      const Operand keys = Swizzled128(
          buffered ? Keys(turn) : Values(stage) + (place - 1) / 2 * kGroupBytes);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma(s, q[place * 4 + k], keys.At(k * 32), place + k > 0);
      }
      turn.Next(buffered);
      if (place % 3 == 2) WgmmaCommit();
    }
    EndThird<0>(done);
    EndThird<1>(done);
    EndThird<2>(done);
    KeepBehind(s);
    KeepUntilHere(q);
  }

  // Keys that are values too go back with these.
  template <int third>
  __device__ __forceinline__ void EndThird(KeyTurn& done) {
    WgmmaWait<2 - third>();
#pragma unroll
    for (int place = third * 3; place < third * 3 + 3; ++place) {
      if (IsBuffered(place)) ReleaseKeys(done);
    }
  }

  // From the scores of tile t to weights, for the block's own values and SendMessages.
  __device__ __forceinline__ void SendWeights(int t, float (&s)[kScores]) {
    if (t >= item_.prefix) {
      Mask(s, item_.limit - item_.start - t * kTile - lane_ % 4 * 2);
    }
    float top[2];
    FindReferences(s, a_.scale, top);
    FormWeights(s, a_.scale, top);
    WaitForPhase(MessageTaken(t), S::MessagePhase(t) ^ 1);
    char* message = shared_ + S::MessageOf(t);
    StoreWeights(s, message, thread_);
    StoreReferences(top, message + Message::kReferences, thread_);
    FenceForProducts();
    ArriveAsWarp(MessageFull(t));
  }

  // ---- Values.

  // Tiles in turn have one of two sets of registers for their weights: products read
  // them until they end. With half of the columns there is one set, and each tile's
  // products end before the next: what they read goes back sooner, for the block's scores
  // to have their next keys there.
  __device__ __forceinline__ void AddValues() {
    if (thread_ < S::kSlots * kSplit && thread_ % kSplit != rank_) {
      ArriveExpecting(address_ + S::kMessagesFull + thread_ * 8, Message::kBytes);
    }
    ValueTurn turn, done;
    Sums out;
    float sums[2] = {0.f, 0.f};
    float base[2] = {-INFINITY, -INFINITY};
    uint32_t even[kKeySteps][4], odd[kKeySteps][4] = {};
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) out[j / kResults][j % kResults] = 0.f;
    int t = 0;
#pragma unroll 1
    for (; t + 2 <= item_.tiles; t += 2) {
      AddTile(t, out, even, odd, sums, base, turn, done);
      AddTile(t + 1, out, kOneSet ? even : odd, even, sums, base, turn, done);
    }
    if (t < item_.tiles) AddTile(t, out, even, odd, sums, base, turn, done);
    if (!kOneSet) {
      EndProducts(out);
      KeepUntilHere(even);
      KeepUntilHere(odd);
    }
    Store(out, sums, base);
  }

  // Starts O += P V of tile t, and gives back what the tile before has read, whose
  // weights are `last`; with one set of weights, ends it.
  __device__ __forceinline__ void AddTile(int t, Sums& out,
                                          uint32_t (&weights)[kKeySteps][4],
                                          const uint32_t (&last)[kKeySteps][4],
                                          float (&sums)[2], float (&base)[2],
                                          ValueTurn& turn, ValueTurn& done) {
    float top[2];
    TakeMessage(t, weights, top);
    const float factor[2] = {Follow(base[0], top[0]), Follow(base[1], top[1])};
    ChangeReferences(weights, top, base);
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
      if (!kOneSet) EndProducts(out);
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        float& x = out[j / kResults][j % kResults];
        x = __fmul_rn(x, factor[RowOf(j)]);
      }
    }
    WaitForPhase(ValuesFull(turn.place), turn.phase);
    const Operand values = Swizzled128(Values(turn.place), kGroupBytes);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        WgmmaByKey(out[part], weights[k],
                   values.At(part * 2 * kGroupBytes + k * 16 * 128), true);
      }
    }
    WgmmaCommit();
    ReleaseMessage(t);
    AddWeights(weights, factor, sums);
    turn.Next();
    if (kOneSet) {
      EndProducts(out);
      KeepUntilHere(weights);
    } else {
      if (t == 0) return;
      WgmmaWait<1>();
      KeepUntilHere(last);
    }
    ArriveAsWarp(ValuesEmpty(done.place));
    done.Next();
  }

  __device__ __forceinline__ void EndProducts(Sums& out) {
    WgmmaWait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) KeepBehind(out[part]);
  }

  __device__ __forceinline__ void TakeMessage(int t, uint32_t (&weights)[kKeySteps][4],
                                              float (&top)[2]) {
    WaitForPhase(MessageFull(t), S::MessagePhase(t));
    const char* message = shared_ + S::MessageOf(t);
    LoadWeights(message, thread_, weights);
    LoadReferences(message + Message::kReferences, thread_, top);
  }

  // To be called once products with the message's weights have begun, so that those are
  // in registers.
  __device__ __forceinline__ void ReleaseMessage(int t) {
    const int sender = t % kSplit;
    // The next one in its place, before its sender may send it.
    if (thread_ == 0 && sender != rank_) {
      ArriveExpecting(MessageFull(t), Message::kBytes);
    }
    ArriveAsWarpAt(MessageTaken(t), sender);
  }

  __device__ __forceinline__ void Store(const Sums& out,
                                        const float (&sums)[2],
                                        const float (&base)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = SumOfRow(sums[r]);
      const int row = warp_ * 16 + lane_ / 4 + r * 8;
      if (item_.head + row >= a_.heads) continue;
      const int64_t partial = PartialOf(a_, item_, row);
      if (rank_ == 0 && lane_ % 4 == 0) {
        a_.sums[partial] = sum;
        a_.maxima[partial] = base[r];
      }
      float* to =
          a_.accumulators + partial * kValues + rank_ * kColumns + lane_ % 4 * 2;
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c) {
        *reinterpret_cast<float2*>(to + c * 8) =
            make_float2(out[c * 4 / kResults][c * 4 % kResults + r * 2],
                        out[c * 4 / kResults][c * 4 % kResults + r * 2 + 1]);
      }
    }
  }

  const Params& p_;
  const TreeAttentionArgs& a_;
  char* const shared_;
  const uint32_t address_;
  const int rank_, thread_, warp_, lane_;
  Item item_;
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_SPLIT_CUH_
