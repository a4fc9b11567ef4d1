// A cluster of c = 4 or 8 blocks for one row tile and one chunk, where there are too
// few of them to fill the GPU. Block r forms the scores and weights of tiles r, r + c, ..
// and sums the values of all tiles for its 512 / c columns.
//
//   copies   two warps: whole tiles for the scores, the block's columns of all tiles.
//   scores   a warpgroup. Blocks tell each other the maxima of a round of c tiles, so
//            each knows what the rows' references are at its own tile. Then each sends
//            its weights to all.
//   values   a warpgroup, O += P V.
//
// Each score, weight and sum comes about as in tree_attention_hopper_block.cuh, so
// which kernel runs does not show in the bits.

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

constexpr int kSplitThreads = 384;
constexpr int kKeyStages = 2;

// What the values' warpgroups need of one tile.
struct Message {
  static constexpr int kSums = kRows * kTile * 2;       // after the weights
  static constexpr int kFactors = kSums + 128 * 2 * 4;  // of each thread's part of rows
  static constexpr int kBytes = kFactors + kRows * 4;
};

template <int kSplit>
struct SplitShared {
  static constexpr int kColumnGroups = kValues / 64 / kSplit;  // of 64, a block's
  static constexpr int kValueBytes = kColumnGroups * kGroupBytes;
  static constexpr int kValueStages = kSplit == 8 ? 7 : 5;
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + kGroups * kQueryGroupBytes;
  static constexpr int kTheValues = kKeys + kKeyStages * kTileBytes;
  static constexpr int kMessages = kTheValues + kValueStages * kValueBytes;  // [sender]
  static constexpr int kOutgoing = kMessages + kSplit * Message::kBytes;
  static constexpr int kMaxima = kOutgoing + Message::kBytes;  // [round % 2][tile][row]
  static constexpr int kOwnMaxima =
      kMaxima + 2 * kSplit * kRows * 4;  // [round % 2][row]
  static constexpr int kQueriesFull = kOwnMaxima + 2 * kRows * 4;
  static constexpr int kKeysFull = kQueriesFull + 8;
  static constexpr int kKeysEmpty = kKeysFull + kKeyStages * 8;
  static constexpr int kValuesFull = kKeysEmpty + kKeyStages * 8;
  static constexpr int kValuesEmpty = kValuesFull + kValueStages * 8;
  static constexpr int kMaximaFull = kValuesEmpty + kValueStages * 8;  // [round % 2]
  static constexpr int kMessagesFull = kMaximaFull + 2 * 8;            // [sender]
  static constexpr int kTaken = kMessagesFull + kSplit * 8;  // this block's, by all
  static constexpr int kBytes = kTaken + 8 + 1024;           // and to begin at 1024
};

