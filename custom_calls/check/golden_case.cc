#include "golden_case.h"

#include <climits>

namespace kdtree_jax {
namespace {

constexpr int64_t kFormatVersion = 1;

bool Fail(const std::string& field, const std::string& reason, KdtrError* error) {
  *error = {field, reason};
  return false;
}

std::string Prefix(const GoldenCase& golden) {
  return "case/" + std::to_string(golden.number) + "/" + golden.op + "/";
}

bool ReadCase(const JsonValue& value, const std::string& field, GoldenCase* golden,
              KdtrError* error) {
  for (const char* key : {"op", "name"}) {
    const JsonValue* member = value.Find(key);
    const auto* text = member == nullptr ? nullptr : member->As<std::string>();
    if (text == nullptr || text->empty()) {
      return Fail(field + "." + key, "must be a non-empty string", error);
    }
    (key[0] == 'o' ? golden->op : golden->name) = *text;
  }
  for (const char* key : {"attributes", "compare"}) {
    const JsonValue* member = value.Find(key);
    if (member == nullptr || member->As<JsonObject>() == nullptr) {
      return Fail(field + "." + key, "must be a JSON object", error);
    }
    (key[0] == 'a' ? golden->attributes : golden->compare) = member;
  }
  return true;
}

}  // namespace

bool ReadCases(const KdtrFile& file, std::vector<GoldenCase>* cases,
               KdtrError* error) {
  const JsonValue* kind = file.config().Find("kind");
  const auto* text = kind == nullptr ? nullptr : kind->As<std::string>();
  if (text == nullptr || *text != "golden") {
    return Fail("config.kind", "is not 'golden': the file holds no golden cases",
                error);
  }
  const JsonValue* version = file.config().Find("format_version");
  const auto* number = version == nullptr ? nullptr : version->As<int64_t>();
  if (number == nullptr || *number != kFormatVersion) {
    return Fail("config.format_version",
                "must be " + std::to_string(kFormatVersion) +
                    ", the only one that this program knows",
                error);
  }
  const JsonValue* list = file.config().Find("cases");
  const auto* items = list == nullptr ? nullptr : list->As<JsonArray>();
  if (items == nullptr) return Fail("config.cases", "must be a JSON array", error);
  std::set<std::string> prefixes;
  for (size_t i = 0; i < items->size(); ++i) {
    GoldenCase golden;
    golden.number = i;
    const std::string field = "config.cases[" + std::to_string(i) + "]";
    if (!ReadCase((*items)[i], field, &golden, error)) return false;
    prefixes.insert(Prefix(golden));
    cases->push_back(golden);
  }
  for (const KdtrTensor& tensor : file.tensors()) {
    // "case/<i>/<op>/": up to the third slash.
    size_t end = 0;
    for (int i = 0; i < 3 && end != std::string::npos; ++i) {
      end = tensor.name.find('/', end);
      if (end != std::string::npos) ++end;
    }
    if (end == std::string::npos || prefixes.count(tensor.name.substr(0, end)) == 0) {
      return Fail("tensor '" + tensor.name + "'", "belongs to no case", error);
    }
  }
  return true;
}

void CaseSetup::Refuse(const std::string& field, const std::string& reason) {
  if (error_.empty()) error_ = field + ": " + reason;
}

const KdtrTensor* CaseSetup::Find(const char* part, const std::string& name) {
  const std::string full = Prefix(golden_) + part + "/" + name;
  const KdtrTensor* tensor = file_.Find(full);
  if (tensor == nullptr) Refuse(full, "is missing");
  used_.insert(full);
  return tensor;
}

const KdtrTensor* CaseSetup::Get(const char* part, const char* name, DType dtype,
                                 const Shape& shape) {
  const KdtrTensor* tensor = Find(part, name);
  if (!error_.empty()) return nullptr;
  if (tensor->dtype != dtype) {
    Refuse(tensor->name, std::string("is ") + DTypeName(tensor->dtype) +
                             ", but must be " + DTypeName(dtype));
  }
  if (tensor->shape != shape) {
    Refuse(tensor->name, "has shape " + ShapeText(tensor->shape) + ", but must have " +
                             ShapeText(shape));
  }
  return error_.empty() ? tensor : nullptr;
}

int CaseSetup::Dim(const char* letter, const char* input, size_t axis) {
  const KdtrTensor* tensor = Find("in", input);
  if (!error_.empty()) return 0;
  if (axis >= tensor->shape.size()) {
    Refuse(tensor->name, "has shape " + ShapeText(tensor->shape) + ", without axis " +
                             std::to_string(axis));
    return 0;
  }
  const int64_t size = tensor->shape[axis];
  if (size > INT_MAX) {
    Refuse(tensor->name, "is too large");
    return 0;
  }
  if (!dimensions_.empty()) dimensions_ += " ";
  dimensions_ += std::string(letter) + "=" + std::to_string(size);
  return static_cast<int>(size);
}

DType CaseSetup::Type(const char* input) {
  const KdtrTensor* tensor = Find("in", input);
  return tensor == nullptr ? DType::kF32 : tensor->dtype;
}

bool CaseSetup::Has(const char* input) const {
  return file_.Find(Prefix(golden_) + "in/" + input) != nullptr;
}

const JsonValue* CaseSetup::Attribute(const char* name) {
  const JsonValue* value = golden_.attributes->Find(name);
  if (value == nullptr) Refuse(std::string("attribute ") + name, "is missing");
  used_.insert(std::string("attribute ") + name);
  return value;
}

int64_t CaseSetup::Integer(const char* attribute, int64_t low, int64_t high) {
  const JsonValue* value = Attribute(attribute);
  if (value == nullptr) return low;
  const auto* number = value->As<int64_t>();
  if (number == nullptr || *number < low || *number > high) {
    Refuse(std::string("attribute ") + attribute,
           "must be an integer from " + std::to_string(low) + " to " +
               std::to_string(high));
    return low;
  }
  dimensions_ += (dimensions_.empty() ? "" : " ") + std::string(attribute) + "=" +
                 std::to_string(*number);
  return *number;
}

double CaseSetup::Number(const char* attribute) {
  const JsonValue* value = Attribute(attribute);
  if (value == nullptr) return 0;
  if (const auto* number = value->As<double>()) return *number;
  if (const auto* number = value->As<int64_t>()) return static_cast<double>(*number);
  Refuse(std::string("attribute ") + attribute, "must be a number");
  return 0;
}

bool CaseSetup::Flag(const char* attribute) {
  const JsonValue* value = Attribute(attribute);
  if (value == nullptr) return false;
  if (const auto* flag = value->As<bool>()) return *flag;
  Refuse(std::string("attribute ") + attribute, "must be true or false");
  return false;
}

const void* CaseSetup::Input(const char* name, DType dtype, const Shape& shape) {
  const KdtrTensor* tensor = Get("in", name, dtype, shape);
  if (tensor == nullptr || buffers_ == nullptr) return nullptr;
  return buffers_->AddInput(*tensor);
}

const int32_t* CaseSetup::InputI32(const char* name, const Shape& shape) {
  return static_cast<const int32_t*>(Input(name, DType::kI32, shape));
}

const float* CaseSetup::InputF32(const char* name, const Shape& shape) {
  return static_cast<const float*>(Input(name, DType::kF32, shape));
}

const double* CaseSetup::HostF64(const char* name, const Shape& shape) {
  const KdtrTensor* tensor = Get("in", name, DType::kF64, shape);
  // The data of a tensor is 64-byte aligned.
  return tensor == nullptr ? nullptr : reinterpret_cast<const double*>(tensor->data);
}

bool CaseSetup::ReadRule(const char* name, DType dtype, const Shape& shape,
                         OutputSpec* spec) {
  const std::string field = std::string("compare ") + name;
  used_.insert(field);
  const JsonValue* value = golden_.compare->Find(name);
  const std::string allowed = "must be \"bits\", \"bound\", {\"ulp\": n} or "
                              "{\"max_abs\": x}";
  if (value == nullptr) {
    Refuse(field, allowed);
    return false;
  }
  Rule& rule = spec->rule;
  const auto* text = value->As<std::string>();
  const auto* members = value->As<JsonObject>();
  if (text != nullptr && *text == "bits") {
    rule.kind = Rule::Kind::kBits;
  } else if (text != nullptr && *text == "bound") {
    rule.kind = Rule::Kind::kBound;
    rule.bound = Get("bound", name, DType::kF32, shape);
  } else if (members != nullptr && members->size() == 1 &&
             (value->Find("ulp") != nullptr || value->Find("max_abs") != nullptr)) {
    rule.kind = value->Find("ulp") ? Rule::Kind::kUlp : Rule::Kind::kMaxAbs;
    const JsonValue& limit = members->front().value;
    const auto* whole = limit.As<int64_t>();
    const auto* real = limit.As<double>();
    if (whole == nullptr && real == nullptr) Refuse(field, allowed);
    rule.limit = whole ? static_cast<double>(*whole) : real ? *real : 0;
  } else {
    Refuse(field, allowed);
  }
  if (error_.empty() && !CanCompare(rule, dtype, spec->golden->dtype)) {
    Refuse(field, std::string("cannot hold ") + DTypeName(dtype) + " to golden " +
                      DTypeName(spec->golden->dtype));
  }
  return error_.empty();
}

void* CaseSetup::AddOutput(const char* name, DType dtype, const Shape& shape,
                           const KdtrTensor* initial) {
  OutputSpec spec;
  spec.dtype = dtype;
  spec.golden = Find("out", name);
  if (!error_.empty()) return nullptr;
  if (spec.golden->shape != shape) {
    Refuse(spec.golden->name, "has shape " + ShapeText(spec.golden->shape) +
                                  ", but must have " + ShapeText(shape));
  }
  if (!error_.empty() || !ReadRule(name, dtype, shape, &spec)) return nullptr;
  if (buffers_ == nullptr) return nullptr;
  const uint64_t bytes = ElementCount(shape) * DTypeBits(dtype) / 8;
  return buffers_->AddOutput(std::string("out/") + name, spec, bytes, initial);
}

void* CaseSetup::Output(const char* name, DType dtype, const Shape& shape) {
  return AddOutput(name, dtype, shape, nullptr);
}

int32_t* CaseSetup::OutputI32(const char* name, const Shape& shape) {
  return static_cast<int32_t*>(Output(name, DType::kI32, shape));
}

float* CaseSetup::OutputF32(const char* name, const Shape& shape) {
  return static_cast<float*>(Output(name, DType::kF32, shape));
}

void* CaseSetup::InPlace(const char* name, DType dtype, const Shape& shape) {
  const KdtrTensor* initial = Get("in", name, dtype, shape);
  return initial == nullptr ? nullptr : AddOutput(name, dtype, shape, initial);
}

void* CaseSetup::Workspace(const char* name, uint64_t bytes) {
  if (!error_.empty() || buffers_ == nullptr) return nullptr;
  return buffers_->AddWorkspace(std::string("workspace/") + name, bytes);
}

void CaseSetup::Finish() {
  const std::string prefix = Prefix(golden_);
  for (const KdtrTensor& tensor : file_.tensors()) {
    if (tensor.name.compare(0, prefix.size(), prefix) == 0 &&
        used_.count(tensor.name) == 0) {
      Refuse(tensor.name, "is not used by " + golden_.op);
    }
  }
  const struct {
    const JsonValue* object;
    const char* kind;
  } objects[] = {{golden_.attributes, "attribute "}, {golden_.compare, "compare "}};
  for (const auto& object : objects) {
    for (const JsonMember& member : *object.object->As<JsonObject>()) {
      if (used_.count(object.kind + member.key) == 0) {
        Refuse(object.kind + member.key, "is not used by " + golden_.op);
      }
    }
  }
}

}  // namespace kdtree_jax
