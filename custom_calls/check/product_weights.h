// What the ops of matrix products share: dtypes and weights, as MatmulArgs has them.

#ifndef KDTREE_JAX_CHECK_PRODUCT_WEIGHTS_H_
#define KDTREE_JAX_CHECK_PRODUCT_WEIGHTS_H_

#include "golden_case.h"
#include "matmul.h"

namespace kdtree_jax {

// Rows and results: f32 or bf16.
DType FloatType(CaseSetup& setup, const char* input);

// The kind of weights `name`; u8 are tiles. Refuses bf16 weights of f32 rows.
WeightKind KindOfWeights(CaseSetup& setup, const char* name, bool x_float32);

// Weights `name` on the device: of `shape`, or int4 tiles of these sizes.
const void* InputWeights(CaseSetup& setup, const char* name, WeightKind kind,
                         const CaseSetup::Shape& shape, int64_t groups, int64_t depth,
                         int64_t features);

// Refuses what LaunchMatmulMma would.
void CheckSizes(CaseSetup& setup, const MatmulArgs& args);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_PRODUCT_WEIGHTS_H_
