// A block of tree attention for Hopper that keeps a whole node's accumulator: 64 rows
// by 512 columns. Persistent: it walks over items, each a tile of 64 rows and one chunk
// of positions, in tiles of 32 keys. Four warpgroups:
//
//   copies   bring queries and keys into a ring of stages. Tiles below the length are
//            the same for all nodes: the two blocks of a cluster work on two row tiles
//            of one chunk, and each brings half of a tile to both. Others are gathered.
//   scores   S = Q K^T of the next tile amid the softmax of this one. Most of Q stays
//            in registers. The weights go through shared memory to
//   values   two warpgroups, O += P V for half of the columns each.
//
// As both blocks of a cluster must agree on a stage, each goes through as many tiles as
// the deeper one of the two nodes has; it ignores those that it does not need.
//
// A stage is full after one arrival and the bytes that were announced, and empty after
// 8 arrivals of each block of the cluster. A warp that waits for a stage's phases waits
// for each of them: if it missed one, it would take the one after the next for it.

#ifndef KDTREE_JAX_TREE_ATTENTION_HOPPER_BLOCK_CUH_
#define KDTREE_JAX_TREE_ATTENTION_HOPPER_BLOCK_CUH_

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "bulk_copy.cuh"
#include "mma.cuh"
#include "tree_attention_hopper_item.cuh"
#include "tree_attention_hopper_layout.cuh"
#include "tree_attention_hopper_softmax.cuh"
#include "wgmma.cuh"

namespace kdtree_jax {
namespace hopper {

template <int kCluster>
class Block {
 public:
  __device__ Block(const Params& p, char* shared)
      : p_(p),
        a_(p.args),
        shared_(shared),
        address_(SharedAddress(shared)),
        rank_(kCluster == 1 ? 0 : ClusterRank()),
        warp_(threadIdx.x % 128 / 32),
        lane_(threadIdx.x % 32),
        to_factor_(warp_ * 16 + lane_ / 4 + lane_ % 2 * 8) {}

