#include "buffers.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kdtree_jax {
namespace {

constexpr uint64_t kDeviceAlignment = 256;
constexpr uint8_t kGuard = 0xA5;

}  // namespace

std::string CudaText(const std::string& what, cudaError_t status) {
  std::string text =
      what + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) {
    text += "; rebuild with CMAKE_CUDA_ARCHITECTURES set to this GPU's architecture";
  }
  return text;
}

Buffers::Buffers(cudaStream_t stream, int64_t guard_bytes)
    : stream_(stream),
      guard_((guard_bytes + kDeviceAlignment - 1) / kDeviceAlignment *
             kDeviceAlignment) {}

Buffers::~Buffers() {
  for (Buffer& buffer : buffers_) cudaFree(buffer.allocation);
}

void* Buffers::AddInput(const KdtrTensor& tensor) {
  return Add({Role::kInput, tensor.name, tensor.bytes, tensor.data, {}});
}

void* Buffers::AddOutput(const std::string& name, const OutputSpec& spec,
                         uint64_t bytes, const KdtrTensor* initial) {
  const uint8_t* data = initial == nullptr ? nullptr : initial->data;
  return Add({Role::kOutput, name, bytes, data, spec});
}

void* Buffers::AddWorkspace(const std::string& name, uint64_t bytes) {
  return Add({Role::kWorkspace, name, bytes, nullptr, {}});
}

void* Buffers::Add(Buffer buffer) {
  const uint64_t bytes = buffer.bytes + 2 * guard_;
  void* allocation = nullptr;
  const cudaError_t status = cudaMalloc(&allocation, bytes);
  if (status != cudaSuccess) {
    if (error_.empty()) error_ = CudaText("cudaMalloc of " + buffer.name, status);
    return nullptr;
  }
  buffer.allocation = static_cast<uint8_t*>(allocation);
  buffers_.push_back(std::move(buffer));
  // Null for no bytes and no guards.
  return allocation == nullptr ? nullptr : buffers_.back().allocation + guard_;
}

bool Buffers::Restore(uint8_t poison, std::string* error) {
  if (!error_.empty()) {
    *error = error_;
    return false;
  }
  for (const Buffer& buffer : buffers_) {
    const uint64_t total = buffer.bytes + 2 * guard_;
    if (total == 0) continue;
    uint8_t* data = buffer.allocation + guard_;
    cudaError_t status = cudaSuccess;
    if (guard_ > 0) status = cudaMemsetAsync(buffer.allocation, kGuard, total, stream_);
    if (status == cudaSuccess && buffer.bytes > 0) {
      status = buffer.initial == nullptr
                   ? cudaMemsetAsync(data, poison, buffer.bytes, stream_)
                   : cudaMemcpyAsync(data, buffer.initial, buffer.bytes,
                                     cudaMemcpyHostToDevice, stream_);
    }
    if (status != cudaSuccess) {
      *error = CudaText("filling " + buffer.name, status);
      return false;
    }
  }
  return true;
}

bool Buffers::Check(std::string* error) {
  const cudaError_t status = cudaStreamSynchronize(stream_);
  if (status != cudaSuccess) {
    *error = CudaText("kernel", status);
    return false;
  }
  for (Buffer& buffer : buffers_) {
    if (!CheckBuffer(buffer, error)) return false;
  }
  ++runs_;
  return true;
}

bool Buffers::CheckBuffer(Buffer& buffer, std::string* error) {
  std::vector<uint8_t> host(buffer.bytes + 2 * guard_);
  if (host.empty()) return true;
  const cudaError_t status =
      cudaMemcpy(host.data(), buffer.allocation, host.size(), cudaMemcpyDeviceToHost);
  if (status != cudaSuccess) {
    *error = CudaText("reading " + buffer.name, status);
    return false;
  }
  const uint8_t* data = host.data() + guard_;
  for (uint64_t i = 0; i < guard_; ++i) {
    // The nearest bytes first.
    const bool before = data[-1 - static_cast<int64_t>(i)] != kGuard;
    if (before || data[buffer.bytes + i] != kGuard) {
      *error = buffer.name + ": written " + std::to_string(i + 1) + " bytes " +
               (before ? "before its start" : "behind its end");
      return false;
    }
  }
  if (buffer.role == Role::kInput) {
    if (std::memcmp(data, buffer.initial, buffer.bytes) == 0) return true;
    const auto at = std::mismatch(data, data + buffer.bytes, buffer.initial);
    *error = buffer.name + ": an input was written, at byte " +
             std::to_string(at.first - data);
    return false;
  }
  return buffer.role != Role::kOutput || CheckOutput(buffer, data, error);
}

bool Buffers::CheckOutput(Buffer& buffer, const uint8_t* data, std::string* error) {
  const KdtrTensor& golden = *buffer.output.golden;
  if (runs_ > 0) {
    // The same bits as in the first run, whatever the rule for the golden values.
    const auto at = std::mismatch(data, data + buffer.bytes, buffer.first_run.data());
    if (at.first == data + buffer.bytes) return true;
    const uint64_t width = DTypeBits(buffer.output.dtype) / 8;
    *error = buffer.name +
             PlaceText(golden.shape, (at.first - data) / width) +
             ": other bits in run " + std::to_string(runs_) + " than in run 0";
    return false;
  }
  buffer.first_run.assign(data, data + buffer.bytes);
  const Comparison found =
      Compare(buffer.output.rule, buffer.output.dtype, data, golden);
  if (buffer.output.rule.kind != Rule::Kind::kBits) {
    worst_ = std::max(worst_, found.worst);
  }
  if (found.wrong == 0) return true;
  *error = buffer.name + PlaceText(golden.shape, found.first) + ": got " + found.got +
           ", golden " + found.want + " (" + std::to_string(found.wrong) + " of " +
           std::to_string(ElementCount(golden.shape)) + " differ)";
  if (buffer.output.rule.kind != Rule::Kind::kBits) {
    *error += ", error up to " + std::to_string(found.worst) + " of what is allowed";
  }
  return false;
}

}  // namespace kdtree_jax
