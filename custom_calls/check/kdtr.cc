#include "kdtr.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "KDTR files hold little-endian data; this host does not");

namespace kdtree_jax {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kPreambleBytes = 32;
constexpr uint32_t kVersion = 1;
constexpr uint64_t kMaxHeaderBytes = uint64_t{64} << 20;
constexpr size_t kMaxDimensions = 32;
constexpr uint64_t kMaxElements = uint64_t{1} << 48;
constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxNesting = 64;

constexpr const char* kSurrogate = "holds an unpaired surrogate";

struct DTypeRow {
  DType dtype;
  const char* name;
  int bits;
};

// In the order of the enumeration.
constexpr DTypeRow kDTypes[] = {
    {DType::kF64, "f64", 64},  {DType::kF32, "f32", 32}, {DType::kF16, "f16", 16},
    {DType::kBf16, "bf16", 16}, {DType::kI64, "i64", 64}, {DType::kI32, "i32", 32},
    {DType::kI16, "i16", 16},  {DType::kI8, "i8", 8},    {DType::kU8, "u8", 8},
    {DType::kU32, "u32", 32},  {DType::kBool, "bool", 8}, {DType::kInt4, "int4", 4},
};

bool Fail(std::string field, std::string reason, KdtrError* error) {
  *error = {std::move(field), std::move(reason)};
  return false;
}

// No argument above 2^63 comes in, so the sum does not wrap.
uint64_t Align(uint64_t position) {
  return (position + kAlignment - 1) / kAlignment * kAlignment;
}

bool AllZero(const uint8_t* begin, uint64_t bytes) {
  return std::all_of(begin, begin + bytes, [](uint8_t b) { return b == 0; });
}

template <typename T>
T Little(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Where a value stands in config or metadata. Kept in parts and joined only for a
// message: joined at every level, a long key above many members would cost their
// product.
struct Place {
  const Place* above;
  const std::string* key;  // null for an element of an array
  size_t index;

  std::string Text() const {
    if (above == nullptr) return *key;
    const std::string own =
        key != nullptr ? "." + *key : "[" + std::to_string(index) + "]";
    return above->Text() + own;
  }
};

bool CheckFree(const JsonValue& value, const Place& place, size_t depth,
               KdtrError* error) {
  const auto fail = [&](const std::string& reason) {
    return Fail(place.Text(), reason, error);
  };
  if (depth > kMaxNesting) {
    return fail("nested more than " + std::to_string(kMaxNesting) + " levels deep");
  }
  if (const auto* string = value.As<std::string>()) {
    return !HasSurrogate(*string) || fail(kSurrogate);
  }
  if (value.As<JsonHugeInteger>()) return fail("an integer must fit 64 bits");
  if (const auto* number = value.As<double>()) {
    return std::isfinite(*number) || fail("is not a finite number");
  }
  if (const auto* members = value.As<JsonObject>()) {
    for (const JsonMember& member : *members) {
      if (HasSurrogate(member.key)) return fail(kSurrogate);
      if (!CheckFree(member.value, {&place, &member.key, 0}, depth + 1, error)) {
        return false;
      }
    }
  } else if (const auto* items = value.As<JsonArray>()) {
    for (size_t i = 0; i < items->size(); ++i) {
      if (!CheckFree((*items)[i], {&place, nullptr, i}, depth + 1, error)) {
        return false;
      }
    }
  }
  return true;
}

// Exactly these members, each once (the parser refuses a repeated key).
bool CheckKeys(const JsonValue& value, const std::vector<const char*>& keys,
               const std::string& field, KdtrError* error) {
  const auto* members = value.As<JsonObject>();
  if (members == nullptr) return Fail(field, "must be a JSON object", error);
  for (const char* key : keys) {
    if (value.Find(key) == nullptr) return Fail(field + "." + key, "is missing", error);
  }
  for (const JsonMember& member : *members) {
    if (std::find(keys.begin(), keys.end(), member.key) == keys.end()) {
      return Fail(field, "has the unknown key '" + member.key.substr(0, 40) + "'",
                  error);
    }
  }
  return true;
}

bool ReadName(const JsonValue& value, const std::string& field, std::string* name,
              KdtrError* error) {
  const auto* string = value.As<std::string>();
  if (string == nullptr || string->empty()) {
    return Fail(field, "must be a non-empty string", error);
  }
  if (HasSurrogate(*string)) return Fail(field, kSurrogate, error);
  if (string->size() > kMaxNameBytes) {
    return Fail(field, "is longer than " + std::to_string(kMaxNameBytes) + " bytes",
                error);
  }
  for (const char c : *string) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7F) {
      return Fail(field, "holds a control character", error);
    }
  }
  *name = *string;
  return true;
}

