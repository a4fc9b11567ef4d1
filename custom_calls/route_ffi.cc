#include "route.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

// logits [T, E], bias [E] or none -> experts [T, k], weights [T, k], scores [T, E].
ffi::Error Route(cudaStream_t stream, ffi::BufferR2<ffi::F32> logits,
                 ffi::RemainingArgs rest, ffi::ResultBufferR2<ffi::S32> experts,
                 ffi::ResultBufferR2<ffi::F32> weights,
                 ffi::ResultBufferR2<ffi::F32> scores, int64_t softmax,
                 int64_t n_group, int64_t topk_group, int64_t norm_topk_prob,
                 double scaling) {
  constexpr char kName[] = "route";
  const int64_t T = logits.dimensions()[0], E = logits.dimensions()[1];
  const int64_t k = experts->dimensions()[1];
  if (E < 1 || E > kRouteMaxExperts) {
    return BadArgument(kName, "logits has " + std::to_string(E) +
                                  " experts; 1 .. 1024 are allowed");
  }
  if (k < 1 || k > std::min<int64_t>(E, kRouteMaxChosen)) {
    return BadArgument(kName, "experts has " + std::to_string(k) + " slots of " +
                                  std::to_string(E) +
                                  " experts; 1 .. 32, and no more than there are "
                                  "experts, are allowed");
  }
  RouteArgs args = {};
  if (rest.size() > 1) return BadArgument(kName, "bias must be the last argument");
  if (rest.size() == 1) {
    const auto bias = rest.get<ffi::AnyBuffer>(0);
    if (bias.has_error()) return bias.error();
    if (auto e = FirstOf({CheckShapes(kName, {{"bias", *bias, {E}}}),
                          CheckType(kName, "bias", *bias, ffi::F32)});
        e.failure()) {
      return e;
    }
    args.bias = bias->typed_data<float>();
  }
  if (auto e = CheckShapes(kName, {{"logits", logits, {T, E}},
                                   {"experts", *experts, {T, k}},
                                   {"weights", *weights, {T, k}},
                                   {"scores", *scores, {T, E}}});
      e.failure()) {
    return e;
  }
  if (n_group < 1 || n_group > kRouteMaxGroups || E % n_group != 0) {
    return BadArgument(kName, "n_group " + std::to_string(n_group) + " with " +
                                  std::to_string(E) +
                                  " experts is not allowed: it must be 1 .. 32, and "
                                  "divide them");
  }
  if (topk_group < 1 || topk_group > n_group) {
    return BadArgument(kName, "topk_group " + std::to_string(topk_group) +
                                  " is not allowed: it must be 1 .. n_group = " +
                                  std::to_string(n_group));
  }
  args.logits = logits.typed_data();
  args.experts = experts->typed_data();
  args.weights = weights->typed_data();
  args.scores = scores->typed_data();
  args.tokens = static_cast<int>(T);
  args.num_experts = static_cast<int>(E);
  args.chosen = static_cast<int>(k);
  args.n_group = static_cast<int>(n_group);
  args.topk_group = static_cast<int>(topk_group);
  args.softmax = softmax != 0;
  args.normalise = norm_topk_prob != 0;
  args.scaling = static_cast<float>(scaling);
  return Launched(kName, LaunchRoute(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeRoute, Route,
                              Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // logits
                                  .RemainingArgs()                 // bias or none
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // experts
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // weights
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // scores
                                  .Attr<int64_t>("softmax")
                                  .Attr<int64_t>("n_group")
                                  .Attr<int64_t>("topk_group")
                                  .Attr<int64_t>("norm_topk_prob")
                                  .Attr<double>("scaling"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
