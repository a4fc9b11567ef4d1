#include "build_tree.h"

#include <algorithm>

#include "ops.h"

namespace kdtree_jax {
namespace {

// Inputs and outputs of the search. The table is an input, or comes from logits.
TreeArgs SetUpSearch(CaseSetup& setup, int batch, int depths, int width) {
  TreeArgs args{};
  args.batch = batch;
  args.depths = depths;
  args.width = width;
  args.budget = static_cast<int>(setup.Integer("budget", 0, kBuildTreeMaxNodes - 1));
  args.rows = static_cast<int>(setup.Integer("rows", 1 + args.budget, 1 << 20));
  const int64_t B = batch, N = args.rows;
  args.root_tokens = setup.InputI32("roots", {B});
  args.limit = setup.InputI32("limit", {B});
  args.max_depth = setup.InputI32("max_depth", {B});
  args.limit_stride = 1;
  args.max_depth_stride = 1;
  args.token_ids = setup.OutputI32("token_ids", {B, N});
  args.parents = setup.OutputI32("parents", {B, N});
  args.depths_out = setup.OutputI32("depths", {B, N});
  args.log_probs = setup.OutputF32("log_probs", {B, N});
  args.size = setup.OutputI32("size", {B});
  return args;
}

Launch FromTable(CaseSetup& setup) {
  const int B = setup.Dim("B", "log_probs", 0);
  const int L = setup.Dim("L", "log_probs", 1);
  const int k = setup.Dim("k", "log_probs", 2);
  if (k < 1 || k > kBuildTreeMaxWidth) setup.Refuse("k", "is out of range");
  TreeArgs args = SetUpSearch(setup, B, L, k);
  args.table = setup.InputF32("log_probs", {B, L, k});
  args.table_tokens = setup.InputI32("candidates", {B, L, k});
  return [args](cudaStream_t stream) { return LaunchTreeFromTable(stream, args); };
}

Launch FromLogits(CaseSetup& setup) {
  CandidateArgs candidates{};
  candidates.batch = setup.Dim("B", "logits", 0);
  candidates.depths = setup.Dim("L", "logits", 1);
  candidates.vocab = setup.Dim("V", "logits", 2);
  candidates.logit_depths = candidates.depths;
  const DType dtype = setup.Type("logits");
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    setup.Refuse("logits", "must be f32 or bf16");
  }
  candidates.is_bfloat16 = dtype == DType::kBf16;
  TreeArgs tree = SetUpSearch(setup, candidates.batch, candidates.depths, 0);
  candidates.width = tree.width = std::min(tree.budget, candidates.vocab);
  if (tree.width < 1) setup.Refuse("k", "must be 1 or more");
  if (!setup.error().empty()) return nullptr;
  const int64_t B = candidates.batch, L = candidates.depths;
  candidates.logits = setup.Input("logits", dtype, {B, L, candidates.vocab});
  const uint64_t table = sizeof(float) * static_cast<uint64_t>(B * L) * tree.width;
  candidates.log_probs = static_cast<float*>(setup.Workspace("log_probs", table));
  candidates.token_ids = static_cast<int32_t*>(setup.Workspace("token_ids", table));
  candidates.workspace = setup.Workspace(
      "candidates", CandidateWorkspaceBytes(candidates.batch, candidates.depths,
                                            candidates.vocab, candidates.width));
  tree.table = candidates.log_probs;
  tree.table_tokens = candidates.token_ids;
  return [candidates, tree](cudaStream_t stream) {
    return LaunchBuildTree(stream, candidates, tree);
  };
}

}  // namespace

Launch SetUpBuildTree(CaseSetup& setup) {
  return setup.Has("logits") ? FromLogits(setup) : FromTable(setup);
}

}  // namespace kdtree_jax
