#include "best_token.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

ffi::Error BestToken(cudaStream_t stream, ffi::BufferR2<ffi::F32> logits,
                     ffi::ResultBufferR1<ffi::S32> tokens) {
  constexpr char kName[] = "best_token";
  const int64_t rows = logits.dimensions()[0], V = logits.dimensions()[1];
  if (V < 1) return BadArgument(kName, "logits has no token; it must have 1 or more");
  if (auto e = CheckShapes(
          kName, {{"logits", logits, {rows, V}}, {"tokens", *tokens, {rows}}});
      e.failure()) {
    return e;
  }
  BestTokenArgs args;
  args.logits = logits.typed_data();
  args.tokens = tokens->typed_data();
  args.rows = static_cast<int>(rows);
  args.vocab = static_cast<int>(V);
  return Launched(kName, LaunchBestToken(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeBestToken, BestToken,
                              Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()   // logits
                                  .Ret<ffi::BufferR1<ffi::S32>>(),  // tokens
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
