#include "ops.h"

namespace kdtree_jax {
namespace {

struct Op {
  const char* name;
  SetUp set_up;
};

constexpr Op kOps[] = {
    {"accept_tree", SetUpAcceptTree},
    {"add_rms_norm", SetUpAddRmsNorm},
    {"best_token", SetUpBestToken},
    {"build_tree", SetUpBuildTree},
    {"compact", SetUpCompact},
    {"emit", SetUpEmit},
    {"grouped_matmul", SetUpGroupedMatmul},
    {"head_matmul", SetUpHeadMatmul},
    {"matmul", SetUpMatmul},
    {"rms_norm", SetUpRmsNorm},
    {"rope", SetUpRope},
    {"rope_keys", SetUpRopeKeys},
    {"route", SetUpRoute},
    {"routed_experts", SetUpRoutedExperts},
    {"token_log_probs", SetUpTokenLogProbs},
    {"tree_ancestors", SetUpTreeAncestors},
    {"tree_attention", SetUpTreeAttention},
};

}  // namespace

SetUp FindOp(const std::string& name) {
  for (const Op& op : kOps) {
    if (name == op.name) return op.set_up;
  }
  return nullptr;
}

std::string OpNames() {
  std::string names;
  for (const Op& op : kOps) {
    if (!names.empty()) names += ", ";
    names += op.name;
  }
  return names;
}

}  // namespace kdtree_jax
