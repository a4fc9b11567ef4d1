// A GPU that is none, for the tests of kdtr_check: device memory is the host's, and the
// ops run on the host: accept_tree, with $FAULT for what it does wrong, and copy, which
// makes of any numbers an output to compare.

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "accept_tree.h"
#include "ops.h"

namespace {

using Work = std::vector<std::function<void()>>;

bool capturing = false;
Work captured;
int runs = 0;

bool Fault(const char* name) {
  const char* chosen = std::getenv("FAULT");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}

void AcceptTree(const kdtree_jax::AcceptTreeArgs& a) {
  ++runs;
  for (int b = 0; b < a.batch; ++b) {
    const int32_t* tokens = a.token_ids + b * a.nodes;
    const int32_t* parents = a.parents + b * a.nodes;
    const int32_t* chosen = a.target_tokens + b * a.nodes;
    int32_t* path = a.path + b * (a.max_depth + 1);
    int slot = 0, last = 0, length = 0;
    for (int depth = 0; depth <= a.max_depth; ++depth) {
      if (slot >= 0) {
        last = slot;
        ++length;
      }
      path[depth] = slot;
      int next = -1;
      for (int n = 0; slot >= 0 && n < a.size[b] && n < a.nodes && next < 0; ++n) {
        if (parents[n] == slot && tokens[n] == chosen[slot]) next = n;
      }
      slot = next;
    }
    a.length[b] = length;
    if (!Fault("unwritten") || b + 1 < a.batch) a.bonus[b] = chosen[last];
  }
  if (a.batch == 0) return;
  if (Fault("wrong")) a.path[1] ^= 1;
  if (Fault("behind")) reinterpret_cast<char*>(a.bonus + a.batch)[2] = 0;
  if (Fault("before")) reinterpret_cast<char*>(a.length)[-1] = 0;
  if (Fault("input")) const_cast<int32_t*>(a.parents)[a.nodes - 1] += 1;
  if (Fault("varies")) a.length[0] += runs == 3;
  if (Fault("replay")) a.length[0] += runs == 5;
  if (Fault("rare")) a.length[0] += runs == 300;
}

}  // namespace

namespace kdtree_jax {

cudaError_t LaunchAcceptTree(cudaStream_t, const AcceptTreeArgs& args) {
  if (Fault("refused")) return cudaErrorInvalidValue;
  const auto work = [args] { AcceptTree(args); };
  if (capturing) {
    captured.push_back(work);
  } else {
    work();
  }
  return cudaSuccess;
}

Launch SetUpCopy(CaseSetup& setup) {
  const int64_t n = setup.Dim("n", "x", 0);
  const DType dtype = setup.Type("x");
  const void* x = setup.Input("x", dtype, {n});
  void* out = setup.Output("out", dtype, {n});
  const size_t bytes = n * DTypeBits(dtype) / 8;
  return [=](cudaStream_t) {
    const auto work = [=] { std::memcpy(out, x, bytes); };
    if (capturing) captured.push_back(work);
    work();
    return cudaSuccess;
  };
}

// No attention here.
bool ChooseAttentionKernel(const std::string& name) { return name.empty(); }

SetUp FindOp(const std::string& name) {
  if (name == "copy") return SetUpCopy;
  return name == "accept_tree" ? SetUpAcceptTree : nullptr;
}

std::string OpNames() { return "accept_tree, copy"; }

}  // namespace kdtree_jax

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = bytes > 0 ? std::malloc(bytes) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "fake");
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidValue"; }
const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  capturing = true;
  captured.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = false;
  *graph = reinterpret_cast<cudaGraph_t>(new Work(captured));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable =
      reinterpret_cast<cudaGraphExec_t>(new Work(*reinterpret_cast<Work*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<Work*>(executable)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Work*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Work*>(executable);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.25f;
  return cudaSuccess;
}

}  // extern "C"
