// A golden case of a KDTR file, and what an op's driver asks of it.
//
// A file of cases has in its config: "kind": "golden", "format_version": 1 and "cases",
// an array of objects with the members
//   op          name of the op
//   name        what is special about the case
//   attributes  an object of numbers and booleans
//   compare     for each output: "bits", "bound", {"ulp": n} or {"max_abs": x}
// The tensors of case i are case/<i>/<op>/in/<name>, .../out/<name> and, for an output
// under "bound", .../bound/<name>.

#ifndef KDTREE_JAX_CHECK_GOLDEN_CASE_H_
#define KDTREE_JAX_CHECK_GOLDEN_CASE_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "buffers.h"
#include "compare.h"
#include "kdtr.h"

namespace kdtree_jax {

struct GoldenCase {
  size_t number = 0;
  std::string op;
  std::string name;
  const JsonValue* attributes = nullptr;
  const JsonValue* compare = nullptr;
};

// Reads the list of cases. Returns false and sets `error` where the config is no such
// list, or a tensor belongs to no case.
bool ReadCases(const KdtrFile& file, std::vector<GoldenCase>* cases, KdtrError* error);

// Hands a case's tensors to the driver of its op, as device buffers. After the first
// error all sizes are 0 and all pointers null, so that a driver asks for it only once.
class CaseSetup {
 public:
  // Without `buffers` everything is checked and all pointers are null.
  CaseSetup(const KdtrFile& file, const GoldenCase& golden, Buffers* buffers)
      : file_(file), golden_(golden), buffers_(buffers) {}

  using Shape = std::vector<int64_t>;

  // A dimension of an input, printed as "letter=size".
  int Dim(const char* letter, const char* input, size_t axis);

  DType Type(const char* input);
  bool Has(const char* input) const;

  int64_t Integer(const char* attribute, int64_t low, int64_t high);
  double Number(const char* attribute);
  bool Flag(const char* attribute);

  // An input on the device.
  const void* Input(const char* name, DType dtype, const Shape& shape);
  const int32_t* InputI32(const char* name, const Shape& shape);
  const float* InputF32(const char* name, const Shape& shape);

  // An input that stays on the host.
  const double* HostF64(const char* name, const Shape& shape);

  // An output, filled with a poison before each run.
  void* Output(const char* name, DType dtype, const Shape& shape);
  int32_t* OutputI32(const char* name, const Shape& shape);
  float* OutputF32(const char* name, const Shape& shape);

  // An output that holds the input of the same name before each run.
  void* InPlace(const char* name, DType dtype, const Shape& shape);

  // Scratch memory, poisoned before each run.
  void* Workspace(const char* name, uint64_t bytes);

  // Refuses the case.
  void Refuse(const std::string& field, const std::string& reason);

  // Refuses a case with tensors or attributes that no call above asked for.
  void Finish();

  // Empty, or the first error.
  const std::string& error() const { return error_; }

  // "B=2 N=65".
  const std::string& dimensions() const { return dimensions_; }

 private:
  const KdtrTensor* Find(const char* part, const std::string& name);
  const KdtrTensor* Get(const char* part, const char* name, DType dtype,
                        const Shape& shape);
  const JsonValue* Attribute(const char* name);
  bool ReadRule(const char* name, DType dtype, const Shape& shape, OutputSpec* spec);
  void* AddOutput(const char* name, DType dtype, const Shape& shape,
                  const KdtrTensor* initial);

  const KdtrFile& file_;
  const GoldenCase& golden_;
  Buffers* buffers_;
  std::set<std::string> used_;
  std::string dimensions_;
  std::string error_;
};

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_GOLDEN_CASE_H_
