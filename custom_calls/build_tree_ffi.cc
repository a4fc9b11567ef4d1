#include "build_tree.h"

#include <algorithm>
#include <string>

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

constexpr int64_t kMaxVocab = int64_t{1} << 30;

// Everything a tree is written to.
struct TreeBuffers {
  ffi::ResultBufferR2<ffi::S32> token_ids;  // [B, N]
  ffi::ResultBufferR2<ffi::S32> parents;    // [B, N]
  ffi::ResultBufferR2<ffi::S32> depths;     // [B, N]
  ffi::ResultBufferR2<ffi::F32> log_probs;  // [B, N]
  ffi::ResultBufferR1<ffi::S32> size;       // [B]
};

// The size that a bound must have: one value per sequence, or one for all.
int64_t BoundSize(ffi::Buffer<ffi::S32> bound, int64_t batch) {
  return bound.element_count() == 1 ? 1 : batch;
}

// Fills `args` but for the table, [batch, depths, width].
ffi::Error SetTree(const char* kernel, ffi::BufferR1<ffi::S32> root_tokens,
                   ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::S32> max_depth,
                   TreeBuffers out, int64_t batch, int64_t depths, int64_t width,
                   int64_t budget, TreeArgs* args) {
  const int64_t rows = out.token_ids->dimensions()[1];
  if (auto e = CheckShapes(kernel, {{"root_tokens", root_tokens, {batch}},
                                    {"limit", limit, {BoundSize(limit, batch)}},
                                    {"max_depth", max_depth,
                                     {BoundSize(max_depth, batch)}},
                                    {"token_ids", *out.token_ids, {batch, rows}},
                                    {"parents", *out.parents, {batch, rows}},
                                    {"depths", *out.depths, {batch, rows}},
                                    {"log_probs", *out.log_probs, {batch, rows}},
                                    {"size", *out.size, {batch}}});
      e.failure()) {
    return e;
  }
  if (budget < 0 || budget >= kBuildTreeMaxNodes || rows <= budget) {
    return BadArgument(kernel, "budget " + std::to_string(budget) + " with " +
                                   std::to_string(rows) +
                                   " slots of token_ids is not allowed");
  }
  args->root_tokens = root_tokens.typed_data();
  args->limit = limit.typed_data();
  args->max_depth = max_depth.typed_data();
  args->limit_stride = limit.element_count() == 1 ? 0 : 1;
  args->max_depth_stride = max_depth.element_count() == 1 ? 0 : 1;
  args->token_ids = out.token_ids->typed_data();
  args->parents = out.parents->typed_data();
  args->depths_out = out.depths->typed_data();
  args->log_probs = out.log_probs->typed_data();
  args->size = out.size->typed_data();
  args->batch = static_cast<int>(batch);
  args->depths = static_cast<int>(depths);
  args->width = static_cast<int>(width);
  args->budget = static_cast<int>(budget);
  args->rows = static_cast<int>(rows);
  return ffi::Error::Success();
}

ffi::Error SetCandidates(const char* kernel, ffi::AnyBuffer logits,
                         ffi::ResultBufferR3<ffi::F32> table,
                         ffi::ResultBufferR3<ffi::S32> table_tokens,
                         ffi::ResultBufferR1<ffi::U8> workspace, CandidateArgs* args) {
  const ffi::DataType type = logits.element_type();
  if (type != ffi::F32 && type != ffi::BF16) {
    return BadArgument(kernel, "logits must be float32 or bfloat16");
  }
  if (auto e = CheckShapes(kernel, {{"logits", logits, {kAny, kAny, kAny}}});
      e.failure()) {
    return e;
  }
  const auto dims = logits.dimensions();
  const auto table_dims = table->dimensions();
  if (auto e = CheckShapes(kernel, {{"table", *table, {dims[0], kAny, kAny}},
                                    {"table_tokens", *table_tokens, table_dims}});
      e.failure()) {
    return e;
  }
  if (table_dims[1] > dims[1]) {
    return BadArgument(kernel, "table has " + std::to_string(table_dims[1]) +
                                   " depths, but logits " + std::to_string(dims[1]));
  }
  const int64_t most = std::min<int64_t>(dims[2], kBuildTreeMaxWidth);
  if (table_dims[2] < 1 || table_dims[2] > most) {
    return BadArgument(kernel, "table has " + std::to_string(table_dims[2]) +
                                   " candidates per depth; 1 .. " +
                                   std::to_string(most) + " are allowed");
  }
  if (dims[2] > kMaxVocab) {
    return BadArgument(kernel, "logits has more than 2^30 tokens");
  }
  args->logits = logits.untyped_data();
  args->is_bfloat16 = type == ffi::BF16;
  args->log_probs = table->typed_data();
  args->token_ids = table_tokens->typed_data();
  args->workspace = workspace->typed_data();
  args->batch = static_cast<int>(dims[0]);
  args->logit_depths = static_cast<int>(dims[1]);
  args->depths = static_cast<int>(table_dims[1]);
  args->vocab = static_cast<int>(dims[2]);
  args->width = static_cast<int>(table_dims[2]);
  const size_t needed = CandidateWorkspaceBytes(args->batch, args->depths, args->vocab,
                                                args->width);
  if (workspace->element_count() < needed) {
    return BadArgument(kernel, "the workspace is too small: it must have " +
                                   std::to_string(needed) + " bytes");
  }
  return ffi::Error::Success();
}

