// The angles of a case's rotation, for the ops that rotate.

#ifndef KDTREE_JAX_CHECK_ROPE_ANGLES_H_
#define KDTREE_JAX_CHECK_ROPE_ANGLES_H_

#include "golden_case.h"
#include "rope.h"

namespace kdtree_jax {

// Angles for P rotated features: from the tables "cos" and "sin" where the case has
// them, else from "frequencies" and the attributes that belong to them.
RopeAngles SetUpAngles(CaseSetup& setup, int64_t P);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_ROPE_ANGLES_H_