template <int kSplit>
class SplitBlock {
  using S = SplitShared<kSplit>;
  static constexpr int kValueStages = S::kValueStages;
  static constexpr int kColumns = S::kColumnGroups * 64;
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
    const int i = blockIdx.x / kSplit;
    const int row_tiles = a_.nodes * p_.row_tiles;
    item_ = FindItem(p_, i / row_tiles / a_.chunks, i / row_tiles % a_.chunks,
                     i % row_tiles);
    if (item_.tiles == 0) return;  // As do all blocks of the cluster.
    if (threadIdx.x == 0) {
      InitBarrier(address_ + S::kQueriesFull, 1);
      for (int k = 0; k < kKeyStages; ++k) {
        InitBarrier(address_ + S::kKeysFull + k * 8, 1);
        InitBarrier(address_ + S::kKeysEmpty + k * 8, 4);
      }
      for (int k = 0; k < kValueStages; ++k) {
        InitBarrier(address_ + S::kValuesFull + k * 8, 1);
        InitBarrier(address_ + S::kValuesEmpty + k * 8, 4);
      }
      for (int k = 0; k < 2; ++k) InitBarrier(address_ + S::kMaximaFull + k * 8, 1);
      for (int k = 0; k < kSplit; ++k) {
        InitBarrier(address_ + S::kMessagesFull + k * 8, 1);
      }
      InitBarrier(address_ + S::kTaken, kSplit * 4);
      FenceBarrierInit();
    }
    __syncthreads();
    ClusterSync();
    const int group = threadIdx.x / 128;
    if (group == 0) {
      if (warp_ == 0) CopyKeys();
      if (warp_ == 1) CopyValues();
    } else if (group == 1) {
      Score();
    } else {
      AddValues();
    }
    __syncwarp();
    ClusterSync();  // No block may end while another sends it something.
  }

 private:
  // ---- Copies.

  __device__ __forceinline__ void CopyKeys() {
    if (lane_ == 0) {
      const uint32_t full = address_ + S::kQueriesFull;
      ArriveExpecting(full, kGroups * kQueryGroupBytes);
      for (int g = 0; g < kGroups; ++g) {
        for (int half = 0; half < 2; ++half) {
          CopyBox4(address_ + S::kQueries + g * kQueryGroupBytes + half * kGroupBytes,
                   &p_.queries, 0, item_.head + half * 32, g,
                   item_.batch * a_.nodes + item_.node, full);
        }
      }
    }
    Turn<kKeyStages> turn;
    for (int t = rank_; t < item_.tiles; t += kSplit) {
      constexpr int kPart = 3;  // groups of a box
      const uint32_t to = address_ + S::kKeys + turn.place * kTileBytes;
      const uint32_t full = address_ + S::kKeysFull + turn.place * 8;
      if (lane_ == 0)
        WaitForPhase(address_ + S::kKeysEmpty + turn.place * 8, turn.phase ^ 1);
      __syncwarp();
      if (t >= item_.prefix) {
        GatherTile<32>(a_, item_, t, 0, kGroups, to, lane_);
        __syncwarp();
        if (lane_ == 0) Arrive(full);
      } else if (lane_ == 0) {
        ArriveExpecting(full, kTileBytes);
        for (int g = 0; g < kGroups; g += kPart) {
          CopyBox4(to + g * kGroupBytes, &p_.keys, 0, item_.start + t * kTile, g,
                   item_.batch, full);
        }
      }
      turn.Next();
    }
  }

  __device__ __forceinline__ void CopyValues() {
    ValueTurn turn;
    for (int t = 0; t < item_.tiles; ++t) {
      const uint32_t to = address_ + S::kTheValues + turn.place * S::kValueBytes;
      const uint32_t full = address_ + S::kValuesFull + turn.place * 8;
      if (lane_ == 0) {
        WaitForPhase(address_ + S::kValuesEmpty + turn.place * 8, turn.phase ^ 1);
      }
      __syncwarp();
      if (t >= item_.prefix) {
        GatherTile<32>(a_, item_, t, rank_ * S::kColumnGroups, S::kColumnGroups, to,
                       lane_);
        __syncwarp();
        if (lane_ == 0) Arrive(full);
      } else if (lane_ == 0) {
        ArriveExpecting(full, S::kValueBytes);
        for (int g = 0; g < S::kColumnGroups; ++g) {
          CopyBox4(to + g * kGroupBytes, &p_.values, 0, item_.start + t * kTile,
                   rank_ * S::kColumnGroups + g, item_.batch, full);
        }
      }
      turn.Next();
    }
  }

  // ---- Scores.

  __device__ __forceinline__ void Score() {
    Turn<kKeyStages> turn;
    float s[16], base[2] = {-INFINITY, -INFINITY};
    WaitForPhase(address_ + S::kQueriesFull, 0);
    Multiply(s, rank_, turn);
    const int rounds = (item_.tiles + kSplit - 1) / kSplit;
    for (int round = 0; round < rounds; ++round) {
      const int t = round * kSplit + rank_;
      const bool mine = t < item_.tiles;
      WgmmaWait<0>();
      KeepBehind(s);
      float scores[16], top[2];
#pragma unroll
      for (int i = 0; i < 16; ++i) scores[i] = s[i];
      if (mine) {
        if (lane_ == 0) Arrive(address_ + S::kKeysEmpty + turn.place * 8);
        turn.Next();
      }
      // Where there is no such tile, all of it is masked.
      if (t >= item_.prefix) {
        Mask(scores, item_.limit - item_.start - t * kTile - lane_ % 4 * 2);
      }
      FindMaxima(scores, top);
      ShareMaxima(top, 1);
      ShareMaxima(top, 2);
      SendMaxima(top, round);
      Multiply(s, t + kSplit, turn);  // Of the next round, while these travel.

      float factor[2], shift[2];
      FollowRound(round, base, factor, shift);
      if (mine) SendWeights(scores, round, factor, shift);
    }
    WgmmaWait<0>();
    if (rank_ == 0 && lane_ % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_ * 16 + lane_ / 4 + r * 8;
        if (item_.head + row < a_.heads) a_.maxima[PartialOf(a_, item_, row)] = base[r];
      }
    }
  }

  // S = Q K^T of tile t; of whatever lies there if there is no such tile.
  __device__ __forceinline__ void Multiply(float (&s)[16], int t,
                                           const Turn<kKeyStages>& turn) {
    if (t < item_.tiles) {
      WaitForPhase(address_ + S::kKeysFull + turn.place * 8, turn.phase);
    }
    const uint64_t keys = Swizzled128(address_ + S::kKeys + turn.place * kTileBytes);
    const uint64_t queries = Swizzled128(address_ + S::kQueries);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kGroups * 4; ++k) {
      Wgmma32(s, queries + (k / 4 * kQueryGroupBytes + k % 4 * 32) / 16,
              keys + (k / 4 * kGroupBytes + k % 4 * 32) / 16, k > 0);
    }
    WgmmaCommit();
  }

  // In one piece to each block: single floats would take longer than the products.
  __device__ __forceinline__ void SendMaxima(const float (&top)[2], int round) {
    const int half = round % 2;
    if (lane_ % 4 == 0) {
      float* own = reinterpret_cast<float*>(shared_ + S::kOwnMaxima) + half * kRows +
                   warp_ * 16 + lane_ / 4;
      own[0] = __fmul_rn(top[0], a_.scale);
      own[8] = __fmul_rn(top[1], a_.scale);
    }
    FenceForProducts();
    WarpsSync(1, 128);
    const uint32_t full = address_ + S::kMaximaFull + half * 8;
    if (thread_ == 0) ArriveExpecting(full, kSplit * kRows * 4);
    if (thread_ < kSplit) {
      SendBulk(address_ + S::kMaxima + (half * kSplit + rank_) * kRows * 4,
               address_ + S::kOwnMaxima + half * kRows * 4, kRows * 4, full, thread_);
    }
  }

  // Follows the maxima of the round's tiles in order; `factor` and `shift` are what
  // they are at this block's tile.
  __device__ __forceinline__ void FollowRound(int round, float (&base)[2],
                                              float (&factor)[2], float (&shift)[2]) {
    WaitForPhase(address_ + S::kMaximaFull + round % 2 * 8, round / 2 % 2);
    const float* maxima = reinterpret_cast<const float*>(shared_ + S::kMaxima) +
                          round % 2 * kSplit * kRows + warp_ * 16 + lane_ / 4;
#pragma unroll
    for (int tile = 0; tile < kSplit; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float f = Follow(base[r], maxima[tile * kRows + r * 8]);
        if (tile == rank_) {
          factor[r] = f;
          shift[r] = ShiftOf(base[r]);
        }
      }
    }
  }

  __device__ __forceinline__ void SendWeights(const float (&scores)[16], int round,
                                              const float (&factor)[2],
                                              const float (&shift)[2]) {
    float x[16], sum[2];
    uint32_t p[2][4];
    FindWeights<0>(scores, a_.scale, shift, x, sum);
    FindWeights<1>(scores, a_.scale, shift, x, sum);
    FindWeights<2>(scores, a_.scale, shift, x, sum);
    FindWeights<3>(scores, a_.scale, shift, x, sum);
    PackWeights(x, p);
    WaitForPhase(address_ + S::kTaken, round % 2 ^ 1);  // The last one, by all.
    char* message = shared_ + S::kOutgoing;
    StoreWeights(p, message, thread_);
    reinterpret_cast<float2*>(message + Message::kSums)[thread_] =
        make_float2(sum[0], sum[1]);
    if (lane_ % 4 == 0) {
      float* factors = reinterpret_cast<float*>(message + Message::kFactors) +
                       warp_ * 16 + lane_ / 4;
      factors[0] = factor[0];
      factors[8] = factor[1];
    }
    FenceForProducts();
    WarpsSync(1, 128);
    if (thread_ < kSplit) {
      SendBulk(address_ + S::kMessages + rank_ * Message::kBytes,
               address_ + S::kOutgoing, Message::kBytes,
               address_ + S::kMessagesFull + rank_ * 8, thread_);
    }
  }

  // ---- Values.

  // Two tiles at a time. Their weights are read after the end of the products before,
  // which may read their registers as late as that.
  __device__ __forceinline__ void AddValues() {
    if (thread_ < kSplit) ExpectMessage(thread_);
    ValueTurn turn, done;
    float out[kColumns / 2], sum[2] = {0.f, 0.f}, factor[2], second_factor[2];
    uint32_t p[2][4], second[2][4];
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) out[j] = 0.f;
    int t = 0;