ffi::Error LogSoftmaxTopK(cudaStream_t stream, ffi::AnyBuffer logits,
                          ffi::ResultBufferR3<ffi::F32> table,
                          ffi::ResultBufferR3<ffi::S32> table_tokens,
                          ffi::ResultBufferR1<ffi::U8> workspace) {
  CandidateArgs args;
  ffi::Error error =
      SetCandidates("log_softmax_topk", logits, table, table_tokens, workspace, &args);
  if (error.failure()) return error;
  return Launched("log_softmax_topk", LaunchLogSoftmaxTopK(stream, args));
}

ffi::Error TreeFromTable(
    cudaStream_t stream, ffi::BufferR3<ffi::F32> table,
    ffi::BufferR3<ffi::S32> table_tokens, ffi::BufferR1<ffi::S32> root_tokens,
    ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::S32> max_depth,
    ffi::ResultBufferR2<ffi::S32> token_ids, ffi::ResultBufferR2<ffi::S32> parents,
    ffi::ResultBufferR2<ffi::S32> depths, ffi::ResultBufferR2<ffi::F32> log_probs,
    ffi::ResultBufferR1<ffi::S32> size, int64_t budget) {
  constexpr char kName[] = "tree_from_table";
  const auto dims = table.dimensions();
  if (auto e = CheckShapes(
          kName, {{"table", table, dims}, {"table_tokens", table_tokens, dims}});
      e.failure()) {
    return e;
  }
  TreeArgs args;
  ffi::Error error = SetTree(kName, root_tokens, limit, max_depth,
                             {token_ids, parents, depths, log_probs, size}, dims[0],
                             dims[1], dims[2], budget, &args);
  if (error.failure()) return error;
  args.table = table.typed_data();
  args.table_tokens = table_tokens.typed_data();
  return Launched(kName, LaunchTreeFromTable(stream, args));
}

ffi::Error BuildTree(
    cudaStream_t stream, ffi::AnyBuffer logits, ffi::BufferR1<ffi::S32> root_tokens,
    ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::S32> max_depth,
    ffi::ResultBufferR2<ffi::S32> token_ids, ffi::ResultBufferR2<ffi::S32> parents,
    ffi::ResultBufferR2<ffi::S32> depths, ffi::ResultBufferR2<ffi::F32> log_probs,
    ffi::ResultBufferR1<ffi::S32> size, ffi::ResultBufferR3<ffi::F32> table,
    ffi::ResultBufferR3<ffi::S32> table_tokens,
    ffi::ResultBufferR1<ffi::U8> workspace, int64_t budget) {
  constexpr char kName[] = "build_tree";
  // The tree of a sequence is built behind the last row of its table.
  if (table->dimensions()[1] < 1) {
    return BadArgument(kName, "table has no depth; it must have 1 or more");
  }
  CandidateArgs candidates;
  ffi::Error error =
      SetCandidates(kName, logits, table, table_tokens, workspace, &candidates);
  if (error.failure()) return error;
  TreeArgs tree;
  error = SetTree(kName, root_tokens, limit, max_depth,
                  {token_ids, parents, depths, log_probs, size}, candidates.batch,
                  candidates.depths, candidates.width, budget, &tree);
  if (error.failure()) return error;
  tree.table = candidates.log_probs;
  tree.table_tokens = candidates.token_ids;
  return Launched(kName, LaunchBuildTree(stream, candidates, tree));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeLogSoftmaxTopK, LogSoftmaxTopK,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()            // logits
                                  .Ret<ffi::BufferR3<ffi::F32>>()   // table
                                  .Ret<ffi::BufferR3<ffi::S32>>()   // table_tokens
                                  .Ret<ffi::BufferR1<ffi::U8>>(),   // workspace
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeTreeFromTable, TreeFromTable,
                              Bind()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // table
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // table_tokens
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // root_tokens
                                  .Arg<ffi::Buffer<ffi::S32>>()    // limit
                                  .Arg<ffi::Buffer<ffi::S32>>()    // max_depth
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // token_ids
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // parents
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // depths
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // log_probs
                                  .Ret<ffi::BufferR1<ffi::S32>>()  // size
                                  .Attr<int64_t>("budget"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeBuildTree, BuildTree,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()           // logits
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // root_tokens
                                  .Arg<ffi::Buffer<ffi::S32>>()    // limit
                                  .Arg<ffi::Buffer<ffi::S32>>()    // max_depth
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // token_ids
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // parents
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // depths
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // log_probs
                                  .Ret<ffi::BufferR1<ffi::S32>>()  // size
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // table
                                  .Ret<ffi::BufferR3<ffi::S32>>()  // table_tokens
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("budget"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
