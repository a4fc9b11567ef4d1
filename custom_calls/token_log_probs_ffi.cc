#include "token_log_probs.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error TokenLogProbs(cudaStream_t stream, ffi::BufferR3<ffi::F32> logits,
                         ffi::BufferR2<ffi::S32> tokens, ffi::BufferR2<ffi::S32> path,
                         ffi::ResultBufferR2<ffi::F32> log_probs) {
  constexpr char kName[] = "token_log_probs";
  const auto dims = logits.dimensions();
  const int64_t B = dims[0], N = dims[1], V = dims[2], A = path.dimensions()[1];
  if (N < 1 || V < 1) {
    return BadArgument(kName, "logits must have a row and a token at least");
  }
  if (B * A > INT32_MAX) return BadArgument(kName, "path has more than 2^31 - 1 slots");
  if (auto e = CheckShapes(kName, {{"logits", logits, {B, N, V}},
                                   {"tokens", tokens, {B, N}},
                                   {"path", path, {B, A}},
                                   {"log_probs", *log_probs, {B, A}}});
      e.failure()) {
    return e;
  }
  TokenLogProbsArgs args;
  args.logits = logits.typed_data();
  args.tokens = tokens.typed_data();
  args.path = path.typed_data();
  args.log_probs = log_probs->typed_data();
  args.batch = static_cast<int>(B);
  args.nodes = static_cast<int>(N);
  args.path_len = static_cast<int>(A);
  args.vocab = static_cast<int>(V);
  return Launched(kName, LaunchTokenLogProbs(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeTokenLogProbs, TokenLogProbs,
                              Bind()
                                  .Arg<ffi::BufferR3<ffi::F32>>()   // logits
                                  .Arg<ffi::BufferR2<ffi::S32>>()   // tokens
                                  .Arg<ffi::BufferR2<ffi::S32>>()   // path
                                  .Ret<ffi::BufferR2<ffi::F32>>(),  // log_probs
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
