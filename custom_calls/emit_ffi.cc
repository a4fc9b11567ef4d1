#include "emit.h"

#include "ffi_support.h"

namespace kdtree_jax {
namespace {

using Int0 = ffi::BufferR0<ffi::S32>;
using Int1 = ffi::BufferR1<ffi::S32>;
using Int2 = ffi::BufferR2<ffi::S32>;
using Float2 = ffi::BufferR2<ffi::F32>;

// The seven arrays of state are operands and results: one buffer each, by
// `input_output_aliases`. They are read and written through the result.
ffi::Error Emit(cudaStream_t stream, Int1 old_root, Int1 old_finish, Int1 old_generated,
                Int1 old_rounds, Int2 old_tokens, Float2 old_text_log_probs,
                Int2 old_accepted, Int2 token_ids, Int2 choices, Int2 path, Int1 length,
                Int1 bonus, Float2 log_probs, Int1 lengths, Int1 stop_tokens,
                Int0 capacity,
                ffi::Result<Int1> root, ffi::Result<Int1> finish,
                ffi::Result<Int1> generated, ffi::Result<Int1> rounds,
                ffi::Result<Int2> tokens, ffi::Result<Float2> text_log_probs,
                ffi::Result<Int2> accepted, ffi::Result<Int1> committed,
                ffi::Result<Int1> new_lengths, ffi::Result<Int1> kept,
                ffi::Result<Int2> path_tokens) {
  constexpr char kName[] = "emit";
  const int64_t B = token_ids.dimensions()[0], N = token_ids.dimensions()[1];
  const int64_t A = path.dimensions()[1], M = tokens->dimensions()[1];
  if (N < 1) return BadArgument(kName, "token_ids has no slot; it must have 1 or more");
  if (A < 1) return BadArgument(kName, "path has no slot; it must have 1 or more");
  if (auto e = CheckShapes(kName, {{"token_ids", token_ids, {B, N}},
                                   {"choices", choices, {B, N}},
                                   {"path", path, {B, A}},
                                   {"length", length, {B}},
                                   {"bonus", bonus, {B}},
                                   {"log_probs", log_probs, {B, A}},
                                   {"lengths", lengths, {B}},
                                   {"stop_tokens", stop_tokens, {kAny}},
                                   {"root", *root, {B}},
                                   {"finish", *finish, {B}},
                                   {"generated", *generated, {B}},
                                   {"rounds", *rounds, {B}},
                                   {"tokens", *tokens, {B, M}},
                                   {"text_log_probs", *text_log_probs, {B, M}},
                                   {"accepted", *accepted, {B, M}},
                                   {"committed", *committed, {B}},
                                   {"new_lengths", *new_lengths, {B}},
                                   {"kept", *kept, {B}},
                                   {"path_tokens", *path_tokens, {B, A}}});
      e.failure()) {
    return e;
  }
  if (auto e = CheckShapes(
          kName, {{"root", old_root, {B}},
                  {"finish", old_finish, {B}},
                  {"generated", old_generated, {B}},
                  {"rounds", old_rounds, {B}},
                  {"tokens", old_tokens, {B, M}},
                  {"text_log_probs", old_text_log_probs, {B, M}},
                  {"accepted", old_accepted, {B, M}}});
      e.failure()) {
    return e;
  }
  if (auto e = FirstOf(
          {CheckInPlace(kName, "root", old_root, *root),
           CheckInPlace(kName, "finish", old_finish, *finish),
           CheckInPlace(kName, "generated", old_generated, *generated),
           CheckInPlace(kName, "rounds", old_rounds, *rounds),
           CheckInPlace(kName, "tokens", old_tokens, *tokens),
           CheckInPlace(kName, "text_log_probs", old_text_log_probs, *text_log_probs),
           CheckInPlace(kName, "accepted", old_accepted, *accepted)});
      e.failure()) {
    return e;
  }
  EmitArgs args;
  args.token_ids = token_ids.typed_data();
  args.choices = choices.typed_data();
  args.path = path.typed_data();
  args.length = length.typed_data();
  args.bonus = bonus.typed_data();
  args.log_probs = log_probs.typed_data();
  args.lengths = lengths.typed_data();
  args.stop_tokens = stop_tokens.typed_data();
  args.capacity = capacity.typed_data();
  args.root = root->typed_data();
  args.finish = finish->typed_data();
  args.generated = generated->typed_data();
  args.rounds = rounds->typed_data();
  args.tokens = tokens->typed_data();
  args.text_log_probs = text_log_probs->typed_data();
  args.accepted = accepted->typed_data();
  args.committed = committed->typed_data();
  args.new_lengths = new_lengths->typed_data();
  args.kept = kept->typed_data();
  args.path_tokens = path_tokens->typed_data();
  args.batch = static_cast<int>(B);
  args.nodes = static_cast<int>(N);
  args.path_len = static_cast<int>(A);
  args.stops = static_cast<int>(stop_tokens.dimensions()[0]);
  args.room = static_cast<int>(M);
  return Launched(kName, LaunchEmit(stream, args));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeEmit, Emit,
                              Bind()
                                  .Arg<Int1>()     // root
                                  .Arg<Int1>()     // finish
                                  .Arg<Int1>()     // generated
                                  .Arg<Int1>()     // rounds
                                  .Arg<Int2>()     // tokens
                                  .Arg<Float2>()   // text_log_probs
                                  .Arg<Int2>()     // accepted
                                  .Arg<Int2>()     // token_ids
                                  .Arg<Int2>()     // choices
                                  .Arg<Int2>()     // path
                                  .Arg<Int1>()     // length
                                  .Arg<Int1>()     // bonus
                                  .Arg<Float2>()   // log_probs
                                  .Arg<Int1>()     // lengths
                                  .Arg<Int1>()     // stop_tokens
                                  .Arg<Int0>()     // capacity
                                  .Ret<Int1>()     // root
                                  .Ret<Int1>()     // finish
                                  .Ret<Int1>()     // generated
                                  .Ret<Int1>()     // rounds
                                  .Ret<Int2>()     // tokens
                                  .Ret<Float2>()   // text_log_probs
                                  .Ret<Int2>()     // accepted
                                  .Ret<Int1>()     // committed
                                  .Ret<Int1>()     // new_lengths
                                  .Ret<Int1>()     // kept
                                  .Ret<Int2>(),    // path_tokens
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
