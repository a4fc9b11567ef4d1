// One block of tree attention on tensor cores: bf16, mma.sync, one source for sm_90 and
// sm_120.
//
// A block of 8 warps takes kRows rows (one row is one head of one node) and one chunk of
// positions, and walks through the chunk in steps of 16 keys. Keys of width W lie once
// in shared memory, in a ring of four steps; their first R columns are the values.
//
//   scores   S = Q K^T. Q stays in registers. Each warp takes a quarter of the W
//            dimensions, so that it can hold two 16-row tiles of Q and a key fragment
//            serves both; the quarters are added in a fixed order through shared memory.
//            Quarter q is the 16-dimension tiles q, q + 4, q + 8, ...
//   softmax  online, in the row's own threads.
//   output   O += P V. Each warp holds a part of the columns of two 16-row tiles.
//
// The scores of step i + 1 are formed before the output of step i, whose tensor-core work
// the softmax of step i + 1 is spread over. kRows changes who computes a value, never
// how: each score, sum and output is the same sequence of operations for all kRows.

#ifndef KDTREE_JAX_TREE_ATTENTION_BLOCK_CUH_
#define KDTREE_JAX_TREE_ATTENTION_BLOCK_CUH_

#include <cuda_bf16.h>

#include "mma.cuh"
#include "tree_attention.h"
#include "tree_attention_layout.cuh"

namespace kdtree_jax {
namespace attention {

template <int kWidth, int kValues, int kRows, bool kManyNodes>
class Block {
  using L = Layout<kWidth, kValues, kRows>;

 public:
  __device__ Block(const TreeAttentionArgs& a, char* shared)
      : a_(a),
        shared_(shared),
        shared_address_(SharedAddress(shared)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

  __device__ void Run() {
    if (!FindWork()) return;
    FindAddresses();
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) InitBarrier(Barrier(stage), kThreads);
    }
    __syncthreads();
    for (int step = 0; step < kStages - 1; ++step) {
      if (step < steps_) StartCopy(step);
    }
    LoadQueries();
#pragma unroll
    for (int t = 0; t < L::kOutTiles; ++t)
#pragma unroll
      for (int c = 0; c < L::kColumnTiles; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[t][c][i] = 0.f;

    Scores(0);
    StoreScores();
    __syncthreads();
    for (int phase = 0; phase < kPhases; ++phase) Softmax(0, phase);
    int step = 0;
    for (; step + 1 < steps_; ++step) {
      Scores(step + 1);
      // After this barrier all warps have written P(step), read the scores of `step`
      // and finished O of step - 1. So scores may be overwritten, and
      // StartCopy(step + 3) may reuse the stage of step - 1.
      const bool rescale = __syncthreads_or(rescale_);
      StoreScores();
      if (rescale) Rescale(step);
      __syncthreads();
      Output<true>(step);
    }
    if (__syncthreads_or(rescale_)) Rescale(step);
    Output<false>(step);
    Store();
  }

 private:
  // Positions and nodes of this block. False where none of its rows reaches the chunk.
  __device__ bool FindWork() {
    const int rows = a_.nodes * a_.heads;
    batch_ = blockIdx.z;
    first_row_ = blockIdx.x * kRows;
    chunk_ = blockIdx.y;
    row_end_ = min(first_row_ + kRows, rows);
    length_ = min(max(a_.lengths[batch_], 0), a_.capacity);
    first_node_ = first_row_ / a_.heads;
    const int last_node = (row_end_ - 1) / a_.heads;
    // heads % kRows == 0 without kManyNodes, so a block is one node.
    node_count_ = kManyNodes ? last_node - first_node_ + 1 : 1;
    int last = 0;
    for (int n = first_node_; n <= last_node; ++n) last = max(last, LastPosition(n));
    start_ = chunk_ * a_.chunk;
    const int end = min(start_ + a_.chunk, last + 1);
    if (start_ >= end) return false;
    const int all_steps = (end - start_ + kStep - 1) / kStep;
    // Steps wholly below `length_` are the same for all nodes.
    prefix_steps_ = min(all_steps, max(0, length_ - start_) / kStep);
    steps_ = prefix_steps_ + (all_steps - prefix_steps_) * node_count_;
    return true;
  }