bool ReadDType(const JsonValue& value, const std::string& field, DType* dtype,
               KdtrError* error) {
  if (const auto* string = value.As<std::string>()) {
    for (const DTypeRow& row : kDTypes) {
      if (*string == row.name) {
        *dtype = row.dtype;
        return true;
      }
    }
  }
  return Fail(field, "is not the name of a dtype", error);
}

bool ReadShape(const JsonValue& value, DType dtype, const std::string& field,
               std::vector<int64_t>* shape, uint64_t* elements, KdtrError* error) {
  const auto* items = value.As<JsonArray>();
  if (items == nullptr || items->size() > kMaxDimensions) {
    return Fail(field,
                "must be an array of at most " + std::to_string(kMaxDimensions) +
                    " dimensions",
                error);
  }
  const std::string too_many =
      "has more than " + std::to_string(kMaxElements) + " elements";
  // Zeros count as ones, so that no product of dimensions overflows anywhere.
  uint64_t product = 1;
  bool empty = false;
  for (const JsonValue& item : *items) {
    const auto* huge = item.As<JsonHugeInteger>();
    if (huge != nullptr && !huge->negative) return Fail(field, too_many, error);
    const auto* dimension = item.As<int64_t>();
    if (dimension == nullptr || *dimension < 0) {
      return Fail(field, "dimensions must be integers of 0 or more", error);
    }
    const uint64_t size = std::max<int64_t>(*dimension, 1);
    if (size > kMaxElements / product) return Fail(field, too_many, error);
    product *= size;
    empty = empty || *dimension == 0;
    shape->push_back(*dimension);
  }
  if (dtype == DType::kInt4 && (shape->empty() || shape->back() % 2 != 0)) {
    return Fail(field,
                "is " + ShapeText(*shape) +
                    ": int4 needs a last dimension, and an even one",
                error);
  }
  *elements = empty ? 0 : product;
  return true;
}

bool ReadUnsigned(const JsonValue& row, const char* key, uint64_t limit,
                  const std::string& field, uint64_t* out, KdtrError* error) {
  const auto* number = row.Find(key)->As<int64_t>();
  if (number == nullptr || *number < 0 || static_cast<uint64_t>(*number) >= limit) {
    return Fail(field + "." + key,
                "must be an integer from 0 to " + std::to_string(limit - 1), error);
  }
  *out = static_cast<uint64_t>(*number);
  return true;
}

bool ReadRow(const JsonValue& row, size_t index, KdtrTensor* tensor,
             KdtrError* error) {
  std::string field = "tensors[" + std::to_string(index) + "]";
  // Sorted, so that of several missing keys the same one is named as in Python.
  if (!CheckKeys(row, {"bytes", "crc32", "dtype", "name", "offset", "shape"}, field,
                 error) ||
      !ReadName(*row.Find("name"), field + ".name", &tensor->name, error)) {
    return false;
  }
  field = "tensor '" + tensor->name + "'";
  uint64_t elements = 0, crc32 = 0;
  constexpr uint64_t k63 = uint64_t{1} << 63, k32 = uint64_t{1} << 32;
  if (!ReadDType(*row.Find("dtype"), field + ".dtype", &tensor->dtype, error) ||
      !ReadShape(*row.Find("shape"), tensor->dtype, field + ".shape", &tensor->shape,
                 &elements, error) ||
      !ReadUnsigned(row, "offset", k63, field, &tensor->offset, error) ||
      !ReadUnsigned(row, "bytes", k63, field, &tensor->bytes, error) ||
      !ReadUnsigned(row, "crc32", k32, field, &crc32, error)) {
    return false;
  }
  tensor->crc32 = static_cast<uint32_t>(crc32);
  // At most 2^48 elements of 64 bits: no overflow. An int4 shape is even at its end.
  const uint64_t bytes = elements * DTypeBits(tensor->dtype) / 8;
  if (tensor->bytes != bytes) {
    return Fail(field + ".bytes",
                "is " + std::to_string(tensor->bytes) + ", but " +
                    DTypeName(tensor->dtype) + " " + ShapeText(tensor->shape) +
                    " takes " + std::to_string(bytes),
                error);
  }
  return true;
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

}  // namespace

