#include "json.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

namespace kdtree_jax {
namespace {

// Python refuses longer ones, to keep the cost of the conversion down.
constexpr size_t kMaxIntegerDigits = 4300;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Position of the first byte that is not part of valid UTF-8, or the length.
size_t ValidUtf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
    const uint8_t lead = byte(0);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    // The second byte's range excludes overlong forms, surrogates and what lies
    // beyond U+10FFFF.
    size_t length;
    uint8_t low = 0x80, high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      length = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      length = 3;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      length = 4;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    } else {
      return at;
    }
    if (length > text.size() - at) return at;
    if (byte(1) < low || byte(1) > high) return at;
    for (size_t i = 2; i < length; ++i) {
      if (byte(i) < 0x80 || byte(i) > 0xBF) return at;
    }
    at += length;
  }
  return at;
}

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (code >> 6)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (code >> 12)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (code >> 18)));
    out->push_back(static_cast<char>(0x80 | ((code >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

// Recursive descent. Every function returns false after the first error, which
// `error_` then holds; `at_` never passes the end.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  bool Document(JsonValue* value) {
    at_ = ValidUtf8(text_);
    if (at_ < text_.size()) return Fail("not UTF-8");
    at_ = 0;
    SkipSpace();
    if (!Value(1, value)) return false;
    SkipSpace();
    return at_ == text_.size() || Fail("more text after the document");
  }

  const std::string& error() const { return error_; }

 private:
  bool Fail(const std::string& what) {
    error_ = what + " at byte " + std::to_string(at_);
    return false;
  }

  bool Next(char c) const { return at_ < text_.size() && text_[at_] == c; }

  bool Take(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  void SkipSpace() {
    while (Next(' ') || Next('\t') || Next('\n') || Next('\r')) ++at_;
  }

  bool Value(int depth, JsonValue* value) {
    if (Take("null")) return Set(JsonNull{}, value);
    if (Take("true")) return Set(true, value);
    if (Take("false")) return Set(false, value);
    if (Take("NaN")) return Set(std::numeric_limits<double>::quiet_NaN(), value);
    if (Take("Infinity")) return Set(kInfinity, value);
    if (Take("-Infinity")) return Set(-kInfinity, value);
    if (Next('"')) {
      std::string string;
      return String(&string) && Set(std::move(string), value);
    }
    if (Next('[') || Next('{')) {
      if (depth > kMaxJsonDepth) return Fail("nested too deep");
      return Next('[') ? Array(depth, value) : Object(depth, value);
    }
    return Number(value);
  }

  bool Set(JsonValue::Data data, JsonValue* value) {
    *value = JsonValue(std::move(data));
    return true;
  }

  bool Array(int depth, JsonValue* value) {
    ++at_;
    JsonArray items;
    SkipSpace();
    if (!Take("]")) {
      do {
        SkipSpace();
        if (!Value(depth + 1, &items.emplace_back())) return false;
        SkipSpace();
      } while (Take(","));
      if (!Take("]")) return Fail("expected ',' or ']'");
    }
    return Set(std::move(items), value);
  }

  bool Object(int depth, JsonValue* value) {
    ++at_;
    JsonObject members;
    SkipSpace();
    if (!Take("}")) {
      do {
        SkipSpace();
        JsonMember& member = members.emplace_back();
        if (!Next('"')) return Fail("expected a key");
        if (!String(&member.key)) return false;
        SkipSpace();
        if (!Take(":")) return Fail("expected ':'");
        SkipSpace();
        if (!Value(depth + 1, &member.value)) return false;
        SkipSpace();
      } while (Take(","));
      if (!Take("}")) return Fail("expected ',' or '}'");
    }
    std::vector<std::string_view> keys;
    for (const JsonMember& member : members) keys.push_back(member.key);
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) {
      return Fail("key '" + std::string(twice->substr(0, 40)) +
                  "' appears twice in the object that ends");
    }
    return Set(std::move(members), value);
  }

  bool String(std::string* out) {
    ++at_;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return true;
      }
      if (static_cast<uint8_t>(c) < 0x20) return Fail("control character in a string");
      ++at_;
      if (c != '\\') {
        out->push_back(c);
      } else if (!Escape(out)) {
        return false;
      }
    }
    return Fail("string without end");
  }

  bool Escape(std::string* out) {
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    if (at_ == text_.size()) return Fail("string without end");
    const size_t index = kNames.find(text_[at_]);
    if (index != std::string_view::npos) {
      ++at_;
      out->push_back(kValues[index]);
      return true;
    }
    uint32_t code;
    if (!Take("u") || !Hex(&code)) return Fail("invalid escape");
    if (code >= 0xD800 && code <= 0xDBFF) {
      const size_t before = at_;
      uint32_t low;
      if (Take("\\u") && Hex(&low) && low >= 0xDC00 && low <= 0xDFFF) {
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else {
        at_ = before;  // unpaired; what follows is read on its own
      }
    }
    AppendUtf8(code, out);
    return true;
  }

  bool Hex(uint32_t* code) {
    if (text_.size() - at_ < 4) return false;
    *code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = text_[at_ + i];
      uint32_t digit;
      if (IsDigit(c)) {
        digit = c - '0';
      } else if (c >= 'a' && c <= 'f') {
        digit = c - 'a' + 10;
      } else if (c >= 'A' && c <= 'F') {
        digit = c - 'A' + 10;
      } else {
        return false;
      }
      *code = 16 * *code + digit;
    }
    at_ += 4;
    return true;
  }

  size_t Digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && IsDigit(text_[at_])) ++at_;
    return at_ - begin;
  }

  bool Number(JsonValue* value) {
    const size_t begin = at_;
    const bool negative = Take("-");
    const size_t first = at_;
    const size_t digits = Digits();
    if (digits == 0) return Fail("expected a value");
    if (digits > 1 && text_[first] == '0') return Fail("number with a leading zero");
    bool integer = true;
    if (Take(".")) {
      integer = false;
      if (Digits() == 0) return Fail("number without digits after the point");
    }
    if (Take("e") || Take("E")) {
      integer = false;
      if (!Take("+")) Take("-");
      if (Digits() == 0) return Fail("number without an exponent");
    }
    if (!integer) {
      // The copy ends in the zero that strtod looks for. Out of range gives infinity
      // or zero, as in Python.
      const std::string number(text_.substr(begin, at_ - begin));
      return Set(std::strtod(number.c_str(), nullptr), value);
    }
    if (digits > kMaxIntegerDigits) return Fail("integer of too many digits");
    return Integer(text_.substr(first, digits), negative, value);
  }

  bool Integer(std::string_view digits, bool negative, JsonValue* value) {
    const uint64_t limit = (uint64_t{1} << 63) - (negative ? 0 : 1);
    uint64_t magnitude = 0;
    for (const char c : digits) {
      const uint64_t digit = c - '0';
      if (magnitude > (limit - digit) / 10) {
        return Set(JsonHugeInteger{negative}, value);
      }
      magnitude = 10 * magnitude + digit;
    }
    const uint64_t bits = negative ? 0 - magnitude : magnitude;
    return Set(static_cast<int64_t>(bits), value);
  }

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  std::string_view text_;
  size_t at_ = 0;
  std::string error_;
};

}  // namespace

const JsonValue* JsonValue::Find(std::string_view key) const {
  if (const auto* members = As<JsonObject>()) {
    for (const JsonMember& member : *members) {
      if (member.key == key) return &member.value;
    }
  }
  return nullptr;
}

bool ParseJson(std::string_view text, JsonValue* value, std::string* error) {
  Parser parser(text);
  if (parser.Document(value)) return true;
  *error = parser.error();
  return false;
}

bool HasSurrogate(std::string_view text) {
  // UTF-8 has ED followed by 80..9F only; a surrogate is ED A0..BF.
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (static_cast<uint8_t>(text[i]) == 0xED &&
        static_cast<uint8_t>(text[i + 1]) >= 0xA0) {
      return true;
    }
  }
  return false;
}

}  // namespace kdtree_jax
