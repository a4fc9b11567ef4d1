// One warp per sequence, one lane per slot of the path.

#include "emit.h"

namespace kdtree_jax {
namespace {

// As in kdtree_jax.decoding.state.DecodeState.
constexpr int kRunning = 0, kStop = 1, kLength = 2, kCache = 3, kError = 4;
constexpr int kNoToken = -1;
constexpr int kWarp = 32;

__global__ void __launch_bounds__(kWarp) EmitKernel(EmitArgs a) {
  const int b = blockIdx.x, lane = threadIdx.x;
  const int A = a.path_len, M = a.room;
  const int32_t* path = a.path + static_cast<size_t>(b) * A;
  const int32_t* choices = a.choices + static_cast<size_t>(b) * a.nodes;
  const int32_t* token_ids = a.token_ids + static_cast<size_t>(b) * a.nodes;
  const auto slot_at = [&](int i) { return min(max(path[i], 0), a.nodes - 1); };

  const int finish = a.finish[b], generated = a.generated[b], rounds = a.rounds[b];
  const bool running = finish == kRunning;
  const bool failed = a.bonus[b] == kNoToken;
  const int committed = running ? a.length[b] : 0;
  const int count = committed - (failed && running);

  int first_stop = A;
  for (int base = 0; base < A; base += kWarp) {
    const int i = base + lane;
    bool stops = false;
    if (i < A) {
      const int slot = slot_at(i), token = choices[slot];
      a.path_tokens[static_cast<size_t>(b) * A + i] = token_ids[slot];
      for (int k = 0; k < a.stops; ++k) stops |= token == a.stop_tokens[k];
    }
    const unsigned found = __ballot_sync(~0u, stops && i < count);
    if (found != 0 && first_stop == A) first_stop = base + __ffs(found) - 1;
  }
  const int kept = running ? min(min(count, first_stop + 1), M - generated) : 0;

  // As many as fit the path and the text, should the numbers disagree.
  for (int i = lane; i < min(kept, A); i += kWarp) {
    const int place = generated + i;
    if (place < 0 || place >= M) continue;
    a.tokens[static_cast<size_t>(b) * M + place] = choices[slot_at(i)];
    a.text_log_probs[static_cast<size_t>(b) * M + place] =
        a.log_probs[static_cast<size_t>(b) * A + i];
  }
  __syncwarp();  // all lanes have read the state that lane 0 now updates
  if (lane != 0) return;
  const int new_generated = generated + kept;
  const int new_length = a.lengths[b] + committed;
  int new_finish = finish;
  if (running) {
    if (first_stop < kept) {
      new_finish = kStop;
    } else if (new_generated >= M) {
      new_finish = kLength;
    } else if (failed) {
      new_finish = kError;
    } else if (new_length >= a.capacity[0]) {
      new_finish = kCache;
    }
  }
  if (kept > 0) {
    a.root[b] = choices[slot_at(min(kept, A) - 1)];
    if (rounds >= 0 && rounds < M) {
      a.accepted[static_cast<size_t>(b) * M + rounds] = kept;
    }
    a.rounds[b] = rounds + 1;
  }
  a.finish[b] = new_finish;
  a.generated[b] = new_generated;
  a.committed[b] = committed;
  a.new_lengths[b] = new_length;
  a.kept[b] = kept;
}

}  // namespace

cudaError_t LaunchEmit(cudaStream_t stream, const EmitArgs& args) {
  if (args.batch == 0) return cudaSuccess;
  if (args.nodes < 1 || args.path_len < 1) return cudaErrorInvalidValue;
  EmitKernel<<<args.batch, kWarp, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kdtree_jax
