#include "list.h"

#include <cinttypes>
#include <cstdio>
#include <memory>

namespace kdtree_jax {

std::string OneLine(const std::string& text) {
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const bool surrogate = byte == 0xED && HasSurrogate(text.substr(i, 2));
    if (byte < 0x20 || byte == 0x7F || surrogate) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\x%02x", byte);
      line += escape;
    } else {
      line += text[i];
    }
  }
  return line;
}

void PrintKdtrError(const std::string& path, const KdtrError& error) {
  std::fprintf(stderr, "%s: %s: %s\n", path.c_str(), OneLine(error.field).c_str(),
               OneLine(error.reason).c_str());
}

int ListFiles(const std::vector<std::string>& paths, bool quiet) {
  int status = 0;
  for (const std::string& path : paths) {
    KdtrError error;
    const std::unique_ptr<KdtrFile> file = KdtrFile::Open(path, &error);
    if (file == nullptr) {
      PrintKdtrError(path, error);
      status = 1;
      continue;
    }
    std::printf("%s: %" PRIu64 " bytes, %zu tensors\n", path.c_str(), file->size(),
                file->tensors().size());
    if (quiet) continue;
    std::printf("offset\tbytes\tcrc32\tdtype\tshape\tname\n");
    for (const KdtrTensor& tensor : file->tensors()) {
      std::printf("%" PRIu64 "\t%" PRIu64 "\t%08x\t%s\t%s\t%s\n", tensor.offset,
                  tensor.bytes, tensor.crc32, DTypeName(tensor.dtype),
                  ShapeText(tensor.shape).c_str(), tensor.name.c_str());
    }
  }
  return status;
}

}  // namespace kdtree_jax