const char* DTypeName(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }

int DTypeBits(DType dtype) { return kDTypes[static_cast<int>(dtype)].bits; }

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

uint32_t Crc32(const uint8_t* data, size_t bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) {
        value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0u);
      }
      made[i] = value;
    }
    return made;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ table[(crc ^ data[i]) & 0xFF];
  return ~crc;
}

void KdtrFile::FreeAligned::operator()(uint8_t* bytes) const {
  ::operator delete[](bytes, std::align_val_t{kAlignment});
}

std::unique_ptr<KdtrFile> KdtrFile::Open(const std::string& path, KdtrError* error) {
  std::unique_ptr<KdtrFile> file(new KdtrFile);
  if (!file->Load(path, error) || !file->ReadHeader(error) ||
      !file->CheckData(error)) {
    return nullptr;
  }
  return file;
}

const KdtrTensor* KdtrFile::Find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

// The preamble first: memory is taken only for a file that says it is a KDTR file.
bool KdtrFile::Load(const std::string& path, KdtrError* error) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) {
    return Fail("file", std::strerror(errno), error);
  }
  if (!S_ISREG(status.st_mode)) return Fail("file", "is not a regular file", error);
  std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) return Fail("file", std::strerror(errno), error);
  size_ = static_cast<uint64_t>(status.st_size);
  if (size_ < kPreambleBytes) {
    return Fail("file size",
                std::to_string(size_) + " bytes are fewer than the " +
                    std::to_string(kPreambleBytes) +
                    " of the preamble (truncated, or not a KDTR file)",
                error);
  }
  uint8_t preamble[kPreambleBytes];
  if (std::fread(preamble, 1, kPreambleBytes, file.get()) != kPreambleBytes) {
    return Fail("file", "cannot be read", error);
  }
  if (std::memcmp(preamble, "KDTR", 4) != 0) {
    return Fail("magic", "is not 'KDTR': not a KDTR file", error);
  }
  const auto version = Little<uint32_t>(preamble + 4);
  if (version > kVersion) {
    return Fail("version",
                std::to_string(version) + " is newer than " + std::to_string(kVersion) +
                    ", the newest that this reader knows",
                error);
  }
  if (version != kVersion) {
    return Fail("version", std::to_string(version) + " does not exist", error);
  }
  if (Crc32(preamble, 28) != Little<uint32_t>(preamble + 28)) {
    return Fail("preamble", "CRC32 does not match: the file is damaged", error);
  }
  const auto file_bytes = Little<uint64_t>(preamble + 8);
  if (file_bytes != size_) {
    return Fail("file size",
                "the file has " + std::to_string(size_) +
                    " bytes, its preamble says " + std::to_string(file_bytes) +
                    (size_ < file_bytes ? " (truncated)" : " (bytes follow the end)"),
                error);
  }
  contents_.reset(new (std::align_val_t{kAlignment}, std::nothrow) uint8_t[size_]);
  if (contents_ == nullptr) return Fail("file", "does not fit the memory", error);
  std::memcpy(contents_.get(), preamble, kPreambleBytes);
  const uint64_t rest = size_ - kPreambleBytes;
  // A file that shrinks meanwhile is an error, not a fault as with mmap.
  if (std::fread(contents_.get() + kPreambleBytes, 1, rest, file.get()) != rest) {
    return Fail("file", "cannot be read to its end", error);
  }
  return true;
}

