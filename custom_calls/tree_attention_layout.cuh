// How a block of tree attention on tensor cores divides its work and shared memory.

#ifndef KDTREE_JAX_TREE_ATTENTION_LAYOUT_CUH_
#define KDTREE_JAX_TREE_ATTENTION_LAYOUT_CUH_

namespace kdtree_jax {
namespace attention {

constexpr int kThreads = 256;
constexpr int kStep = 16;      // keys per step
constexpr int kStages = 4;     // steps in shared memory
constexpr int kQuarters = 4;   // parts of the key width
constexpr float kSlack = 8.f;  // see Softmax

template <int kWidth, int kValues, int kRows>
struct Layout {
  static_assert(kWidth % 16 == 0 && kValues % 64 == 0 && kValues <= kWidth);
  static constexpr int kKTiles = kWidth / 16;
  static constexpr int kQuarterTiles = (kKTiles + kQuarters - 1) / kQuarters;
  static constexpr int kRowTiles = kRows / 16;
  // Row tiles that a warp's scores cover. Two warps share a quarter. With 64 rows they
  // split the rows (kRowGroups = 2), else the keys of a step (kKeyGroups = 2).
  static constexpr int kScoreTiles = kRows >= 32 ? 2 : 1;
  static constexpr int kRowGroups = kRowTiles / kScoreTiles;
  static constexpr int kKeyGroups = 2 / kRowGroups;
  static constexpr int kKeyTiles = 2 / kKeyGroups;  // of 8 keys, per warp
  // Output tiles of a warp: its row tiles, and how many of 8 columns.
  static constexpr int kOutTiles = kScoreTiles;
  static constexpr int kColumnTiles = kValues / 64 * kRowGroups;
  // Keys: rows of whole 128-byte lines, 16-byte pieces permuted within a line, so that
  // 8 keys lie in different banks and copies write whole lines.
  static constexpr int kKeyBytes = (kWidth * 2 + 127) / 128 * 128;
  static constexpr int kStageBytes = kStep * kKeyBytes;
  static constexpr int kPStride = kStep + 8;  // elements; conflict-free for ldmatrix
  static constexpr int kScores = kStages * kStageBytes;
  static constexpr int kP = kScores + kQuarters * kRows * kStep * 4;
  static constexpr int kFactors = kP + 2 * kRows * kPStride * 2;
  static constexpr int kBarriers = kFactors + 2 * kRows * 4;
  static constexpr int kBytes = kBarriers + kStages * 8;
  // Threads per row in the softmax and keys per such thread.
  static constexpr int kRowThreads = kThreads / kRows;
  static constexpr int kRowKeys = kStep / kRowThreads;
};

}  // namespace attention
}  // namespace kdtree_jax

#endif  // KDTREE_JAX_TREE_ATTENTION_LAYOUT_CUH_