  // What a thread reads and writes in each step, up to the stage.
  __device__ void FindAddresses() {
    {  // Copy: kLanes threads per key.
      const int key = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
      copy_to_ = shared_address_ + Piece(key, lane);
      copy_from_ = static_cast<const __nv_bfloat16*>(a_.cache) +
                   (static_cast<int64_t>(batch_) * a_.capacity + start_ + key) * kWidth +
                   lane * 8;
    }
    {  // Scores: key fragments, then where the results go.
      const int key = L::kKeyTiles == 2 ? (lane_ & 7) + (lane_ & 16) / 2
                                        : ScoreKey() + (lane_ & 7);
      key_fragment_ =
          shared_address_ + Piece(key, Quarter() * 2 + ((lane_ >> 3) & 1));
      score_to_ = Score(Quarter(), ScoreRow() + lane_ / 4, ScoreKey() + lane_ % 4 * 2);
    }
    {  // Softmax.
      const int row = threadIdx.x / L::kRowThreads;
      const int key = threadIdx.x % L::kRowThreads * L::kRowKeys;
      score_from_ = Score(0, row, key);
      p_to_ = L::kP + (row * L::kPStride + key) * 2;
    }
    {  // Output.
      p_fragment_ = shared_address_ + L::kP +
                    ((OutRow() + lane_ % 16) * L::kPStride + lane_ / 16 * 8) * 2;
      const int piece = L::kColumnTiles > 1 ? lane_ / 16 : 0;
      value_fragment_ = shared_address_ + Piece(lane_ % 16, FirstColumn() / 8 + piece);
    }
  }

  __device__ int LastPosition(int node) const {
    const int depth = a_.depths[batch_ * a_.nodes + node];
    return length_ + min(max(depth, 0), a_.max_ancestors - 1);
  }

  // First position of a step, and the node it is for.
  __device__ void Place(int step, int& position, int& node) const {
    const int tail = step - prefix_steps_;
    if (!kManyNodes || tail < 0) {
      position = start_ + step * kStep;
      node = first_node_;
    } else {
      position = start_ + (prefix_steps_ + tail / node_count_) * kStep;
      node = first_node_ + tail % node_count_;
    }
  }

  __device__ static uint32_t Stage(int step) {
    return (step % kStages) * L::kStageBytes;
  }

  // Byte offset of a 16-byte piece of a key within its stage.
  __device__ static uint32_t Piece(int key, int piece) {
    return key * L::kKeyBytes + (piece ^ (key & 7)) * 16;
  }

  __device__ uint32_t Barrier(int step) const {
    return shared_address_ + L::kBarriers + step % kStages * 8;
  }

  __device__ void StartCopy(int step) {
    const __nv_bfloat16* source = copy_from_;
    copy_from_ += kStep * kWidth;
    bool wanted = true;
    if (step >= prefix_steps_) source = TailSource(step, wanted);
    const uint32_t to = copy_to_ + Stage(step);
    constexpr int kPieces = kWidth / 8;
#pragma unroll
    for (int i = 0; i * kLanes < kPieces; ++i) {
      const uint32_t piece_to = to + i * kLanes * 16;
      const __nv_bfloat16* from = source + i * kLanes * 8;
      if ((i + 1) * kLanes <= kPieces) {
        CopyAsync16(piece_to, from, wanted);
      } else {
        const bool run = threadIdx.x % kLanes < kPieces - i * kLanes;
        CopyAsync16If(run, piece_to, from, wanted);
      }
    }
    ArriveAfterCopies(Barrier(step));
  }

  // Where this thread's part of a key lies that is not the same for all nodes. Keys
  // that no row sees are zeros: their P is 0, and 0 * garbage need not be 0.
  __device__ const __nv_bfloat16* TailSource(int step, bool& wanted) {
    int position, node;
    Place(step, position, node);
    position += threadIdx.x / kLanes;
    const __nv_bfloat16* keys = static_cast<const __nv_bfloat16*>(a_.cache);
    int64_t key = static_cast<int64_t>(batch_) * a_.capacity + position;
    if (position >= length_) {
      wanted = position <= LastPosition(node);
      int slot = 0;
      if (wanted) {
        slot = a_.ancestors[(batch_ * a_.nodes + node) * a_.max_ancestors + position -
                            length_];
        slot = min(max(slot, 0), a_.nodes - 1);
      }
      keys = static_cast<const __nv_bfloat16*>(a_.tree_keys);
      key = static_cast<int64_t>(batch_) * a_.nodes + slot;
    }
    return keys + key * kWidth + threadIdx.x % kLanes * 8;
  }

