#include "accept_tree.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error AcceptTree(cudaStream_t stream, ffi::BufferR2<ffi::S32> token_ids,
                      ffi::BufferR2<ffi::S32> parents, ffi::BufferR1<ffi::S32> size,
                      ffi::BufferR2<ffi::S32> target_tokens,
                      ffi::ResultBufferR2<ffi::S32> path,
                      ffi::ResultBufferR1<ffi::S32> length,
                      ffi::ResultBufferR1<ffi::S32> bonus) {
  constexpr char kName[] = "accept_tree";
  const auto dims = token_ids.dimensions();
  const int64_t B = dims[0], N = dims[1], A = path->dimensions()[1];
  if (N < 1 || N > kAcceptTreeMaxNodes) {
    return BadArgument(kName, "token_ids has " + std::to_string(N) +
                                  " slots; a tree must have 1 .. " +
                                  std::to_string(kAcceptTreeMaxNodes));
  }
  if (A < 1) return BadArgument(kName, "path has no slot; it must have 1 or more");
  if (auto e = CheckShapes(kName, {{"token_ids", token_ids, {B, N}},
                                   {"parents", parents, {B, N}},
                                   {"size", size, {B}},
                                   {"target_tokens", target_tokens, {B, N}},
                                   {"path", *path, {B, A}},
                                   {"length", *length, {B}},
                                   {"bonus", *bonus, {B}}});
      e.failure()) {
    return e;
  }
  AcceptTreeArgs args;
  args.token_ids = token_ids.typed_data();
  args.parents = parents.typed_data();
  args.size = size.typed_data();
  args.target_tokens = target_tokens.typed_data();
  args.path = path->typed_data();
  args.length = length->typed_data();
  args.bonus = bonus->typed_data();
  args.batch = static_cast<int>(B);
  args.nodes = static_cast<int>(N);
  args.max_depth = static_cast<int>(A) - 1;
  return Launched(kName, LaunchAcceptTree(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeAcceptTree, AcceptTree,
                              Bind()
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // token_ids
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // parents
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // size
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // target_tokens
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // path
                                  .Ret<ffi::BufferR1<ffi::S32>>()  // length
                                  .Ret<ffi::BufferR1<ffi::S32>>(), // bonus
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
