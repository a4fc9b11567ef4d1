// A strict JSON reader, for the header of a KDTR file.
//
// It accepts what RFC 8259 does, with these differences: NaN, Infinity and -Infinity
// are read as numbers (the format refuses them by name of the member), a repeated key
// is an error, and so are more than kMaxJsonDepth levels.

#ifndef KDTREE_JAX_CHECK_JSON_H_
#define KDTREE_JAX_CHECK_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kdtree_jax {

// More than any header may use, and few enough for the stack of a recursive reader.
constexpr int kMaxJsonDepth = 200;

class JsonValue;
struct JsonMember;

struct JsonNull {};

// An integer that does not fit 64 bits.
struct JsonHugeInteger {
  bool negative;
};

using JsonArray = std::vector<JsonValue>;
using JsonObject = std::vector<JsonMember>;  // in the order of the text

class JsonValue {
 public:
  using Data = std::variant<JsonNull, bool, int64_t, JsonHugeInteger, double,
                            std::string, JsonArray, JsonObject>;

  JsonValue() = default;
  explicit JsonValue(Data data) : data_(std::move(data)) {}

  // The value as a T, or null where it is something else.
  template <typename T>
  const T* As() const {
    return std::get_if<T>(&data_);
  }

  // The member of an object; null where this is no object or has no such member.
  const JsonValue* Find(std::string_view key) const;

 private:
  Data data_;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

// Parses one JSON document. An escape that makes an unpaired surrogate is kept as the
// three bytes that UTF-8 forbids, for HasSurrogate to find.
//
// Returns false and says in `error` what is wrong and at which byte.
bool ParseJson(std::string_view text, JsonValue* value, std::string* error);

// Whether a string that ParseJson made holds an unpaired surrogate.
bool HasSurrogate(std::string_view text);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_JSON_H_
