#include "token_log_probs.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error TokenLogProbs(cudaStream_t stream, ffi::BufferR3<ffi::F32> logits,
                         ffi::BufferR2<ffi::S32> tokens, ffi::BufferR2<ffi::S32> path,
                         ffi::ResultBufferR2<ffi::F32> log_probs) {
  const auto dims = logits.dimensions();
  TokenLogProbsArgs args;
  args.logits = logits.typed_data();
  args.tokens = tokens.typed_data();
  args.path = path.typed_data();
  args.log_probs = log_probs->typed_data();
  args.batch = static_cast<int>(dims[0]);
  args.nodes = static_cast<int>(dims[1]);
  args.path_len = static_cast<int>(path.dimensions()[1]);
  args.vocab = static_cast<int>(dims[2]);
  return Launched("token_log_probs", LaunchTokenLogProbs(stream, args));
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
