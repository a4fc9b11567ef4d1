// The router of a mixture of experts: from logits to the chosen experts and their
// weights, as DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and the older softmax
// router choose them.

#ifndef KDTREE_JAX_ROUTE_H_
#define KDTREE_JAX_ROUTE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kdtree_jax {

constexpr int kRouteMaxExperts = 1024;
constexpr int kRouteMaxGroups = 32;
constexpr int kRouteMaxChosen = 32;

// Shapes: T tokens, E experts, k of them chosen.
struct RouteArgs {
  const float* logits;  // [T, E]
  const float* bias;    // [E], added to the scores to select, not to weigh; or null
  int32_t* experts;     // [T, k], best first; equal ones: the lowest id; NaN is best
  float* weights;       // [T, k]
  float* scores;        // [T, E] without the bias
  int tokens;
  int num_experts;
  int chosen;      // k, at most E
  int n_group;     // of neighbouring experts, all of one size
  int topk_group;  // experts outside of that many best groups count as -inf
  bool softmax;    // scores, else sigmoid
  bool normalise;  // weights are divided by their sum (+ 1e-20)
  float scaling;   // factor on the weights
};

cudaError_t LaunchRoute(cudaStream_t stream, const RouteArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_ROUTE_H_