  // This warp's quarter of the dimensions, row tiles and keys in the scores.
  __device__ int Quarter() const { return warp_ / 2; }
  __device__ int ScoreRow() const {
    return L::kRowGroups == 2 ? (warp_ % 2) * 32 : 0;
  }
  __device__ int ScoreKey() const { return L::kKeyGroups == 2 ? (warp_ % 2) * 8 : 0; }
  // First row and column of this warp's output.
  __device__ int OutRow() const { return ScoreRow(); }
  __device__ int FirstColumn() const {
    return warp_ / L::kRowGroups * L::kColumnTiles * 8;
  }
  // Whether the warp's k-th tile of 16 dimensions exists.
  __device__ bool HasTile(int k) const {
    return (k + 1) * kQuarters <= L::kKTiles || Quarter() < L::kKTiles - k * kQuarters;
  }

  __device__ void LoadQueries() {
    const uint32_t* q = reinterpret_cast<const uint32_t*>(
        static_cast<const __nv_bfloat16*>(a_.q) +
        static_cast<int64_t>(batch_) * a_.nodes * a_.heads * kWidth);
#pragma unroll
    for (int t = 0; t < L::kScoreTiles; ++t) {
      const int row = first_row_ + ScoreRow() + t * 16 + lane_ / 4;
#pragma unroll
      for (int k = 0; k < L::kQuarterTiles; ++k) {
        const int tile = Quarter() + k * kQuarters;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row + (i % 2) * 8;
          const int column = tile * 8 + lane_ % 4 + (i / 2) * 4;  // in pairs
          q_[t][k][i] = HasTile(k) && r < row_end_
                            ? q[static_cast<int64_t>(r) * (kWidth / 2) + column]
                            : 0u;
        }
      }
    }
  }

  // Where a score lies: [quarter][row][key], 8-key halves exchanged in every other
  // pair of rows so that fragments are written without bank conflicts.
  __device__ static int Score(int quarter, int row, int key) {
    return L::kScores +
           ((quarter * kRows + row) * kStep + (key ^ ((row & 2) << 2))) * 4;
  }

  // This warp's part of the scores, in registers.
  __device__ void Scores(int step) {
#pragma unroll
    for (int t = 0; t < L::kScoreTiles; ++t)
#pragma unroll
      for (int n = 0; n < L::kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores_[t][n][i] = 0.f;
    WaitForPhase(Barrier(step), step / kStages & 1);
    const uint32_t keys = key_fragment_ + Stage(step);
#pragma unroll
    for (int k = 0; k < L::kQuarterTiles; ++k) {
      if (!HasTile(k)) break;
      // A tile further in this quarter is 4 tiles, 128 bytes, further on.
      uint32_t b[4];
      if (L::kKeyTiles == 2) {
        LoadMatrix4(b, keys + k * 128);
      } else {
        LoadMatrix2(b[0], b[1], keys + k * 128);
      }
#pragma unroll
      for (int n = 0; n < L::kKeyTiles; ++n)
#pragma unroll
        for (int t = 0; t < L::kScoreTiles; ++t) {
          Mma(scores_[t][n], q_[t][k], b[2 * n], b[2 * n + 1]);
        }
    }
  }

  __device__ void StoreScores() {
    const int other = score_to_ ^ 32;  // 8 keys further on
#pragma unroll
    for (int t = 0; t < L::kScoreTiles; ++t)
#pragma unroll
      for (int n = 0; n < L::kKeyTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int to = (n == 0 ? score_to_ : other) + (t * 16 + half * 8) * kStep * 4;
          *reinterpret_cast<float2*>(shared_ + to) =
              make_float2(scores_[t][n][half * 2], scores_[t][n][half * 2 + 1]);
        }
  }

  // Adds the quarters of a row's scores, updates its sums, writes P and the factor for
  // what the row has summed so far. In phases, so that tensor-core work can go between.
  __device__ void Softmax(int step, int phase) {
    float(&s)[L::kRowKeys] = p_;
    if (phase == 0) {
      LoadQuarter(0, part_[0]);
      LoadQuarter(1, part_[1]);
    } else if (phase == 1) {
#pragma unroll
      for (int i = 0; i < L::kRowKeys; ++i) s[i] = __fadd_rn(part_[0][i], part_[1][i]);
      LoadQuarter(2, part_[0]);
      LoadQuarter(3, part_[1]);
    } else if (phase == 2) {
#pragma unroll
      for (int i = 0; i < L::kRowKeys; ++i) {
        s[i] = __fadd_rn(s[i], __fadd_rn(part_[0][i], part_[1][i]));
      }
      if (step >= prefix_steps_) Mask(s, step);
      top_ = -INFINITY;
#pragma unroll
      for (int i = 0; i < L::kRowKeys; ++i) {
        s[i] = __fmul_rn(s[i], a_.scale);
        top_ = fmaxf(top_, s[i]);
      }
#pragma unroll
      for (int lanes = 1; lanes < L::kRowThreads; lanes *= 2) {
        top_ = fmaxf(top_, __shfl_xor_sync(~0u, top_, lanes));
      }
    } else {
      // The row's reference follows its maximum only where it falls behind by more than
      // 2**8: powers up to that lose no precision, and most steps need no rescaling.
      float factor = 1.f;
      rescale_ = top_ > __fadd_rn(base_, kSlack);
      if (rescale_) {
        factor = Exp2(__fsub_rn(base_, top_));
        base_ = top_;
      }
      const float base = base_ == -INFINITY ? 0.f : base_;
#pragma unroll
      for (int i = 0; i < L::kRowKeys; ++i) {
        p_[i] = Exp2(__fsub_rn(s[i], base));
        // One sum for each of the 16 keys of a step, whichever thread has it.
        sums_[i] = __fmaf_rn(sums_[i], factor, p_[i]);
      }
      char* to = shared_ + p_to_ + (step & 1) * kRows * L::kPStride * 2;
      if constexpr (L::kRowKeys == 4) {
        *reinterpret_cast<uint2*>(to) =
            make_uint2(PackBFloat16(p_[0], p_[1]), PackBFloat16(p_[2], p_[3]));
      } else if constexpr (L::kRowKeys == 2) {
        *reinterpret_cast<uint32_t*>(to) = PackBFloat16(p_[0], p_[1]);
      } else {
        *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(p_[0]);
      }
      if (threadIdx.x % L::kRowThreads == 0) {
        *Factor(step, threadIdx.x / L::kRowThreads) = factor;
      }
    }
  }

  __device__ void LoadQuarter(int quarter, float (&part)[L::kRowKeys]) {
    const char* from = shared_ + score_from_ + quarter * kRows * kStep * 4;
    if constexpr (L::kRowKeys == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      part[0] = v.x, part[1] = v.y, part[2] = v.z, part[3] = v.w;
    } else if constexpr (L::kRowKeys == 2) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      part[0] = v.x, part[1] = v.y;
    } else {
      part[0] = *reinterpret_cast<const float*>(from);
    }
  }