#pragma unroll 1
    for (; t + 2 <= item_.tiles; t += 2) {
      WaitForMessage(t);
      WaitForMessage(t + 1);
      WgmmaWait<0>();
      KeepBehind(out);
      if (t > 0) {
        Release(done);
        Release(done);
      }
      const bool rescale = TakeWeights(t, p, sum, factor);
      const bool rescale_second = TakeWeights(t + 1, second, sum, second_factor);
      if (rescale) Rescale(out, factor);
      Multiply(out, p, turn);
      if (rescale_second) {
        WgmmaWait<0>();
        KeepBehind(out);
        Rescale(out, second_factor);
      }
      Multiply(out, second, turn);
    }
    WgmmaWait<0>();
    KeepBehind(out);
    if (t < item_.tiles) {
      WaitForMessage(t);
      if (TakeWeights(t, p, sum, factor)) Rescale(out, factor);
      Multiply(out, p, turn);
      WgmmaWait<0>();
      KeepBehind(out);
    }
    Store(out, sum);
  }

  __device__ __forceinline__ void WaitForMessage(int t) {
    WaitForPhase(address_ + S::kMessagesFull + t % kSplit * 8, t / kSplit % 2);
  }

  __device__ __forceinline__ void ExpectMessage(int sender) {
    ArriveExpecting(address_ + S::kMessagesFull + sender * 8, Message::kBytes);
  }

  // Returns whether to multiply by `factor` first.
  __device__ __forceinline__ bool TakeWeights(int t, uint32_t (&p)[2][4],
                                              float (&sum)[2], float (&factor)[2]) {
    const int sender = t % kSplit;
    const char* message = shared_ + S::kMessages + sender * Message::kBytes;
    LoadWeights(message, thread_, p);
    const float2 part =
        reinterpret_cast<const float2*>(message + Message::kSums)[thread_];
    const float* factors = reinterpret_cast<const float*>(message + Message::kFactors) +
                           warp_ * 16 + lane_ / 4;
    factor[0] = factors[0];
    factor[1] = factors[8];
    sum[0] = __fmaf_rn(sum[0], factor[0], part.x);
    sum[1] = __fmaf_rn(sum[1], factor[1], part.y);
    const bool rescale = __any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f);
    if (thread_ == 0) ExpectMessage(sender);  // Before the sender may send again.
    if (lane_ == 0) ArriveAt(address_ + S::kTaken, sender);
    return rescale;
  }

  __device__ __forceinline__ void Rescale(float (&out)[kColumns / 2],
                                          const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) out[j] = __fmul_rn(out[j], factor[RowOf(j)]);
  }

  __device__ __forceinline__ void Multiply(float (&out)[kColumns / 2],
                                           const uint32_t (&p)[2][4], ValueTurn& turn) {
    WaitForPhase(address_ + S::kValuesFull + turn.place * 8, turn.phase);
    const uint64_t values = Swizzled128(
        address_ + S::kTheValues + turn.place * S::kValueBytes, 1024, kGroupBytes);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 2; ++k) WgmmaByKey(out, p[k], values + k * 16 * 128 / 16, true);
    WgmmaCommit();
    turn.Next();
  }

  __device__ __forceinline__ void Release(ValueTurn& turn) {
    if (lane_ == 0) Arrive(address_ + S::kValuesEmpty + turn.place * 8);
    turn.Next();
  }

  __device__ __forceinline__ void Store(const float (&out)[kColumns / 2],
                                        const float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = SumOfRow(sum[r]);
      const int row = warp_ * 16 + lane_ / 4 + r * 8;
      if (item_.head + row >= a_.heads) continue;
      const int64_t partial = PartialOf(a_, item_, row);
      if (rank_ == 0 && lane_ % 4 == 0) a_.sums[partial] = total;
      float* to =
          a_.accumulators + partial * kValues + rank_ * kColumns + lane_ % 4 * 2;
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c) {
        *reinterpret_cast<float2*>(to + c * 8) =
            make_float2(out[c * 4 + r * 2], out[c * 4 + r * 2 + 1]);
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
