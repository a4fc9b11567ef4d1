// Runs the golden cases of KDTR files on the GPU.

#ifndef KDTREE_JAX_CHECK_RUN_CASES_H_
#define KDTREE_JAX_CHECK_RUN_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace kdtree_jax {

struct CheckOptions {
  bool dry_run = false;       // read and check the cases, launch nothing
  bool time = false;          // print a median time for each case
  std::string op;             // only cases of this op, where not empty
  int64_t only = -1;          // only the case of this number, where not negative
  int64_t repeats = 1;        // replays of the graph, times two
  int64_t guard_bytes = 256;  // on either side of every buffer
  std::string attention;      // kernel of tree_attention where it takes a case, or empty
};

// Prints one line per case. Returns the exit status: 0 where all are right, 1 where one
// is not or a file is refused, 2 where no case can run.
int RunCases(const std::vector<std::string>& paths, const CheckOptions& options);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_RUN_CASES_H_