  // Sets the scores of keys that the row does not see to -inf.
  __device__ void Mask(float (&s)[L::kRowKeys], int step) {
    int position, node;
    Place(step, position, node);
    const int row = first_row_ + threadIdx.x / L::kRowThreads;
    const int key = threadIdx.x % L::kRowThreads * L::kRowKeys;
    const bool mine = row < row_end_ && (!kManyNodes || row / a_.heads == node);
    const int last = mine ? LastPosition(node) : -1;
#pragma unroll
    for (int i = 0; i < L::kRowKeys; ++i) {
      if (position + key + i > last) s[i] = -INFINITY;
    }
  }

  __device__ float* Factor(int step, int row) {
    return reinterpret_cast<float*>(shared_ + L::kFactors) + (step & 1) * kRows + row;
  }

  __device__ void Rescale(int step) {
#pragma unroll
    for (int t = 0; t < L::kOutTiles; ++t) {
      const float low = *Factor(step, OutRow() + t * 16 + lane_ / 4);
      const float high = *Factor(step, OutRow() + t * 16 + lane_ / 4 + 8);
#pragma unroll
      for (int c = 0; c < L::kColumnTiles; ++c) {
        out_[t][c][0] = __fmul_rn(out_[t][c][0], low);
        out_[t][c][1] = __fmul_rn(out_[t][c][1], low);
        out_[t][c][2] = __fmul_rn(out_[t][c][2], high);
        out_[t][c][3] = __fmul_rn(out_[t][c][3], high);
      }
    }
  }

  // O += P V of this step. Between the parts, the softmax of the next step and the copy
  // of a later one.
  template <bool kNext>
  __device__ void Output(int step) {
    const uint32_t from = p_fragment_ + (step & 1) * kRows * L::kPStride * 2;
    uint32_t p[L::kOutTiles][4];
#pragma unroll
    for (int t = 0; t < L::kOutTiles; ++t) {
      LoadMatrix4(p[t], from + t * 16 * L::kPStride * 2);
    }
    const uint32_t values = value_fragment_ + Stage(step);
    if constexpr (L::kColumnTiles > 1) {
      constexpr int kParts = L::kColumnTiles / 2;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t v[4];
        LoadMatrix4Transposed(v, (values + part / 4 * 128) ^ (part % 4 * 32));
        if (kNext && part == 0) Softmax(step + 1, 0);
        Accumulate(step, p, part * 2, v[0], v[1]);
        Accumulate(step, p, part * 2 + 1, v[2], v[3]);
        if constexpr (kNext) {
#pragma unroll
          for (int phase = 1; phase <= kPhases; ++phase) {
            const bool last = phase == kPhases;
            if (part == (last ? kParts - 1 : (phase * kParts - 1) / kPhases)) {
              Between(step, phase);
            }
          }
        }
      }
    } else {
      uint32_t v[2];
      LoadMatrix2Transposed(v[0], v[1], values);
      Accumulate(step, p, 0, v[0], v[1]);
      if constexpr (kNext) {
#pragma unroll
        for (int phase = 0; phase <= kPhases; ++phase) Between(step, phase);
      }
    }
  }

