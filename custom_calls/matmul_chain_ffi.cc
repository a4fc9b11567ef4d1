#include <cstdint>
#include <string>
#include <vector>

#include "ffi_support.h"
#include "matmul.h"
#include "matmul_ffi.h"
#include "rms_norm.h"

namespace kdtree_jax {
namespace {

constexpr char kName[] = "matmul_chain";

// Kinds of steps, with what they have beside the rows of the step before, and what they
// give. `kdtree_jax/ops/matmul_chain.py` has the same numbers.
enum StepKind : int64_t {
  kMatmulStep = 0,   // w -> out
  kGatedStep = 1,    // w -> out
  kHeadStep = 2,     // w -> out
  kNormStep = 3,     // weight -> normed
  kAddNormStep = 4,  // h, weight -> h + rows, normed
  kSteps = 5,
};

// Takes the operands and results of a call one after the other.
class Operands {
 public:
  Operands(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  ffi::ErrorOr<ffi::AnyBuffer> NextArgument() {
    return args_.get<ffi::AnyBuffer>(argument_++);
  }
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> NextResult() {
    return rets_.get<ffi::AnyBuffer>(result_++);
  }
  bool AllTaken() const {
    return argument_ == args_.size() && result_ == rets_.size();
  }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t argument_ = 0, result_ = 0;
};

ffi::Error SetNorm(const RowsOperand& x, ffi::AnyBuffer weight, ffi::AnyBuffer out,
                   double eps, RmsNormArgs* args) {
  if (x.width > kRmsNormMaxWidth) return BadArgument(kName, "weight is too wide");
  args->x = x.data;
  args->weight = weight.untyped_data();
  args->out = out.untyped_data();
  args->rows = static_cast<int>(x.rows);
  args->width = static_cast<int>(x.width);
  args->eps = static_cast<float>(eps);
  args->bfloat16 = x.type == ffi::BF16;
  return FirstOf({CheckShapes(kName, {{"weight", weight, {x.width}},
                                      {"out", out, {x.rows, x.width}}}),
                  CheckType(kName, "weight", weight, x.type),
                  CheckType(kName, "out", out, x.type)});
}

// What a step launches.
struct Step {
  bool is_norm;
  RmsNormArgs norm;
  MatmulArgs matmul;
};

// Reads a step that takes the rows that the step before leaves, and leaves its own. All
// but the first begin before the kernel before has ended.
ffi::Error ReadStep(int64_t kind, double eps, bool first, Operands& operands,
                    RowsOperand* rows, Step* step) {
  if (kind < 0 || kind >= kSteps) {
    return BadArgument(kName, "step kind " + std::to_string(kind) + " does not exist");
  }
  ffi::ErrorOr<ffi::AnyBuffer> weight = operands.NextArgument();
  ffi::ErrorOr<ffi::AnyBuffer> residual = weight;
  if (kind == kAddNormStep) weight = operands.NextArgument();
  if (weight.has_error()) return weight.error();
  if (residual.has_error()) return residual.error();
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> out = operands.NextResult();
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> sum = out;
  if (kind == kAddNormStep) out = operands.NextResult();
  if (out.has_error()) return out.error();
  if (sum.has_error()) return sum.error();
  ffi::AnyBuffer result = **out;

  *step = {};
  step->is_norm = kind == kNormStep || kind == kAddNormStep;
  if (step->is_norm) {
    RmsNormArgs& args = step->norm;
    if (auto e = SetNorm(*rows, *weight, result, eps, &args); e.failure()) return e;
    if (kind == kAddNormStep) {
      if (auto e = FirstOf(
              {CheckShapes(kName, {{"h", *residual, {rows->rows, rows->width}},
                                   {"sum", **sum, {rows->rows, rows->width}}}),
               CheckType(kName, "h", *residual, rows->type),
               CheckType(kName, "sum", **sum, rows->type)});
          e.failure()) {
        return e;
      }
      args.added = args.x;
      args.x = residual->untyped_data();
      args.sum = (**sum).untyped_data();
    }
    args.early = !first;
    *rows = RowsOf("out", result);
    return ffi::Error::Success();
  }
  MatmulArgs& args = step->matmul;
  if (auto e = kind == kHeadStep
                   ? SetHeadMatmul(kName, *rows, *weight, result, &args)
                   : SetMatmul(kName, *rows, *weight, false, kind == kGatedStep, result,
                               &args);
      e.failure()) {
    return e;
  }
  args.start = first ? Start::kAfter : Start::kWeights;
  *rows = RowsOf("out", result);
  return ffi::Error::Success();
}

// x [T, K] through steps; the operands and results of each lie one after the other.
ffi::Error MatmulChain(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                       ffi::RemainingRets results, ffi::Span<const int64_t> kinds,
                       ffi::Span<const double> eps) {
  bool ignored;
  if (auto e = FirstOf({CheckShapes(kName, {{"x", x, {kAny, kAny}}}),
                        ReadFloat32(kName, "x", x, &ignored)});
      e.failure()) {
    return e;
  }
  if (kinds.size() != eps.size()) {
    return BadArgument(kName, "kinds and eps must have one value for each step");
  }
  Operands operands(weights, results);
  RowsOperand rows = RowsOf("x", x);
  std::vector<Step> steps(kinds.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    if (auto e = ReadStep(kinds.begin()[i], eps.begin()[i], i == 0, operands, &rows,
                          &steps[i]);
        e.failure()) {
      return e;
    }
  }
  if (!operands.AllTaken()) {
    return BadArgument(kName, "there are more operands or results than steps use");
  }
  for (const Step& step : steps) {
    if (auto e = Launched(kName, step.is_norm ? LaunchRmsNorm(stream, step.norm)
                                              : LaunchMatmul(stream, step.matmul));
        e.failure()) {
      return e;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdtreeMatmulChain, MatmulChain,
                              Bind()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .RemainingArgs()        // of the steps
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kinds")
                                  .Attr<ffi::Span<const double>>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kdtree_jax