bool KdtrFile::ReadHeader(KdtrError* error) {
  const auto header_bytes = Little<uint64_t>(contents_.get() + 16);
  if (header_bytes > kMaxHeaderBytes) {
    return Fail("header length",
                std::to_string(header_bytes) + " bytes are more than the " +
                    std::to_string(kMaxHeaderBytes) + " allowed",
                error);
  }
  const uint64_t header_end = kPreambleBytes + header_bytes;
  data_start_ = Align(header_end);
  if (data_start_ > size_) {
    return Fail("header length",
                "the header ends at " + std::to_string(header_end) +
                    ", beyond the file's " + std::to_string(size_) + " bytes",
                error);
  }
  const uint8_t* header = contents_.get() + kPreambleBytes;
  if (Crc32(header, header_bytes) != Little<uint32_t>(contents_.get() + 24)) {
    return Fail("header", "CRC32 does not match: the file is damaged", error);
  }
  if (!AllZero(contents_.get() + header_end, data_start_ - header_end)) {
    return Fail("header", "padding is not zero", error);
  }

  JsonValue document;
  std::string why;
  const std::string_view text(reinterpret_cast<const char*>(header), header_bytes);
  if (!ParseJson(text, &document, &why)) {
    return Fail("header", "not valid JSON: " + why, error);
  }
  if (!CheckKeys(document, {"config", "metadata", "tensors"}, "header", error)) {
    return false;
  }
  const std::pair<const char*, JsonValue*> objects[] = {{"config", &config_},
                                                        {"metadata", &metadata_}};
  for (const auto& [key, target] : objects) {
    const JsonValue* value = document.Find(key);
    const std::string name = key;
    if (value->As<JsonObject>() == nullptr) {
      return Fail(name, "must be a JSON object", error);
    }
    if (!CheckFree(*value, {nullptr, &name, 0}, 1, error)) return false;
    *target = *value;
  }
  return ReadTable(*document.Find("tensors"), error) && CheckLayout(error);
}

bool KdtrFile::ReadTable(const JsonValue& rows, KdtrError* error) {
  const auto* items = rows.As<JsonArray>();
  if (items == nullptr) return Fail("tensors", "must be a JSON array", error);
  for (size_t i = 0; i < items->size(); ++i) {
    if (!ReadRow((*items)[i], i, &tensors_.emplace_back(), error)) return false;
  }
  return true;
}

// One tensor after the other, no gap, no overlap, up to the end of the file.
bool KdtrFile::CheckLayout(KdtrError* error) {
  const uint64_t data_bytes = size_ - data_start_;
  uint64_t position = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    KdtrTensor& tensor = tensors_[i];
    const std::string field = "tensor '" + tensor.name + "'";
    const std::string offset = std::to_string(tensor.offset);
    if (!index_.emplace(tensor.name, i).second) {
      return Fail(field, "appears twice in the tensor table", error);
    }
    if (tensor.offset % kAlignment != 0) {
      return Fail(field + ".offset", offset + " is not a multiple of 64 (misaligned)",
                  error);
    }
    if (tensor.offset < position) {
      return Fail(field + ".offset",
                  offset + " overlaps what lies before it, which ends at " +
                      std::to_string(position),
                  error);
    }
    if (tensor.offset > position) {
      return Fail(field + ".offset",
                  offset + " leaves a gap: the tensor must start at " +
                      std::to_string(position),
                  error);
    }
    // offset == position <= data_bytes and bytes <= 2^51: the sum does not wrap.
    const uint64_t end = Align(tensor.offset + tensor.bytes);
    if (end > data_bytes) {
      return Fail(field + ".bytes",
                  "the tensor ends at " + std::to_string(end) + ", beyond the " +
                      std::to_string(data_bytes) + " bytes of data",
                  error);
    }
    tensor.data = contents_.get() + data_start_ + tensor.offset;
    position = end;
  }
  if (position != data_bytes) {
    return Fail("file size",
                std::to_string(data_bytes - position) + " bytes follow the last tensor",
                error);
  }
  return true;
}

bool KdtrFile::CheckData(KdtrError* error) {
  for (const KdtrTensor& tensor : tensors_) {
    const std::string field = "tensor '" + tensor.name + "'";
    const uint32_t found = Crc32(tensor.data, tensor.bytes);
    if (found != tensor.crc32) {
      char text[96];
      std::snprintf(text, sizeof(text),
                    "the data has CRC32 %08x, the table says %08x: the file is damaged",
                    found, tensor.crc32);
      return Fail(field + ".crc32", text, error);
    }
    if (!AllZero(tensor.data + tensor.bytes, Align(tensor.bytes) - tensor.bytes)) {
      return Fail(field, "padding is not zero", error);
    }
    if (tensor.dtype == DType::kBool &&
        std::any_of(tensor.data, tensor.data + tensor.bytes,
                    [](uint8_t b) { return b > 1; })) {
      return Fail(field, "a bool must be 0 or 1", error);
    }
  }
  return true;
}

}  // namespace kdtree_jax