  __device__ __forceinline__ void Run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(address_ + Shared::kFull + i * 8, 1);
        InitBarrier(address_ + Shared::kEmpty + i * 8, kCluster * 8);
      }
      for (int i = 0; i < kSlots; ++i) {
        InitBarrier(address_ + Shared::kWeightsFull + i * 8, 4);
        InitBarrier(address_ + Shared::kWeightsEmpty + i * 8, 8);
      }
      InitBarrier(address_ + Shared::kQueriesFull, 1);
      InitBarrier(address_ + Shared::kQueriesEmpty, 4);
      FenceBarrierInit();
    }
    Sync();
    const int group = threadIdx.x / 128;
    if (group == 0) {
      GiveRegisters<24>();
      Copy();
    } else if (group == 1) {
      TakeRegisters<152>();
      Score();
    } else {
      TakeRegisters<168>();
      AddValues(group - 2);
    }
    // No block may end while another copies to it or arrives at its barriers.
    __syncwarp();
    if (kCluster > 1) Sync();
  }

 private:
  __device__ __forceinline__ void Sync() {
    if constexpr (kCluster > 1) {
      ClusterSync();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ uint32_t Stage(int place) const {
    return address_ + Shared::kStage + place * kTileBytes;
  }
  __device__ __forceinline__ uint32_t Filled(int place) const {
    return address_ + Shared::kFull + place * 8;
  }
  __device__ __forceinline__ uint32_t Empty(int place) const {
    return address_ + Shared::kEmpty + place * 8;
  }

  // A stage is free in all blocks of the cluster after 8 arrivals of each block: one
  // each of the warps that add values, or two each of those that form scores, for
  // stages which only these read.
  __device__ __forceinline__ void Release(Turn<kStages>& turn, int arrivals) {
    if (lane_ == 0) {
      for (int r = 0; r < kCluster; ++r) ArriveAt(Empty(turn.place), r, arrivals);
    }
    turn.Next();
  }

  // ---- Copies.

  __device__ __forceinline__ void Copy() {
    Turn<kStages> turn;
    int queries_phase = 1;
    const bool first = threadIdx.x == 0;
    const Items<kCluster> items(p_, rank_);
    Item item;
    int rounds;
#pragma unroll 1
    for (int i = items.First(); i < p_.items; i = items.Next(i)) {
      if (!items.Find(i, item, rounds)) continue;
      if (first) CopyQueries(item, turn, queries_phase);
      for (int q = 0; q < kQueryStages; ++q) turn.Next();
      queries_phase ^= 1;
      for (int t = 0; t < rounds; ++t) {
        if (t < item.prefix) {
          if (first) CopyTile(item, t, turn);
        } else {
          Gather(item, t, turn);
        }
        turn.Next();
      }
    }
  }

  __device__ __forceinline__ void CopyQueries(const Item& item, Turn<kStages> turn,
                                              int phase) {
    const int query = item.batch * a_.nodes + item.node;
    for (int half = 0; half < kQueryStages; ++half) {
      WaitForPhase(Empty(turn.place), turn.phase ^ 1);
      ArriveExpecting(Filled(turn.place), kInRegisters * kGroupBytes);
      for (int g = 0; g < kInRegisters; ++g) {
        CopyBox4(Stage(turn.place) + g * kGroupBytes, &p_.queries, 0,
                 item.head + half * 32, g, query, Filled(turn.place));
      }
      turn.Next();
    }
    const uint32_t full = address_ + Shared::kQueriesFull;
    WaitForPhase(address_ + Shared::kQueriesEmpty, phase);
    ArriveExpecting(full, (kGroups - kInRegisters) * kQueryGroupBytes);
    for (int g = kInRegisters; g < kGroups; ++g) {
      for (int half = 0; half < 2; ++half) {
        CopyBox4(address_ + Shared::kQueries + (g - kInRegisters) * kQueryGroupBytes +
                     half * kGroupBytes,
                 &p_.queries, 0, item.head + half * 32, g, query, full);
      }
    }
  }

  // A tile that all nodes have in common.
  __device__ __forceinline__ void CopyTile(const Item& item, int t,
                                           const Turn<kStages>& turn) {
    const uint32_t full = Filled(turn.place);
    WaitForPhase(Empty(turn.place), turn.phase ^ 1);
    ArriveExpecting(full, kTileBytes);
    constexpr int kPart = 3;  // groups of a box
#pragma unroll
    for (int g = 0; g < kGroups; g += kPart) {
      const uint32_t to = Stage(turn.place) + g * kGroupBytes;
      const int position = item.start + t * kTile;
      if constexpr (kCluster == 1) {
        CopyBox4(to, &p_.keys, 0, position, g, item.batch, full);
      } else if ((t + g / kPart) % kCluster == rank_) {
        CopyBox4ToAll(to, &p_.keys, 0, position, g, item.batch, full,
                      (1 << kCluster) - 1);
      }
    }
  }

  // A tile that reaches the length.
  __device__ __forceinline__ void Gather(const Item& item, int t,
                                         const Turn<kStages>& turn) {
    __syncwarp();  // One thread was busy with the copies. Only it knows the phase.
    if (threadIdx.x == 0) WaitForPhase(Empty(turn.place), turn.phase ^ 1);
    WarpsSync(1, 128);
    if (t < item.tiles) {
      GatherTile<128>(a_, item, t, 0, kGroups, Stage(turn.place), threadIdx.x);
    }
    WarpsSync(1, 128);
    if (threadIdx.x == 0) Arrive(Filled(turn.place));
  }

  // ---- Scores.

  __device__ __forceinline__ void Score() {
    Turn<kStages> turn;
    Turn<kSlots> slot;
    int queries_phase = 0;
    uint32_t q[kInRegisters * 4][4];
    float s[2][16];
    const Items<kCluster> items(p_, rank_);
    Item item;
    int rounds;
#pragma unroll 1
    for (int i = items.First(); i < p_.items; i = items.Next(i)) {
      if (!items.Find(i, item, rounds)) continue;
      LoadQueries(q, turn);
      WaitForPhase(address_ + Shared::kQueriesFull, queries_phase);
      queries_phase ^= 1;
      base_[0] = base_[1] = -INFINITY;
      sum_[0] = sum_[1] = 0.f;
      if (item.tiles > 0) {
        Multiply(s[0], q, turn);
        const int steps = min(item.prefix, item.tiles - 1);
        int t = 0;
        for (;;) {
          if (t == steps) {
            Rest(item, t, s[0], q, turn, slot);
            break;
          }
          Step(s[0], s[1], q, turn, slot);
          ++t;
          if (t == steps) {
            Rest(item, t, s[1], q, turn, slot);
            break;
          }
          Step(s[1], s[0], q, turn, slot);
          ++t;
        }
      }
      if (lane_ == 0) Arrive(address_ + Shared::kQueriesEmpty);
      // What this node does not need.
      for (int t = item.tiles; t < rounds; ++t) {
        WaitForPhase(Filled(turn.place), turn.phase);
        Release(turn, 2);
      }
      if (item.tiles > 0) StoreSums(item);
    }
  }

  __device__ __forceinline__ void LoadQueries(uint32_t (&q)[kInRegisters * 4][4],
                                              Turn<kStages>& turn) {
    const Turn<kStages> first = turn;
    Turn<kStages> second = turn;
    second.Next();
    // 32 rows to a stage, two warps to them. But all warps wait for both: one that
    // missed a phase would wait for ever.
    WaitForPhase(Filled(first.place), first.phase);
    WaitForPhase(Filled(second.place), second.phase);
    const int row = warp_ % 2 * 16 + lane_ % 16;
    const uint32_t from = Stage(warp_ < 2 ? first.place : second.place) + row * 128;
#pragma unroll
    for (int k = 0; k < kInRegisters * 4; ++k) {
      const int piece = k % 4 * 2 + lane_ / 16;
      LoadMatrix4(q[k], from + k / 4 * kGroupBytes + (piece ^ (row & 7)) * 16);
    }
    __syncwarp();
    for (int i = 0; i < kQueryStages; ++i) Release(turn, 2);
  }

  // Steps kFrom .. kTo - 1 of 16 dimensions of S = Q K^T for a tile in `stage`.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void MultiplyPart(float (&s)[16],
                                               const uint32_t (&q)[kInRegisters * 4][4],
                                               uint32_t stage) {
    const uint64_t keys = Swizzled128(stage);
    const uint64_t queries = Swizzled128(address_ + Shared::kQueries);
#pragma unroll
    for (int k = kFrom; k < kTo; ++k) {
      const uint64_t b = keys + (k / 4 * kGroupBytes + k % 4 * 32) / 16;
      if (k < kInRegisters * 4) {
        Wgmma32(s, q[k], b, k > 0);
      } else {
        const int g = k / 4 - kInRegisters;
        Wgmma32(s, queries + (g * kQueryGroupBytes + k % 4 * 32) / 16, b, true);
      }
    }
  }

  // S = Q K^T of the tile whose turn it is.
  __device__ __forceinline__ void Multiply(float (&s)[16],
                                           const uint32_t (&q)[kInRegisters * 4][4],
                                           Turn<kStages>& turn) {
    WaitForPhase(Filled(turn.place), turn.phase);
    WgmmaFence();
    MultiplyPart<0, kGroups * 4>(s, q, Stage(turn.place));
    WgmmaCommit();
    turn.Next();
  }

  // Hands over a tile wholly below the length, whose scores are under way, amid the
  // products of the next. A warp waits when it starts a product while a few are under
  // way, so what lies between them costs nothing, as long as it has no branches.
  __device__ __forceinline__ void Step(float (&scores)[16], float (&next)[16],
                                       const uint32_t (&q)[kInRegisters * 4][4],
                                       Turn<kStages>& turn, Turn<kSlots>& slot) {
    const uint32_t stage = Stage(turn.place), full = Filled(turn.place);
    const uint32_t empty = address_ + Shared::kWeightsEmpty + slot.place * 8;
    const bool ready = TryWait(full, turn.phase), free = TryWait(empty, slot.phase ^ 1);
    if (!ready) WaitForPhase(full, turn.phase);
    if (!free) WaitForPhase(empty, slot.phase ^ 1);
    turn.Next();
    WgmmaFence();
    MultiplyPart<0, 6>(next, q, stage);
    WgmmaCommit();
    WgmmaWait<1>();
    KeepBehind(scores);
    float top[2], shift[2], factor[2], x[16], sum[2];
    FindMaxima(scores, top);
    MultiplyPart<6, 9>(next, q, stage);
    ShareMaxima(top, 1);
    MultiplyPart<9, 12>(next, q, stage);
    ShareMaxima(top, 2);
    MultiplyPart<12, 15>(next, q, stage);
    FollowMaxima(top, factor, shift);
    MultiplyPart<15, 18>(next, q, stage);
    FindWeights<0>(scores, a_.scale, shift, x, sum);
    MultiplyPart<18, 20>(next, q, stage);
    FindWeights<1>(scores, a_.scale, shift, x, sum);
    MultiplyPart<20, 22>(next, q, stage);
    FindWeights<2>(scores, a_.scale, shift, x, sum);
    MultiplyPart<22, 24>(next, q, stage);
    FindWeights<3>(scores, a_.scale, shift, x, sum);
    MultiplyPart<24, 28>(next, q, stage);
    HandOver(x, factor, sum, slot);
    MultiplyPart<28, 36>(next, q, stage);
    WgmmaCommit();
  }

  // All from tile t on, whose scores are under way.
  __device__ __forceinline__ void Rest(const Item& item, int t, float (&s)[16],
                                       const uint32_t (&q)[kInRegisters * 4][4],
                                       Turn<kStages>& turn, Turn<kSlots>& slot) {
    WgmmaWait<0>();
    KeepBehind(s);
    Finish(item, t, s, slot);
    float more[16];
#pragma unroll 1
    while (++t < item.tiles) {
      Multiply(more, q, turn);
      WgmmaWait<0>();
      KeepBehind(more);
      Finish(item, t, more, slot);
    }
  }

  // Hands over any tile.
  __device__ __forceinline__ void Finish(const Item& item, int t,
                                         const float (&scores)[16],
                                         Turn<kSlots>& slot) {
    float s[16], top[2], shift[2], factor[2], x[16], sum[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = scores[i];
    if (t >= item.prefix) {
      Mask(s, item.limit - item.start - t * kTile - lane_ % 4 * 2);
    }
    FindMaxima(s, top);
    ShareMaxima(top, 1);
    ShareMaxima(top, 2);
    FollowMaxima(top, factor, shift);
    FindWeights<0>(s, a_.scale, shift, x, sum);
    FindWeights<1>(s, a_.scale, shift, x, sum);
    FindWeights<2>(s, a_.scale, shift, x, sum);
    FindWeights<3>(s, a_.scale, shift, x, sum);
    WaitForPhase(address_ + Shared::kWeightsEmpty + slot.place * 8, slot.phase ^ 1);
    HandOver(x, factor, sum, slot);
  }

  __device__ __forceinline__ void FollowMaxima(const float (&top)[2],
                                               float (&factor)[2], float (&shift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = Follow(base_[r], __fmul_rn(top[r], a_.scale));
      shift[r] = ShiftOf(base_[r]);
    }
  }

  // A thread's weights go to the threads of the same place in the values' warpgroups.
  __device__ __forceinline__ void HandOver(const float (&x)[16],
                                           const float (&factor)[2],
                                           const float (&sum)[2], Turn<kSlots>& slot) {
    uint32_t p[2][4];
    PackWeights(x, p);
    StoreWeights(p, shared_ + Shared::kWeights + slot.place * kWeightBytes,
                 threadIdx.x % 128);
    // The 4 threads of a row have the same factors.
    reinterpret_cast<float*>(shared_ +
                             Shared::kFactors)[to_factor_ + slot.place * kRows] =
        lane_ % 2 == 0 ? factor[0] : factor[1];
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] = __fmaf_rn(sum_[r], factor[r], sum[r]);
    __syncwarp();
    if (lane_ == 0) Arrive(address_ + Shared::kWeightsFull + slot.place * 8);
    slot.Next();
  }

  __device__ __forceinline__ void StoreSums(const Item& item) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = SumOfRow(sum_[r]);
      const int row = warp_ * 16 + lane_ / 4 + r * 8;
      if (lane_ % 4 == 0 && item.head + row < a_.heads) {
        const int64_t partial = PartialOf(a_, item, row);
        a_.maxima[partial] = base_[r];
        a_.sums[partial] = total;
      }
    }
  }

  // ---- Values.

  __device__ __forceinline__ void AddValues(int half) {
    Turn<kStages> turn;
    Turn<kSlots> slot;
    float out[2][64];
    const Items<kCluster> items(p_, rank_);
    Item item;
    int rounds;
#pragma unroll 1
    for (int i = items.First(); i < p_.items; i = items.Next(i)) {
      if (!items.Find(i, item, rounds)) continue;
      for (int q = 0; q < kQueryStages; ++q) turn.Next();
      for (int t = 0; t < item.tiles; ++t) {
        AddTile(out, half, t > 0, turn.place, slot);
        Release(turn, 1);
      }
      for (int t = item.tiles; t < rounds; ++t) turn.Next();
      if (item.tiles > 0) {
        items.Find(i, item, rounds);  // Again, rather than to keep it in registers.
        StoreOutput(item, out, half);
      }
    }
  }

  // O += P V of one tile.
  __device__ __forceinline__ void AddTile(float (&out)[2][64], int half, bool add,
                                          int place, Turn<kSlots>& slot) {
    WaitForPhase(address_ + Shared::kWeightsFull + slot.place * 8, slot.phase);
    const float* factors = reinterpret_cast<const float*>(shared_ + Shared::kFactors) +
                           slot.place * kRows + warp_ * 16 + lane_ / 4;
    const float factor[2] = {factors[0], factors[8]};
    uint32_t p[2][4];
    LoadWeights(shared_ + Shared::kWeights + slot.place * kWeightBytes,
                threadIdx.x % 128, p);
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f) && add) {
#pragma unroll
      for (int j = 0; j < 128; ++j) {
        float& x = out[j / 64][j % 64];
        x = __fmul_rn(x, factor[RowOf(j)]);
      }
    }
    const uint64_t values =
        Swizzled128(Stage(place) + half * 4 * kGroupBytes, 1024, kGroupBytes);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        WgmmaByKey(out[c], p[k], values + (c * 2 * kGroupBytes + k * 16 * 128) / 16,
                   add || k > 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepBehind(out[0]);
    KeepBehind(out[1]);
    if (lane_ == 0) Arrive(address_ + Shared::kWeightsEmpty + slot.place * 8);
    slot.Next();
  }

  __device__ __forceinline__ void StoreOutput(const Item& item,
                                              const float (&out)[2][64], int half) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_ * 16 + lane_ / 4 + r * 8;
      if (item.head + row >= a_.heads) continue;
      float* to = a_.accumulators + PartialOf(a_, item, row) * kValues + half * 256 +
                  lane_ % 4 * 2;
#pragma unroll
      for (int c = 0; c < 32; ++c) {
        *reinterpret_cast<float2*>(to + c * 8) = make_float2(
            out[c / 16][c % 16 * 4 + r * 2], out[c / 16][c % 16 * 4 + r * 2 + 1]);
      }
    }
  }

  const Params& p_;
  const TreeAttentionArgs& a_;
  char* const shared_;
  const uint32_t address_;
  const int rank_, warp_, lane_;
  const int to_factor_;  // a row of this thread
  float base_[2], sum_[2];
};

}  // namespace hopper
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_HOPPER_BLOCK_CUH_
