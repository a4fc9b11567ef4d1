#include "build_tree.h"

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

// Fills `args` but for the table. A bound per sequence may be one value for all.
ffi::Error SetTree(const char* kernel, ffi::BufferR1<ffi::S32> root_tokens,
                   ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::S32> max_depth,
                   TreeBuffers out, int64_t depths, int64_t width,
                   int64_t budget, TreeArgs* args) {
  const int64_t batch = root_tokens.dimensions()[0];
  const int64_t rows = out.token_ids->dimensions()[1];
  for (const auto count : {limit.element_count(), max_depth.element_count()}) {
    if (static_cast<int64_t>(count) != batch && count != 1) {
      return BadArgument(kernel, "limit and max_depth must be of size 1 or [B]");
    }
  }
  if (budget < 0 || budget >= kBuildTreeMaxNodes || rows <= budget) {
    return BadArgument(kernel, "budget " + std::to_string(budget) + " with " +
                                   std::to_string(rows) + " rows is not allowed");
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
  const auto dims = logits.dimensions();
  const auto table_dims = table->dimensions();
  const ffi::DataType type = logits.element_type();
  if (type != ffi::F32 && type != ffi::BF16) {
    return BadArgument(kernel, "logits must be float32 or bfloat16");
  }
  if (dims.size() != 3 || table_dims[0] != dims[0] || table_dims[1] > dims[1] ||
      table_dims[2] > dims[2] || table_dims[2] > kBuildTreeMaxWidth ||
      table_dims[2] < 1 || dims[2] > kMaxVocab) {
    return BadArgument(kernel, "logits [B, L, V] and candidates [B, L, k] disagree, or "
                               "there are too many candidates or logits");
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
  const auto dims = table.dimensions();
  TreeArgs args;
  ffi::Error error = SetTree("tree_from_table", root_tokens, limit, max_depth,
                             {token_ids, parents, depths, log_probs, size}, dims[1],
                             dims[2], budget, &args);
  if (error.failure()) return error;
  args.table = table.typed_data();
  args.table_tokens = table_tokens.typed_data();
  return Launched("tree_from_table", LaunchTreeFromTable(stream, args));
}

ffi::Error BuildTree(
    cudaStream_t stream, ffi::AnyBuffer logits, ffi::BufferR1<ffi::S32> root_tokens,
    ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::S32> max_depth,
    ffi::ResultBufferR2<ffi::S32> token_ids, ffi::ResultBufferR2<ffi::S32> parents,
    ffi::ResultBufferR2<ffi::S32> depths, ffi::ResultBufferR2<ffi::F32> log_probs,
    ffi::ResultBufferR1<ffi::S32> size, ffi::ResultBufferR3<ffi::F32> table,
    ffi::ResultBufferR3<ffi::S32> table_tokens,
    ffi::ResultBufferR1<ffi::U8> workspace, int64_t budget) {
  CandidateArgs candidates;
  ffi::Error error =
      SetCandidates("build_tree", logits, table, table_tokens, workspace, &candidates);
  if (error.failure()) return error;
  TreeArgs tree;
  error = SetTree("build_tree", root_tokens, limit, max_depth,
                  {token_ids, parents, depths, log_probs, size}, candidates.depths,
                  candidates.width, budget, &tree);
  if (error.failure()) return error;
  tree.table = candidates.log_probs;
  tree.table_tokens = candidates.token_ids;
  return Launched("build_tree", LaunchBuildTree(stream, candidates, tree));
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
