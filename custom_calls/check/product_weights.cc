#include "product_weights.h"

namespace kdtree_jax {

DType FloatType(CaseSetup& setup, const char* input) {
  const DType dtype = setup.Type(input);
  if (dtype != DType::kF32 && dtype != DType::kBf16) {
    setup.Refuse(input, "must be f32 or bf16");
  }
  return dtype;
}

WeightKind KindOfWeights(CaseSetup& setup, const char* name, bool x_float32) {
  const DType dtype = setup.Type(name);
  if (dtype == DType::kU8) return WeightKind::kInt4;
  if (dtype == DType::kF32) return WeightKind::kFloat32;
  if (dtype != DType::kBf16 || x_float32) {
    setup.Refuse(name, "must be u8 tiles, f32, or bf16 with rows in bf16");
  }
  return WeightKind::kBf16;
}

const void* InputWeights(CaseSetup& setup, const char* name, WeightKind kind,
                         const CaseSetup::Shape& shape, int64_t groups, int64_t depth,
                         int64_t features) {
  if (kind != WeightKind::kInt4) {
    return setup.Input(name, kind == WeightKind::kBf16 ? DType::kBf16 : DType::kF32,
                       shape);
  }
  if (depth % kInt4GroupSize != 0) setup.Refuse(name, "has no multiple of 32 as K");
  return setup.Input(name, DType::kU8,
                     {groups, (features + kInt4TileRows - 1) / kInt4TileRows,
                      (depth + kInt4TileDepth - 1) / kInt4TileDepth, kInt4TileBytes});
}

void CheckSizes(CaseSetup& setup, const MatmulArgs& args) {
  if (IsSimt(args) || HasMmaSizes(args)) return;
  setup.Refuse("sizes", "are none that the product in bf16 takes");
}

}  // namespace kdtree_jax
