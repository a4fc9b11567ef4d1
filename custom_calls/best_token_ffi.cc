#include "best_token.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error BestToken(cudaStream_t stream, ffi::BufferR2<ffi::F32> logits,
                     ffi::ResultBufferR1<ffi::S32> tokens) {
  BestTokenArgs args;
  args.logits = logits.typed_data();
  args.tokens = tokens->typed_data();
  args.rows = static_cast<int>(logits.dimensions()[0]);
  args.vocab = static_cast<int>(logits.dimensions()[1]);
  return Launched("best_token", LaunchBestToken(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeBestToken, BestToken,
                              Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()   // logits
                                  .Ret<ffi::BufferR1<ffi::S32>>(),  // tokens
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
