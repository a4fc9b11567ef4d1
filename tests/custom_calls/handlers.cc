// The handlers of all custom calls for a GPU that is none: XLA's CPU client calls them,
// and the launchers count their calls and write nothing. For handler_calls.py.

#include <cuda_runtime_api.h>

#include "xla/ffi/api/ffi.h"

// The CPU client has no stream to give. This takes the place of the template for any
// stream, before a handler uses it.
template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;

  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return cudaStream_t{};
  }
};

#include "accept_tree_ffi.cc"
#include "best_token_ffi.cc"
#include "build_tree_ffi.cc"
#include "compact_ffi.cc"
#include "emit_ffi.cc"
#include "grouped_matmul_ffi.cc"
#include "matmul_chain_ffi.cc"
#include "matmul_ffi.cc"
#include "rms_norm_ffi.cc"
#include "rope_ffi.cc"
#include "rope_keys_ffi.cc"
#include "route_ffi.cc"
#include "routed_experts_ffi.cc"
#include "token_log_probs_ffi.cc"
#include "tree_ancestors_ffi.cc"
#include "tree_attention_ffi.cc"

extern "C" {

int kdt_launches = 0;
int kdt_mma_products = 0;  // launches of LaunchMatmulMma
int kdt_mma_supports = 0;  // what TreeAttentionMmaSupports says
int kdt_status = cudaSuccess;  // what the launchers return

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheTest"; }
const char* cudaGetErrorString(cudaError_t) { return "as told"; }

}  // extern "C"

namespace kdtree_jax {

cudaError_t Launch() {
  ++kdt_launches;
  return static_cast<cudaError_t>(kdt_status);
}

cudaError_t LaunchAcceptTree(cudaStream_t, const AcceptTreeArgs&) { return Launch(); }
cudaError_t LaunchBestToken(cudaStream_t, const BestTokenArgs&) { return Launch(); }
cudaError_t LaunchLogSoftmaxTopK(cudaStream_t, const CandidateArgs&) {
  return Launch();
}
cudaError_t LaunchTreeFromTable(cudaStream_t, const TreeArgs&) { return Launch(); }
cudaError_t LaunchBuildTree(cudaStream_t, const CandidateArgs&, const TreeArgs&) {
  return Launch();
}
cudaError_t LaunchCompact(cudaStream_t, const CompactArgs&) { return Launch(); }
cudaError_t LaunchCombineExperts(cudaStream_t, const CombineExpertsArgs&) {
  return Launch();
}
cudaError_t LaunchEmit(cudaStream_t, const EmitArgs&) { return Launch(); }
cudaError_t LaunchExpertRows(cudaStream_t, const ExpertRowsArgs&) { return Launch(); }
cudaError_t LaunchGroupChunks(cudaStream_t, const GroupChunksArgs&) { return Launch(); }
cudaError_t LaunchMatmulMma(cudaStream_t, const MatmulArgs&) {
  ++kdt_mma_products;
  return Launch();
}
cudaError_t LaunchMatmulSimt(cudaStream_t, const MatmulArgs&) { return Launch(); }
cudaError_t LaunchRmsNorm(cudaStream_t, const RmsNormArgs&) { return Launch(); }
cudaError_t LaunchRope(cudaStream_t, const RopeArgs&) { return Launch(); }
cudaError_t LaunchRopeKeys(cudaStream_t, const RopeKeysArgs&) { return Launch(); }
cudaError_t LaunchRoute(cudaStream_t, const RouteArgs&) { return Launch(); }
cudaError_t LaunchTokenLogProbs(cudaStream_t, const TokenLogProbsArgs&) {
  return Launch();
}
cudaError_t LaunchTreeAncestors(cudaStream_t, const TreeAncestorsArgs&) {
  return Launch();
}
cudaError_t LaunchTreeAttention(cudaStream_t, const TreeAttentionArgs&) {
  return Launch();
}
bool TreeAttentionMmaSupports(const TreeAttentionArgs&) { return kdt_mma_supports; }

// As in build_tree.cu.
size_t CandidateWorkspaceBytes(int batch, int depths, int vocab, int width) {
  const size_t slices = (vocab - 1) / kLogitsPerSlice + 1;
  const size_t bytes = batch * (depths * slices * (16 + 8 * width) + sizeof(int));
  return (bytes + 7) / 8 * 8;
}

}  // namespace kdtree_jax
