#include "run_cases.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "buffers.h"
#include "golden_case.h"
#include "kdtr.h"
#include "list.h"
#include "ops.h"

namespace kdtree_jax {
namespace {

// What outputs and workspace hold before each run. Three runs are plain, two replay a
// graph. 0xFF is NaN and -1; a kernel that counts on zeros, or leaves an element as it
// was, gives other bits in one of the runs.
constexpr uint8_t kPlainPoisons[] = {0xFF, 0x00, 0x5A};
constexpr uint8_t kReplayPoisons[] = {0x00, 0xFF};

constexpr int kTimedLaunches = 20;
constexpr int kTimings = 31;

struct Totals {
  int ok = 0;
  int failed = 0;
  bool lost = false;  // the device takes no more work
};

// A stream and the graph captured from it.
class Runner {
 public:
  Runner() { status_ = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~Runner() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  cudaStream_t stream() const { return stream_; }

  // Empty, or what went wrong.
  std::string RunAll(const Launch& launch, int64_t repeats, Buffers* buffers) {
    if (status_ != cudaSuccess) return CudaText("cudaStreamCreate", status_);
    std::string error;
    for (const uint8_t poison : kPlainPoisons) {
      if (!buffers->Restore(poison, &error)) return error;
      const cudaError_t status = launch(stream_);
      if (status != cudaSuccess) return CudaText("launch", status);
      if (!buffers->Check(&error)) return error;
    }
    error = Capture(launch, 1);
    if (!error.empty()) return error;
    for (int64_t i = 0; i < repeats; ++i) {
      for (const uint8_t poison : kReplayPoisons) {
        if (!buffers->Restore(poison, &error)) return error;
        const cudaError_t status = cudaGraphLaunch(executable_, stream_);
        if (status != cudaSuccess) return CudaText("cudaGraphLaunch", status);
        if (!buffers->Check(&error)) return error + " (replay of a graph)";
      }
    }
    return "";
  }

  // Median of the time of one launch, in microseconds; negative after an error.
  double Time(const Launch& launch) {
    if (!Capture(launch, kTimedLaunches).empty()) return -1;
    cudaEvent_t begin, end;
    if (cudaEventCreate(&begin) != cudaSuccess) return -1;
    if (cudaEventCreate(&end) != cudaSuccess) return -1;
    std::vector<float> times;
    bool ok = true;
    for (int i = 0; i < kTimings && ok; ++i) {
      float milliseconds = 0;
      ok = cudaEventRecord(begin, stream_) == cudaSuccess &&
           cudaGraphLaunch(executable_, stream_) == cudaSuccess &&
           cudaEventRecord(end, stream_) == cudaSuccess &&
           cudaEventSynchronize(end) == cudaSuccess &&
           cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess;
      times.push_back(milliseconds);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    if (!ok) return -1;
    std::nth_element(times.begin(), times.begin() + kTimings / 2, times.end());
    return times[kTimings / 2] * 1e3 / kTimedLaunches;
  }

 private:
  std::string Capture(const Launch& launch, int count) {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    executable_ = nullptr;
    cudaError_t status = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed);
    if (status != cudaSuccess) return CudaText("cudaStreamBeginCapture", status);
    cudaError_t launched = cudaSuccess;
    for (int i = 0; i < count && launched == cudaSuccess; ++i) {
      launched = launch(stream_);
    }
    cudaGraph_t graph = nullptr;
    status = cudaStreamEndCapture(stream_, &graph);
    if (launched != cudaSuccess) return CudaText("launch under capture", launched);
    if (status != cudaSuccess) return CudaText("cudaStreamEndCapture", status);
    status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    if (status != cudaSuccess) return CudaText("cudaGraphInstantiate", status);
    return "";
  }

  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  cudaError_t status_;
};

void Print(const GoldenCase& golden, const std::string& dimensions,
           const std::string& error, const std::string& note) {
  std::printf("%-4s  %-15s  case %-3zu  %s  (%s)%s%s%s%s\n",
              error.empty() ? "ok" : "FAIL", golden.op.c_str(), golden.number,
              dimensions.c_str(), golden.name.c_str(), note.empty() ? "" : "  ",
              note.c_str(), error.empty() ? "" : "  ", error.c_str());
  std::fflush(stdout);  // What was found so far, should a kernel end the program.
}

std::string Text(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

void RunCase(const KdtrFile& file, const GoldenCase& golden,
             const CheckOptions& options, Totals* totals) {
  const SetUp set_up = FindOp(golden.op);
  std::string error, note, dimensions;
  if (set_up == nullptr) {
    error = "no such op in this program; it has " + OpNames();
  } else if (options.dry_run) {
    CaseSetup setup(file, golden, nullptr);
    set_up(setup);
    setup.Finish();
    dimensions = setup.dimensions();
    error = setup.error();
  } else {
    Runner runner;
    Buffers buffers(runner.stream(), options.guard_bytes);
    CaseSetup setup(file, golden, &buffers);
    const Launch launch = set_up(setup);
    setup.Finish();
    dimensions = setup.dimensions();
    error = setup.error();
    if (error.empty()) error = runner.RunAll(launch, options.repeats, &buffers);
    if (buffers.worst() >= 0) note = Text("error %.2f of bound", buffers.worst());
    if (error.empty() && options.time) {
      const double time = runner.Time(launch);
      if (time < 0) error = "cannot be timed";
      note += (note.empty() ? "" : "  ") + Text("%.2f us", time);
    }
    cudaGetLastError();  // A refused launch is over; a fault stays.
    totals->lost = cudaDeviceSynchronize() != cudaSuccess;
  }
  Print(golden, dimensions, OneLine(error), note);
  ++(error.empty() ? totals->ok : totals->failed);
}

bool FindDevice() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) == cudaSuccess) {
      std::printf("device: %s, sm_%d%d\n", properties.name, properties.major,
                  properties.minor);
    }
    return true;
  }
  std::fprintf(stderr,
               "kdtr_check: no GPU to run on%s%s; --list, --dry_run and --help need "
               "none\n",
               status == cudaSuccess ? "" : ": ",
               status == cudaSuccess ? "" : cudaGetErrorString(status));
  return false;
}

}  // namespace

