#include "tree_attention.h"

namespace kdtree_jax {
namespace {

cudaError_t ShouldRunOnHopper(const TreeAttentionArgs& args, bool* should) {
  const bool named = args.kernel == TreeAttentionKernel::kHopper;
  *should = named ? TreeAttentionHopperTakes(args)
                  : args.kernel == TreeAttentionKernel::kAuto &&
                        TreeAttentionFillsHopper(args);
  if (*should) {
    if (const cudaError_t e = TreeAttentionHopperRuns(should); e != cudaSuccess) return e;
  }
  return named && !*should ? cudaErrorNotSupported : cudaSuccess;
}

}  // namespace

cudaError_t LaunchTreeAttention(cudaStream_t stream, const TreeAttentionArgs& args) {
  if (args.batch == 0 || args.nodes == 0 || args.heads == 0) return cudaSuccess;
  bool hopper;
  cudaError_t status = ShouldRunOnHopper(args, &hopper);
  if (status != cudaSuccess) return status;
  TreeAttentionArgs a = args;
  if (hopper) {
    a.chunk = a.chunk_on_hopper;
    a.chunks = (a.capacity + a.max_ancestors + a.chunk - 1) / a.chunk;
    status = LaunchTreeAttentionHopper(stream, a);
  } else {
    status = TreeAttentionMmaSupports(a) ? LaunchTreeAttentionMma(stream, a)
                                         : LaunchTreeAttentionSimt(stream, a);
  }
  if (status != cudaSuccess) return status;
  return LaunchTreeAttentionMerge(stream, a);
}

}  // namespace kdtree_jax
