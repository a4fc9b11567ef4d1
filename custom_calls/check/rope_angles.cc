#include "rope_angles.h"

#include <algorithm>
#include <climits>

namespace kdtree_jax {

RopeAngles SetUpAngles(CaseSetup& setup, int64_t P) {
  RopeAngles angles{};
  angles.pairs = static_cast<int>(P / 2);
  if (P < 2 || P % 2 != 0 || angles.pairs > kRopeMaxPairs) {
    setup.Refuse("P", "must be even, from 2 to " + std::to_string(2 * kRopeMaxPairs));
  }
  const int64_t pairs = setup.error().empty() ? P / 2 : 0;
  if (setup.Has("cos")) {
    angles.length = setup.Dim("length", "cos", 0);
    angles.cos = setup.InputF32("cos", {angles.length, pairs});
    angles.sin = setup.InputF32("sin", {angles.length, pairs});
    return angles;
  }
  angles.length = static_cast<int>(setup.Integer("length", 1, INT_MAX));
  angles.float32_angles = setup.Flag("float32_angles");
  angles.amplitude = setup.Number("amplitude");
  const double* frequencies = setup.HostF64("frequencies", {pairs});
  if (frequencies != nullptr) {
    std::copy(frequencies, frequencies + pairs, angles.frequencies);
  }
  return angles;
}

}  // namespace kdtree_jax