  __device__ void Between(int step, int phase) {
    if (phase < kPhases) {
      Softmax(step + 1, phase);
    } else if (step + kStages - 1 < steps_) {
      StartCopy(step + kStages - 1);
    }
  }

  // Adds P V of column tile c.
  __device__ void Accumulate(int step, const uint32_t (&p)[L::kOutTiles][4], int c,
                             uint32_t v0, uint32_t v1) {
#pragma unroll
    for (int t = 0; t < L::kOutTiles; ++t) {
      if constexpr (kManyNodes) {
        if (step >= prefix_steps_) {
          AccumulateNode(step, t, c, p[t], v0, v1);
          continue;
        }
      }
      Mma(out_[t][c], p[t], v0, v1);
    }
  }

  // The same where the keys are those of one node. Other nodes' rows have P = 0, but
  // 0 * NaN is NaN.
  __device__ void AccumulateNode(int step, int t, int c, const uint32_t (&p)[4],
                                 uint32_t v0, uint32_t v1) {
    float with[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) with[i] = out_[t][c][i];
    Mma(with, p, v0, v1);
    int position, node;
    Place(step, position, node);
    const int row = first_row_ + OutRow() + t * 16 + lane_ / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((row + i / 2 * 8) / a_.heads == node) out_[t][c][i] = with[i];
    }
  }

  __device__ void Store() {
    const int64_t rows = static_cast<int64_t>(batch_) * a_.nodes * a_.heads;
#pragma unroll
    for (int t = 0; t < L::kOutTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_ + OutRow() + t * 16 + lane_ / 4 + half * 8;
        if (row >= row_end_) continue;
        float* to = a_.accumulators + ((rows + row) * a_.chunks + chunk_) * kValues +
                    FirstColumn() + lane_ % 4 * 2;
#pragma unroll
        for (int c = 0; c < L::kColumnTiles; ++c) {
          *reinterpret_cast<float2*>(to + c * 8) =
              make_float2(out_[t][c][half * 2], out_[t][c][half * 2 + 1]);
        }
      }
    // The same tree of additions for every number of threads per row.
    float total = sums_[0];
    if constexpr (L::kRowKeys == 2) total = __fadd_rn(sums_[0], sums_[1]);
    if constexpr (L::kRowKeys == 4) {
      total = __fadd_rn(__fadd_rn(sums_[0], sums_[1]), __fadd_rn(sums_[2], sums_[3]));
    }
#pragma unroll
    for (int lanes = 1; lanes < L::kRowThreads; lanes *= 2) {
      total = __fadd_rn(total, __shfl_xor_sync(~0u, total, lanes));
    }
    const int row = first_row_ + threadIdx.x / L::kRowThreads;
    if (threadIdx.x % L::kRowThreads == 0 && row < row_end_) {
      a_.maxima[(rows + row) * a_.chunks + chunk_] = base_;
      a_.sums[(rows + row) * a_.chunks + chunk_] = total;
    }
  }

  static constexpr int kLanes = kThreads / kStep;  // threads that copy one key
  static constexpr int kPhases = 4;

  const TreeAttentionArgs& a_;
  char* const shared_;
  const uint32_t shared_address_;
  const int warp_, lane_;
  int batch_, chunk_, first_row_, row_end_, first_node_, node_count_;
  int start_, length_, steps_, prefix_steps_;
  uint32_t copy_to_, key_fragment_, p_fragment_, value_fragment_;  // addresses
  const __nv_bfloat16* copy_from_;
  int score_to_, score_from_, p_to_;  // offsets
  float scores_[L::kScoreTiles][L::kKeyTiles][4];
  float part_[2][L::kRowKeys], p_[L::kRowKeys], top_;
  bool rescale_ = false;
  float base_ = -INFINITY;
  float sums_[L::kRowKeys] = {};
  uint32_t q_[L::kScoreTiles][L::kQuarterTiles][4];
  float out_[L::kOutTiles][L::kColumnTiles][4];
};

}  // namespace attention
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_BLOCK_CUH_
