#include "tree_attention.h"

namespace kdtree_jax {

cudaError_t LaunchTreeAttention(cudaStream_t stream, const TreeAttentionArgs& args) {
  if (args.batch == 0 || args.nodes == 0 || args.heads == 0) return cudaSuccess;
  const cudaError_t status = TreeAttentionMmaSupports(args)
                                 ? LaunchTreeAttentionMma(stream, args)
                                 : LaunchTreeAttentionSimt(stream, args);
  if (status != cudaSuccess) return status;
  return LaunchTreeAttentionMerge(stream, args);
}

}  // namespace kdtree_jax