int RunCases(const std::vector<std::string>& paths, const CheckOptions& options) {
  if (!options.op.empty() && FindOp(options.op) == nullptr) {
    std::fprintf(stderr, "kdtr_check: --op=%s: no such op; there are %s\n",
                 options.op.c_str(), OpNames().c_str());
    return 2;
  }
  if (!ChooseAttentionKernel(options.attention)) {
    std::fprintf(stderr,
                 "kdtr_check: --attention=%s: must be portable, hopper, hopper-1, "
                 "hopper-2, hopper-4 or hopper-8\n",
                 options.attention.c_str());
    return 2;
  }
  if (!options.dry_run && !FindDevice()) return 2;
  Totals totals;
  bool refused = false;
  for (const std::string& path : paths) {
    KdtrError error;
    std::vector<GoldenCase> cases;
    const std::unique_ptr<KdtrFile> file = KdtrFile::Open(path, &error);
    if (file == nullptr || !ReadCases(*file, &cases, &error)) {
      PrintKdtrError(path, error);
      refused = true;
      continue;
    }
    for (const GoldenCase& golden : cases) {
      if (!options.op.empty() && golden.op != options.op) continue;
      if (options.only >= 0 && golden.number != static_cast<size_t>(options.only)) {
        continue;
      }
      if (totals.lost) break;
      RunCase(*file, golden, options, &totals);
    }
  }
  std::printf("%d ok, %d failed%s\n", totals.ok, totals.failed,
              options.dry_run ? " (dry run: nothing was launched)" : "");
  if (totals.lost) {
    std::fputs("kdtr_check: the device is lost; later cases were not run\n", stderr);
  }
  if (totals.failed > 0 || totals.lost || refused) return 1;
  if (totals.ok == 0) {
    std::fputs("kdtr_check: no case to run\n", stderr);
    return 2;
  }
  return 0;
}

}  // namespace kdtree_jax
