#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "ffi_support.h"
#include "tree_attention.h"

namespace kdtree_jax {
namespace {

ffi::Error TreeAttention(
    cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer cache,
    ffi::AnyBuffer tree_keys, ffi::BufferR3<ffi::S32> ancestors,
    ffi::BufferR2<ffi::S32> depths, ffi::BufferR1<ffi::S32> lengths,
    ffi::Result<ffi::AnyBuffer> out, ffi::ResultBufferR4<ffi::F32> accumulators,
    ffi::ResultBufferR3<ffi::F32> maxima, ffi::ResultBufferR3<ffi::F32> sums,
    ffi::ResultBufferR1<ffi::U8> messages, int64_t layer, int64_t chunk,
    int64_t chunk_on_hopper, int64_t kernel, int64_t rows_per_block,
    int64_t blocks_per_item, double scale) {
  static constexpr char kName[] = "tree_attention";
  const auto refuse = [](const std::string& what) { return BadArgument(kName, what); };
  const ffi::DataType dtype = q.element_type();
  if (dtype != ffi::DataType::F32 && dtype != ffi::DataType::BF16) {
    return refuse("q must be float32 or bfloat16");
  }
  if (auto e = CheckShapes(kName, {{"q", q, {kAny, kAny, kAny, kAny}},
                                   {"out", *out, {kAny, kAny, kAny, kAny}},
                                   {"cache", cache, {kAny, kAny, kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const int64_t B = q.dimensions()[0], N = q.dimensions()[1], H = q.dimensions()[2];
  const int64_t W = q.dimensions()[3], R = out->dimensions()[3];
  const int64_t layers = cache.dimensions()[0], S = cache.dimensions()[2];
  const int64_t A = ancestors.dimensions()[2], C = maxima->dimensions()[2];
  if (auto e = FirstOf(
          {CheckShapes(kName, {{"cache", cache, {layers, B, S, W}},
                               {"tree_keys", tree_keys, {B, N, W}},
                               {"ancestors", ancestors, {B, N, A}},
                               {"depths", depths, {B, N}},
                               {"lengths", lengths, {B}},
                               {"out", *out, {B, N, H, R}},
                               {"accumulators", *accumulators, {B, N * H, C, R}},
                               {"maxima", *maxima, {B, N * H, C}},
                               {"sums", *sums, {B, N * H, C}}}),
           CheckType(kName, "cache", cache, dtype),
           CheckType(kName, "tree_keys", tree_keys, dtype),
           CheckType(kName, "out", *out, dtype)});
      e.failure()) {
    return e;
  }
  if (W < 1 || W > kTreeAttentionMaxWidth) {
    return refuse("q is " + std::to_string(W) + " wide; 1 .. " +
                  std::to_string(kTreeAttentionMaxWidth) + " are allowed");
  }
  if (R < 1 || R > W) {
    return refuse("out is " + std::to_string(R) + " wide; 1 .. " + std::to_string(W) +
                  ", the width of q, are allowed");
  }
  if (A < 1) return refuse("ancestors has no depth; it must have 1 or more");
  if (B > kTreeAttentionMaxBatch) {
    return refuse("q has " + std::to_string(B) + " sequences; at most " +
                  std::to_string(kTreeAttentionMaxBatch) + " are allowed");
  }
  // The kernels count these in ints.
  if (N * H > INT32_MAX || N * A > INT32_MAX / std::max<int64_t>(B, 1)) {
    return refuse(
        "q or ancestors is too large: N * H and B * N * A must be less than "
        "2^31");
  }
  if (layer < 0 || layer >= layers) {
    return refuse("layer " + std::to_string(layer) + " is none of the cache's " +
                  std::to_string(layers));
  }
  if (rows_per_block != 0 && rows_per_block != 16 && rows_per_block != 32 &&
      rows_per_block != 64) {
    return refuse("rows_per_block must be 0, 16, 32 or 64");
  }
  if (chunk <= 0 || chunk % 16 != 0 || chunk > kTreeAttentionMaxChunk) {
    return refuse("chunk " + std::to_string(chunk) +
                  " is not allowed: it must be a multiple of 16, at most " +
                  std::to_string(kTreeAttentionMaxChunk));
  }
  if (chunk_on_hopper < chunk || chunk_on_hopper % 16 != 0 ||
      chunk_on_hopper > kTreeAttentionMaxChunk) {
    return refuse("chunk_on_hopper " + std::to_string(chunk_on_hopper) +
                  " is not allowed: it must be a multiple of 16, at least chunk " +
                  std::to_string(chunk) + " and at most " +
                  std::to_string(kTreeAttentionMaxChunk));
  }
  if (kernel < 0 || kernel > static_cast<int>(TreeAttentionKernel::kHopper)) {
    return refuse("kernel must be 0 (auto), 1 (portable) or 2 (hopper)");
  }
  if (blocks_per_item != 0 && blocks_per_item != 1 && blocks_per_item != 2 &&
      blocks_per_item != 4 && blocks_per_item != 8) {
    return refuse("blocks_per_item must be 0, 1, 2, 4 or 8");
  }
  if (C > kTreeAttentionMaxChunks) {
    return refuse("maxima has " + std::to_string(C) + " chunks; at most " +
                  std::to_string(kTreeAttentionMaxChunks) + " are allowed");
  }
  if (C * chunk < S + A || C * chunk > INT32_MAX) {
    return refuse("maxima has " + std::to_string(C) + " chunks of " +
                  std::to_string(chunk) + " positions, too few for " +
                  std::to_string(S + A) + " or more than 2^31 - 1 positions");
  }

  TreeAttentionArgs args;
  args.element = dtype == ffi::DataType::F32 ? Element::kFloat32 : Element::kBFloat16;
  args.batch = static_cast<int>(B);
  args.nodes = static_cast<int>(N);
  args.heads = static_cast<int>(H);
  args.width = static_cast<int>(W);
  args.value_dim = static_cast<int>(R);
  args.capacity = static_cast<int>(S);
  args.max_ancestors = static_cast<int>(A);
  args.chunk = static_cast<int>(chunk);
  args.chunks = static_cast<int>(C);
  args.chunk_on_hopper = static_cast<int>(chunk_on_hopper);
  args.kernel = static_cast<TreeAttentionKernel>(kernel);
  args.rows_per_block = static_cast<int>(rows_per_block);
  args.blocks_per_item = static_cast<int>(blocks_per_item);
  args.scale = static_cast<float>(scale);
  const size_t element_bytes = args.element == Element::kFloat32 ? 4 : 2;
  const size_t layer_bytes = element_bytes * B * S * W;
  args.q = q.untyped_data();
  args.cache =
      static_cast<const std::byte*>(cache.untyped_data()) + layer * layer_bytes;
  args.tree_keys = tree_keys.untyped_data();
  args.ancestors = ancestors.typed_data();
  args.depths = depths.typed_data();
  args.lengths = lengths.typed_data();
  args.out = out->untyped_data();
  args.accumulators = accumulators->typed_data();
  args.maxima = maxima->typed_data();
  args.sums = sums->typed_data();
  args.messages = messages->typed_data();
  if (args.kernel == TreeAttentionKernel::kHopper && !TreeAttentionHopperTakes(args)) {
    return refuse(
        "the kernel for Hopper takes bfloat16, W = 576, R = 512 and a positive "
        "scale only");
  }
  if (args.kernel != TreeAttentionKernel::kPortable && TreeAttentionHopperTakes(args) &&
      messages->element_count() < kHopperMessagesBytes) {
    return refuse("messages has " + std::to_string(messages->element_count()) +
                  " bytes; the kernel for Hopper needs " +
                  std::to_string(kHopperMessagesBytes));
  }
  if (TreeAttentionMmaSupports(args)) {
    for (const auto& [name, data] :
         {std::pair{"q", args.q}, std::pair{"cache", args.cache},
          std::pair{"tree_keys", args.tree_keys}}) {
      if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
        return refuse(std::string(name) + " must lie on a multiple of 16 bytes");
      }
    }
  }
  return Launched(kName, LaunchTreeAttention(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeTreeAttention, TreeAttention,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // q
                                  .Arg<ffi::AnyBuffer>()           // cache
                                  .Arg<ffi::AnyBuffer>()           // tree_keys
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // ancestors
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // depths
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // lengths
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::BufferR4<ffi::F32>>()  // accumulators
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // maxima
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // sums
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // messages
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("chunk_on_hopper")
                                  .Attr<int64_t>("kernel")
                                  .Attr<int64_t>("rows_per_block")
                                  .Attr<int64_t>("blocks_per_item")
                                  .Attr<double>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
