#include "route.h"

#include "ops.h"

namespace kdtree_jax {

Launch SetUpRoute(CaseSetup& setup) {
  RouteArgs args{};
  args.tokens = setup.Dim("T", "logits", 0);
  args.num_experts = setup.Dim("E", "logits", 1);
  const int T = args.tokens, E = args.num_experts;
  if (E < 1 || E > kRouteMaxExperts) {
    setup.Refuse("E", "must be from 1 to " + std::to_string(kRouteMaxExperts));
  }
  const int most = E < kRouteMaxChosen ? E : kRouteMaxChosen;
  args.chosen = static_cast<int>(setup.Integer("k", 1, most));
  args.n_group = static_cast<int>(setup.Integer("n_group", 1, kRouteMaxGroups));
  args.topk_group = static_cast<int>(setup.Integer("topk_group", 1, args.n_group));
  if (E % args.n_group != 0) setup.Refuse("n_group", "must divide E");
  args.softmax = setup.Flag("softmax");
  args.normalise = setup.Flag("norm_topk_prob");
  args.scaling = static_cast<float>(setup.Number("scaling"));
  args.logits = setup.InputF32("logits", {T, E});
  if (setup.Has("bias")) args.bias = setup.InputF32("bias", {E});
  args.experts = setup.OutputI32("experts", {T, args.chosen});
  args.weights = setup.OutputF32("weights", {T, args.chosen});
  args.scores = setup.OutputF32("scores", {T, E});
  return [args](cudaStream_t stream) { return LaunchRoute(stream, args); };
}

}  // namespace kdtree_jax
