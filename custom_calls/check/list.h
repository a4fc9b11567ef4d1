// `kdtr_check --list`: what KDTR files hold, or why they are refused.

#ifndef KDTREE_JAX_CHECK_LIST_H_
#define KDTREE_JAX_CHECK_LIST_H_

#include <string>
#include <vector>

#include "kdtr.h"

namespace kdtree_jax {

// `text` with control characters and surrogates as escapes, so that it stays one line.
std::string OneLine(const std::string& text);

// "PATH: FIELD: REASON" on the error stream.
void PrintKdtrError(const std::string& path, const KdtrError& error);

// Prints one line per file and, unless `quiet`, its tensor table; files that are
// refused go to the error stream. Returns the exit status.
int ListFiles(const std::vector<std::string>& paths, bool quiet);

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_CHECK_LIST_H_
