#include "tree_attention.h"

#include <string>

#include "ops.h"

namespace kdtree_jax {

namespace {

TreeAttentionKernel chosen = TreeAttentionKernel::kAuto;
int blocks_per_item = 0;

}  // namespace

bool ChooseAttentionKernel(const std::string& name) {
  if (name.empty()) return true;
  for (const int blocks : {1, 2, 4, 8}) {
    if (name == "hopper-" + std::to_string(blocks)) blocks_per_item = blocks;
  }
  if (name == "hopper" || blocks_per_item != 0) {
    chosen = TreeAttentionKernel::kHopper;
  } else if (name == "portable") {
    chosen = TreeAttentionKernel::kPortable;
  }
  return chosen != TreeAttentionKernel::kAuto;
}

Launch SetUpTreeAttention(CaseSetup& setup) {
  TreeAttentionArgs args{};
  args.batch = setup.Dim("B", "q", 0);
  args.nodes = setup.Dim("N", "q", 1);
  args.heads = setup.Dim("H", "q", 2);
  args.width = setup.Dim("W", "q", 3);
  args.capacity = setup.Dim("S", "cache", 1);
  args.max_ancestors = setup.Dim("A", "ancestors", 2);
  args.value_dim = static_cast<int>(setup.Integer("value_dim", 1, args.width));
  args.chunk = static_cast<int>(setup.Integer("chunk", 16, 1 << 20));
  if (args.chunk % 16 != 0) setup.Refuse("attribute chunk", "is no multiple of 16");
  // Golden files have one chunk for both kernels.
  args.chunk_on_hopper = args.chunk;
  const int64_t positions = int64_t{args.capacity} + args.max_ancestors;
  args.chunks = static_cast<int>((positions + args.chunk - 1) / args.chunk);
  args.scale = static_cast<float>(setup.Number("scale"));
  const DType dtype = setup.Type("q");
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    setup.Refuse("q", "must be f32 or bf16");
  }
  args.element = dtype == DType::kF32 ? Element::kFloat32 : Element::kBFloat16;
  const int64_t B = args.batch, N = args.nodes, H = args.heads, W = args.width;
  const int64_t R = args.value_dim;
  args.q = setup.Input("q", dtype, {B, N, H, W});
  args.cache = setup.Input("cache", dtype, {B, args.capacity, W});
  args.tree_keys = setup.Input("tree_keys", dtype, {B, N, W});
  args.ancestors = setup.InputI32("ancestors", {B, N, args.max_ancestors});
  args.depths = setup.InputI32("depths", {B, N});
  args.lengths = setup.InputI32("lengths", {B});
  args.out = setup.Output("out", dtype, {B, N, H, R});
  const uint64_t partials = static_cast<uint64_t>(B * N * H) * args.chunks;
  args.accumulators =
      static_cast<float*>(setup.Workspace("accumulators", 4 * partials * R));
  args.maxima = static_cast<float*>(setup.Workspace("maxima", 4 * partials));
  args.sums = static_cast<float*>(setup.Workspace("sums", 4 * partials));
  args.messages = setup.Workspace("messages", kHopperMessagesBytes);
  if (chosen != TreeAttentionKernel::kHopper || TreeAttentionHopperTakes(args)) {
    args.kernel = chosen;
    args.blocks_per_item = blocks_per_item;
  }
  return [args](cudaStream_t stream) { return LaunchTreeAttention(stream, args); };
}

}  // namespace kdtree_jax
