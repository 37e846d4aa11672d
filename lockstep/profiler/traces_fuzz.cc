// Any bytes as a trace: an analysis and a merged trace that can be read again, or a ValueError.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/profiler/merge_traces.h>
#include <lockstep/profiler/testing/synthetic_trace.h>
#include <lockstep/profiler/trace_analysis.h>
#include <lockstep/testing/fuzz_driver.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::traces_fuzz {
namespace {

using profiler::testing::SyntheticTrace;

SyntheticTrace small_trace(int64_t rank) {
  SyntheticTrace trace({.rank = rank,
                        .host = rank == 0 ? "one" : "other",
                        .held = {{"CPU", {{"parameters", 64}, {"gradients", 64}}}}});
  trace.add_step(1, 0, 1000);
  trace.add_operator("aten::mm", 10, 500);
  trace.add_collective("all_reduce", 1, 100, 700);
  trace.add_message(rank == 0 ? "send" : "recv", 1 - rank, 700, 800);
  trace.add_memory(20, 64, 1);
  trace.add_kernel("kernel", "gemm", 200, 600);
  return trace;
}

std::vector<std::string> seeds() {
  return {small_trace(0).text(),
          R"({"traceEvents": [{"ph": "X", "ts": 1e300, "dur": -1, "pid": "a", "id": "b"}]})"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(traces, seeds) {
  static const testing::TemporaryFolder folder;
  static const testing::TemporaryFolder output;
  small_trace(1).write(folder);
  folder.write("fuzzed.pt.trace.json", {reinterpret_cast<const char*>(data), size});
  try {
    const auto analysis = profiler::analyze_traces(folder.path().string());
    if (profiler::describe(analysis).empty() || profiler::to_json(analysis).empty()) std::abort();
    profiler::merge_traces(folder.path().string(), output.path("all.json"));
  } catch (const c10::ValueError&) {
    return 0;
  }
  // It is no rank's, and called like one only here.
  std::filesystem::rename(output.path("all.json"), output.path("all.pt.trace.json"));
  profiler::analyze_traces(output.path().string());
  return 0;
}

}  // namespace lockstep::traces_fuzz
