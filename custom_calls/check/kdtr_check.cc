// kdtr_check: runs the CUDA kernels on the golden cases of a KDTR file, without Python.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "list.h"
#include "run_cases.h"

namespace {

constexpr char kHelp[] =
    R"(usage: kdtr_check [--time] [--op=NAME] [--case=I] [--repeats=N] [--guard_bytes=N]
                  [--attention=KERNEL] FILE...
       kdtr_check --dry_run [--op=NAME] [--case=I] FILE...
       kdtr_check --list [--quiet] FILE...

Runs the CUDA kernels on the golden cases of KDTR files, which
`python -m kdtree_jax.checkpoint.golden --out=FILE` writes, and prints a line per case.

  --time           also print a case's median time in microseconds, of launches in a
                   CUDA graph, with inputs in the L2 cache
  --op=NAME        only cases of this op
  --case=I         only case number I
  --repeats=N      replay a case's graph 2 N times instead of twice, to catch what goes
                   wrong now and then
  --guard_bytes=N  guard bytes before and behind every buffer (default 256). 0 gives
                   each buffer an allocation of its exact size, in which
                   compute-sanitizer also finds reads out of bounds
  --attention=KERNEL
                   run cases of tree_attention on its kernel KERNEL, portable or hopper
                   (sm_90a), where that takes them; hopper-1, hopper-2, hopper-4 and
                   hopper-8 with so many blocks to a chunk
  --dry_run        read and check the cases, launch nothing; needs no GPU
  --list           check the files and print their tensor tables; needs no GPU
  --quiet          with --list: only one line per file
  --help           this text

Exit status: 0 all is right, 1 a case or a file is wrong, 2 nothing could be run.
)";

struct Arguments {
  kdtree_jax::CheckOptions options;
  bool list = false;
  bool quiet = false;
  bool help = false;
  std::vector<std::string> files;
};

// Takes "--name=value"; returns false for another flag.
bool TakeValue(std::string_view argument, std::string_view name, std::string* value) {
  if (argument.substr(0, name.size()) != name) return false;
  *value = argument.substr(name.size());
  return true;
}

bool ParseCount(const std::string& text, int64_t* count) {
  constexpr size_t kMaxDigits = 9;
  if (text.empty() || text.size() > kMaxDigits ||
      text.find_first_not_of("0123456789") != std::string::npos) {
    return false;
  }
  *count = std::atoll(text.c_str());
  return true;
}

// Returns an empty string, or what is wrong with the command line.
std::string Parse(int argc, char** argv, Arguments* arguments) {
  kdtree_jax::CheckOptions& options = arguments->options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    std::string value;
    if (argument.empty() || argument[0] != '-') {
      arguments->files.push_back(argument);
    } else if (argument == "--help" || argument == "-h") {
      arguments->help = true;
    } else if (argument == "--list") {
      arguments->list = true;
    } else if (argument == "--quiet") {
      arguments->quiet = true;
    } else if (argument == "--time") {
      options.time = true;
    } else if (argument == "--dry_run") {
      options.dry_run = true;
    } else if (TakeValue(argument, "--op=", &value)) {
      options.op = value;
    } else if (TakeValue(argument, "--attention=", &value)) {
      options.attention = value;
    } else if (TakeValue(argument, "--case=", &value)) {
      if (!ParseCount(value, &options.only)) {
        return argument + ": must be the number of a case";
      }
    } else if (TakeValue(argument, "--repeats=", &value)) {
      if (!ParseCount(value, &options.repeats)) {
        return argument + ": must be a number of times";
      }
    } else if (TakeValue(argument, "--guard_bytes=", &value)) {
      if (!ParseCount(value, &options.guard_bytes)) {
        return argument + ": must be a number of bytes";
      }
    } else {
      return argument + ": unknown flag";
    }
  }
  if (!arguments->help && arguments->files.empty()) return "FILE is missing";
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  const std::string wrong = Parse(argc, argv, &arguments);
  if (!wrong.empty()) {
    std::fprintf(stderr, "kdtr_check: %s; see kdtr_check --help\n", wrong.c_str());
    return 2;
  }
  if (arguments.help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  if (arguments.list) return kdtree_jax::ListFiles(arguments.files, arguments.quiet);
#ifdef KDTR_CHECK_HOST_ONLY
  std::fputs("kdtr_check: built without CUDA: only --list and --help work\n", stderr);
  return 2;
#else
  return kdtree_jax::RunCases(arguments.files, arguments.options);
#endif
}
