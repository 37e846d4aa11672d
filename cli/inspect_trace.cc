#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/profiler/merge_traces.h>
#include <lockstep/profiler/trace_analysis.h>

#include "inspect.h"

namespace lockstep::cli {
namespace {

constexpr const char* kTraceExamples = R"(
Examples:
  lockstep inspect trace log/profiler                       where a step's time goes, which rank is slow, what to try
  lockstep inspect trace --json log/profiler                the same for programs
  lockstep inspect trace --compare log/before log/profiler  what has changed since log/before
  lockstep inspect trace --merge all.json.gz log/profiler   also all ranks in one file, for ui.perfetto.dev

The traces come from lockstep::Profiler, the Trainer's option `profiler`, LOCKSTEP_PROFILE=wait:1,warmup:1,active:3
before any program, or torch.profiler with tensorboard_trace_handler. Bring those of several hosts into one directory.)";

struct TraceWishes {
  std::string directory;
  std::string before;
  std::string merged;
  bool json = false;
};

std::string report_of(const TraceWishes& wishes) {
  const auto analysis = profiler::analyze_traces(wishes.directory);
  if (wishes.before.empty()) return wishes.json ? profiler::to_json(analysis) : profiler::describe(analysis);
  const auto before = profiler::analyze_traces(wishes.before);
  return wishes.json ? profiler::difference_to_json(before, analysis)
                     : profiler::describe_difference(before, analysis);
}

/// The report comes last, for its reader may take some lines and end this program.
void inspect_traces(const TraceWishes& wishes) {
  const std::string report = report_of(wishes);
  if (!wishes.merged.empty()) {
    const auto merged = profiler::merge_traces(wishes.directory, wishes.merged);
    std::cerr << wishes.merged << ": " << profiler::describe(merged) << std::flush;
  }
  std::cout << report << std::flush;
}

}  // namespace

void add_inspect_trace(CLI::App& inspect) {
  CLI::App* trace =
      inspect.add_subcommand("trace", "Where the time of training steps goes, from the ranks' profiles");
  trace->footer(kTraceExamples);
  auto wishes = std::make_shared<TraceWishes>();
  trace->add_option("DIR", wishes->directory, "The directory with the ranks' traces")->required();
  trace->add_option("--compare", wishes->before, "The traces of an earlier run: say what has changed since");
  trace->add_option(
      "--merge", wishes->merged,
      "Write all ranks' traces into this file, on one clock; TensorBoard's plug-in reads it if it is "
      "called all.pt.trace.json and in another folder");
  trace->add_flag("--json", wishes->json, "Write JSON");
  trace->callback([wishes] { inspect_traces(*wishes); });
}

}  // namespace lockstep::cli
