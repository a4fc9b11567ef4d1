// Tree attention on tensor cores: which block for which shape. The work of a block is in
// tree_attention_block.cuh.

#include <cstdint>

#include "shared_memory.h"
#include "tree_attention.h"
#include "tree_attention_block.cuh"

namespace kdtree_jax {
namespace {

using attention::Block;
using attention::Layout;
using attention::kThreads;

template <int kWidth, int kValues, int kRows, bool kManyNodes>
__global__ void __launch_bounds__(kThreads, kRows == 16 ? 2 : 1)
    TreeAttentionMmaKernel(const __grid_constant__ TreeAttentionArgs args) {
  extern __shared__ __align__(128) char shared[];
  Block<kWidth, kValues, kRows, kManyNodes>(args, shared).Run();
}

KDT_DYNAMIC_SHARED_MEMORY(TreeAttentionMmaKernel, (Layout<576, 512, 64>::kBytes));

template <int kWidth, int kValues, int kRows, bool kManyNodes>
cudaError_t Launch(cudaStream_t stream, TreeAttentionArgs args) {
  auto kernel = TreeAttentionMmaKernel<kWidth, kValues, kRows, kManyNodes>;
  constexpr int kBytes = Layout<kWidth, kValues, kRows>::kBytes;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const int rows = args.nodes * args.heads;
  const dim3 grid((rows + kRows - 1) / kRows, args.chunks, args.batch);
  args.scale *= 1.44269504088896340736f;  // log2(e)
  kernel<<<grid, kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <int kWidth, int kValues>
cudaError_t LaunchShape(cudaStream_t stream, const TreeAttentionArgs& args, int rows) {
  if (args.heads % rows == 0) {
    switch (rows) {
      case 64:
        return Launch<kWidth, kValues, 64, false>(stream, args);
      case 32:
        return Launch<kWidth, kValues, 32, false>(stream, args);
      default:
        return Launch<kWidth, kValues, 16, false>(stream, args);
    }
  }
  return Launch<kWidth, kValues, 32, true>(stream, args);
}

// Rows per block. It changes the speed only: no bit of the result depends on it.
int RowsPerBlock(const TreeAttentionArgs& args) {
  constexpr int kEnoughBlocks = 120;  // about the SMs of an H200 (132)
  const int64_t rows = static_cast<int64_t>(args.nodes) * args.heads;
  for (int per_block : {64, 32}) {
    const int64_t blocks = rows / per_block * args.chunks * args.batch;
    if (args.heads % per_block == 0 && blocks >= kEnoughBlocks) return per_block;
  }
  return args.heads % 16 == 0 && rows * args.chunks * args.batch < 32 * kEnoughBlocks
             ? 16
             : 32;
}

}  // namespace

bool TreeAttentionMmaSupports(const TreeAttentionArgs& args) {
  return args.element == Element::kBFloat16 &&
         ((args.width == 576 && args.value_dim == 512) ||
          (args.width == 80 && args.value_dim == 64));
}

cudaError_t LaunchTreeAttentionMma(cudaStream_t stream, const TreeAttentionArgs& args) {
  for (const void* keys : {args.cache, args.tree_keys}) {
    // Keys are copied 16 bytes at a time.
    if (reinterpret_cast<uintptr_t>(keys) % 16 != 0) return cudaErrorMisalignedAddress;
  }
  const int rows = args.rows_per_block ? args.rows_per_block : RowsPerBlock(args);
  if (args.width == 576) return LaunchShape<576, 512>(stream, args, rows);
  return LaunchShape<80, 64>(stream, args, rows);
}

}  // namespace kdtree_jax
