// Device buffers of a case: guarded, restored before each run, compared after it.

#ifndef KDTREE_JAX_CHECK_BUFFERS_H_
#define KDTREE_JAX_CHECK_BUFFERS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "compare.h"
#include "kdtr.h"

namespace kdtree_jax {

struct OutputSpec {
  DType dtype = DType::kI32;
  const KdtrTensor* golden = nullptr;
  Rule rule;
};

class Buffers {
 public:
  // `guard_bytes` are rounded up to the alignment of device memory.
  Buffers(cudaStream_t stream, int64_t guard_bytes);
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // Each returns the device pointer, or null where the memory has ended; the error is
  // kept for Restore.
  void* AddInput(const KdtrTensor& tensor);
  void* AddOutput(const std::string& name, const OutputSpec& spec, uint64_t bytes,
                  const KdtrTensor* initial);
  void* AddWorkspace(const std::string& name, uint64_t bytes);

  // Before a run: inputs as they were, outputs and workspace filled with `poison`.
  bool Restore(uint8_t poison, std::string* error);

  // After a run: waits, and checks that guards and inputs are as before, that outputs
  // fit their golden values, and that all runs gave the same bits.
  bool Check(std::string* error);

  // Largest error of an output with a bound, as a share of it; negative without any.
  double worst() const { return worst_; }

 private:
  enum class Role { kInput, kOutput, kWorkspace };

  struct Buffer {
    Role role;
    std::string name;
    uint64_t bytes;
    const uint8_t* initial;  // null: poison
    OutputSpec output;
    uint8_t* allocation = nullptr;
    std::vector<uint8_t> first_run = {};
  };

  void* Add(Buffer buffer);
  bool CheckBuffer(Buffer& buffer, std::string* error);
  bool CheckOutput(Buffer& buffer, const uint8_t* data, std::string* error);

  cudaStream_t stream_;
  uint64_t guard_;
  std::vector<Buffer> buffers_;
  std::string error_;
  int runs_ = 0;
  double worst_ = -1;
};

// "what: cudaErrorName: text".
std::string CudaText(const std::string& what, cudaError_t status);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_BUFFERS_H_
