// The ops that kdtr_check can run: each in a file <op>_case.cc, similar ones in one.

#ifndef KDTREE_JAX_CHECK_OPS_H_
#define KDTREE_JAX_CHECK_OPS_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "golden_case.h"

namespace kdtree_jax {

using Launch = std::function<cudaError_t(cudaStream_t)>;

// Declares a case's tensors and attributes, and returns what launches the op on them.
// The launch is used only where `setup` has no error.
using SetUp = Launch (*)(CaseSetup& setup);

Launch SetUpAcceptTree(CaseSetup& setup);
Launch SetUpAddRmsNorm(CaseSetup& setup);
Launch SetUpBestToken(CaseSetup& setup);
Launch SetUpBuildTree(CaseSetup& setup);
Launch SetUpCompact(CaseSetup& setup);
Launch SetUpEmit(CaseSetup& setup);
Launch SetUpGroupedMatmul(CaseSetup& setup);
Launch SetUpHeadMatmul(CaseSetup& setup);
Launch SetUpMatmul(CaseSetup& setup);
Launch SetUpRmsNorm(CaseSetup& setup);
Launch SetUpRope(CaseSetup& setup);
Launch SetUpRopeKeys(CaseSetup& setup);
Launch SetUpRoute(CaseSetup& setup);
Launch SetUpRoutedExperts(CaseSetup& setup);
Launch SetUpTokenLogProbs(CaseSetup& setup);
Launch SetUpTreeAncestors(CaseSetup& setup);
Launch SetUpTreeAttention(CaseSetup& setup);

// Chooses the kernel of the cases set up from now on, where it takes them: "portable",
// "hopper", or "" for the one that the op chooses. False for another name.
bool ChooseAttentionKernel(const std::string& name);

// Null for an op that is not in the table.
SetUp FindOp(const std::string& name);

// The names of all ops, for messages.
std::string OpNames();

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_OPS_H_
