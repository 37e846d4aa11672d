#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/profiler/event_list.h>

/// The one place that knows Kineto, which LibTorch brings along.
namespace lockstep::profiler::internal {

struct KinetoOptions {
  bool cpu = true;
  bool cuda = false;
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_flops = false;
};

/// What one recording has brought.
class KinetoTrace {
 public:
  virtual ~KinetoTrace() = default;
  /// All of Kineto's, in its order, those of memory included, as they are.
  virtual std::vector<FunctionEvent> raw_events() const = 0;
  /// What a user is to see: each with the memory that was allocated while it ran, and "[memory]" for what was outside of
  /// all. `with_stacks`: raw_events() whose stacks they get, or nothing.
  virtual std::vector<FunctionEvent> events(const std::vector<FunctionEvent>& with_stacks) const = 0;
  /// Writes the JSON of chrome://tracing; once.
  virtual void save(const std::string& path) = 0;
};

/// Keeps Kineto from telling of each recording on standard error, unless KINETO_LOG_LEVEL is set. Kineto reads that
/// variable when it is first made ready, and LibTorch exports no function that does as much. setenv(3) is not safe beside
/// threads that read the environment, so this is to be called as early as it is known that something will be recorded;
/// only the first call counts.
void quieten_kineto();

/// What makes a recording ready; start_kineto() and stop_kineto() follow in the same thread.
void prepare_kineto(const KinetoOptions& options);
void start_kineto(const KinetoOptions& options);
std::unique_ptr<KinetoTrace> stop_kineto();

}  // namespace lockstep::profiler::internal
