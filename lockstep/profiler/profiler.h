#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <lockstep/profiler/event_list.h>
#include <lockstep/profiler/schedule.h>

namespace lockstep {

class Profiler;

namespace profiler {

enum class ProfilerActivity {
  kCpu,   ///< operators and scopes
  kCuda,  ///< kernels, copies, and the calls that launch them
};
/// The CPU, and CUDA where this process has a card. torch.profiler.supported_activities.
std::set<ProfilerActivity> supported_activities();

using TraceHandler = std::function<void(Profiler&)>;

/// Writes each cycle's trace into the directory, which is made: DIR/WORKER.NANOSECONDS.pt.trace.json, with use_gzip and .gz
/// after it. TensorBoard with the plug-in torch-tb-profiler reads it, and so does `lockstep inspect trace`. The worker's
/// name is HOST_PID unless told; each rank needs one of its own. torch.profiler.tensorboard_trace_handler.
TraceHandler tensorboard_trace_handler(std::string dir_name, std::string worker_name = {},
                                       bool use_gzip = false);

namespace internal {
void end_explained(std::unique_ptr<Profiler> profiler);
}

}  // namespace profiler

/// torch.profiler.profile's.
struct ProfilerOptions {
  std::optional<std::set<profiler::ProfilerActivity>> activities = {};  ///< none: supported_activities()
  profiler::Schedule schedule = {};  ///< empty: all is recorded, as one cycle, and steps are not marked
  profiler::TraceHandler on_trace_ready = {};  ///< called at the end of each cycle, in step() or stop()
  bool record_shapes = false;                  ///< of operators' inputs
  bool profile_memory = false;                 ///< what operators allocate and free
  /// The C++ calls that led to each operator, as far as the program's symbols tell. They are looked up at the end of a
  /// cycle, which takes from a tenth of a second to some seconds.
  bool with_stack = false;
  bool with_flops = false;  ///< multiplications and additions of matrix products and convolutions, by formula
  /// What the names of collectives begin with in the trace. The distributed view of TensorBoard's plug-in knows "gloo"
  /// and "nccl" only.
  std::string collectives_as = "lockstep";
};

/// Records what this process does, step by step: operators, scopes (profiler::RecordFunction), kernels, memory, and the
/// group operations of all threads, which LibTorch knows nothing of. torch.profiler.profile, over the same Kineto.
///
///     lockstep::Profiler profiler({
///         .schedule = lockstep::profiler::schedule({.wait = 1, .warmup = 1, .active = 3, .repeat = 2}),
///         .on_trace_ready = lockstep::profiler::tensorboard_trace_handler("./log/profiler"),
///         .record_shapes = true,
///     });
///     for (auto& batch : loader) {
///       train(batch);
///       profiler.step();
///     }
///
/// From construction to stop(), or destruction, it is what Python's `with profile(…)` is. Operators are recorded of the
/// thread that runs it, and of those that autograd starts for it; of other threads, such as a loader's workers, scopes are.
/// Group operations have rows of their own, each from the moment at which it began to that of its end, with the group, its
/// ranks, the sequence number, sizes, and how long it has waited for earlier ones; how long it has waited for other ranks is
/// in the merged trace (merge_traces.h).
///
/// While nothing is recorded there is no observer, and nothing has a cost. One profiler of a process may record at a
/// time, Python's included. Used by one thread: what it records when that ends, or the process by exit(), is lost. A
/// child that is forked after the first recording ends by exec or _exit(): exit() waits there for ever, for a thread of
/// Kineto's that the child does not have.
class Profiler {
 public:
  /// Starts. Throws c10::ValueError when there is no activity, or CUDA is asked for where there is no card.
  explicit Profiler(ProfilerOptions options = {});
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;
  /// stop(), but what it throws goes to the log.
  ~Profiler();

  /// Begins again, after stop(), with the step at which it has stopped.
  void start();
  /// Ends what is recorded, and hands it to on_trace_ready. Does nothing when it has stopped.
  void stop();
  /// The next step begins, also where the handler throws.
  void step();
  int64_t step_num() const { return step_num_; }

  // ---- Of the latest cycle that has ended, in on_trace_ready and afterwards. All throw c10::Error before the first.

  /// By begin, as a tree.
  const std::vector<profiler::FunctionEvent>& events();
  profiler::KeyAverages key_averages(const profiler::KeyAveragesOptions& options = {});
  /// As a file for chrome://tracing, Perfetto and TensorBoard; compressed if `path` ends with .gz. It appears as a whole.
  /// Once for each cycle, for Kineto gives its trace away; where the file can't be made, it may be tried again, but not
  /// where the disk was full. Throws c10::Error that names the file.
  void export_chrome_trace(const std::string& path);

  // ---- What is written into each trace from now on.

  void add_metadata(const std::string& key, const std::string& value);
  /// `value`: JSON, which is not checked.
  void add_metadata_json(const std::string& key, const std::string& value);

  const ProfilerOptions& options() const { return options_; }

 private:
  friend void profiler::internal::end_explained(std::unique_ptr<Profiler> profiler);
  /// Whether the log has already why it stops; else it is told that nothing was recorded.
  enum class Reason : uint8_t { kUnknown, kInLog };
  struct Recording;
  struct Cycle;

  void stop(Reason reason);
  void stop_at_last(Reason reason) noexcept;
  profiler::ProfilerAction action(int64_t step) const;
  void transit(profiler::ProfilerAction from, std::optional<profiler::ProfilerAction> to);
  void leave(profiler::ProfilerAction from, std::optional<profiler::ProfilerAction> to);
  void enter(std::optional<profiler::ProfilerAction> to);
  void prepare();
  void begin();
  void end();
  void mark_step();
  std::string nothing_recorded() const;
  Cycle& cycle() const;

  const ProfilerOptions options_;
  std::set<profiler::ProfilerActivity> activities_;
  std::map<std::string, std::string> metadata_;  // JSON, by key
  int64_t step_num_ = 0;
  profiler::ProfilerAction current_;
  bool running_ = false;
  std::unique_ptr<Recording> recording_;  // from prepare() to end()
  std::unique_ptr<Cycle> cycle_;          // from the first end() on
};

}  // namespace lockstep
