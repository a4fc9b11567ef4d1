// Reads a KDTR file (docs/kdtr.md) as strictly as the page asks for.
//
// Open checks everything, the data of all tensors included, before it hands anything
// out. Nothing outside of the file's bytes is read whatever the file says.

#ifndef KDTREE_JAX_CHECK_KDTR_H_
#define KDTREE_JAX_CHECK_KDTR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json.h"

namespace kdtree_jax {

enum class DType {
  kF64, kF32, kF16, kBf16, kI64, kI32, kI16, kI8, kU8, kU32, kBool, kInt4,
};

// The name that the format has for a dtype.
const char* DTypeName(DType dtype);

// Bits that an element takes.
int DTypeBits(DType dtype);

// "[3,5]"; "[]" for a scalar.
std::string ShapeText(const std::vector<int64_t>& shape);

struct KdtrTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  uint64_t offset;      // from the start of the data section
  uint64_t bytes;       // without padding
  uint32_t crc32;       // of these bytes
  const uint8_t* data;  // 64-byte aligned, within the file's bytes
};

// A rule of the format that the file breaks.
struct KdtrError {
  std::string field;  // "magic", "config.rope_theta", "tensor 'x'.offset"
  std::string reason;
};

class KdtrFile {
 public:
  // Returns null and sets `error` where the file cannot be read or breaks a rule.
  static std::unique_ptr<KdtrFile> Open(const std::string& path, KdtrError* error);

  const JsonValue& config() const { return config_; }
  const JsonValue& metadata() const { return metadata_; }
  const std::vector<KdtrTensor>& tensors() const { return tensors_; }
  uint64_t size() const { return size_; }

  // Null where there is no such tensor.
  const KdtrTensor* Find(const std::string& name) const;

 private:
  struct FreeAligned {
    void operator()(uint8_t* bytes) const;
  };

  KdtrFile() = default;

  bool Load(const std::string& path, KdtrError* error);
  bool ReadHeader(KdtrError* error);
  bool ReadTable(const JsonValue& rows, KdtrError* error);
  bool CheckLayout(KdtrError* error);
  bool CheckData(KdtrError* error);

  std::unique_ptr<uint8_t[], FreeAligned> contents_;
  uint64_t size_ = 0;
  uint64_t data_start_ = 0;
  JsonValue config_;
  JsonValue metadata_;
  std::vector<KdtrTensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
};

// CRC32 of zlib, PNG and Ethernet.
uint32_t Crc32(const uint8_t* data, size_t bytes);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_KDTR_H_
