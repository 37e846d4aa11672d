#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// From the traces of a job's ranks to words: where a step's time goes, which rank is slow, and what to try. For traces of
/// this Profiler, and of Python's.
namespace lockstep::profiler {

/// How the time of a step is spent. Each moment belongs to the first of these that it fits: a loader is waited for;
/// communication, and no operator runs beside it (it is exposed); a backward function; an optimizer; a forward; none of
/// these. Operators outside of all scopes are forward's up to the step's last backward function, the optimizer's after it.
/// Milliseconds.
struct TracePhaseTimes {
  double data = 0;
  double forward = 0;
  double backward = 0;
  double communication = 0;  ///< exposed
  double optimizer = 0;
  double idle = 0;
  double total() const { return data + forward + backward + communication + optimizer + idle; }

  double hidden_communication = 0;  ///< beside operators
  double waiting = 0;               ///< of the exposed communication: for ranks that have not come yet
};

/// Bytes that were there when the recording began, as far as the program knows of them: of models that a wrapper or a Trainer
/// has, made in the thread that was recorded, with the memory that their gradients are kept in; of the state of a Trainer's
/// optimizer. 0: none, or nothing tells of them.
struct HeldMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t total() const { return parameters + gradients + optimizer_state; }
};

/// Bytes that tensors take, at most, beyond what they took when the recording began, and what is known of that. A trace does not
/// say what a tensor is for, so that is told by when it was allocated and given back. The categories are those of torch
/// (torch/profiler/_memory_profiler.py) but AUTOGRAD_DETAIL, which is temporary or an activation here, and PARAMETER, which
/// is in `held`. What is still there when the recording ends counts as kept.
struct MemoryPeak {
  std::string device;  ///< "CPU", "CUDA 0"
  int64_t bytes = 0;
  int64_t inputs = 0;           ///< allocated while data was waited for
  int64_t activations = 0;      ///< allocated in forward, and kept until backward
  int64_t gradients = 0;        ///< allocated in backward, and kept until the optimizer
  int64_t optimizer_state = 0;  ///< allocated in the optimizer, and kept until the next step
  int64_t temporary = 0;        ///< allocated in one of these, and given back before
  int64_t other = 0;
  HeldMemory held = {};  ///< beside `bytes`
};

struct RankProfile {
  int64_t rank = 0;
  std::string host;
  int64_t steps = 0;                    ///< without those that not all ranks have recorded
  TracePhaseTimes mean;                 ///< of a step
  std::vector<MemoryPeak> memory = {};  ///< with profile_memory
};

struct OperatorTime {
  std::string name;
  double calls = 0;    ///< in a step of a rank, on average
  double self_ms = 0;  ///< so, without the operators that it calls
  double share = 0;    ///< of all operators' time
};

struct TraceAnalysis {
  std::vector<RankProfile> ranks;
  TracePhaseTimes mean;  ///< of a step of a rank
  /// Else all `waiting` are 0: the traces don't tell for whom ranks have waited, as Python's don't.
  bool waiting_is_known = true;
  /// The rank for which the others wait, if one takes clearly longer than they do, and in what.
  std::optional<int64_t> slowest;
  std::string why;
  std::vector<OperatorTime> operators;  ///< all, those that take most first
  std::vector<std::string> advice;      ///< what to try next, the most promising first
  std::vector<std::string> notes;       ///< about the traces themselves
};

/// All traces of a directory; several cycles of a rank are taken together. Throws c10::ValueError that names the directory
/// or the file that can't be read, or is no trace.
TraceAnalysis analyze_traces(const std::string& directory);

/// For a terminal, with the operators that take most; names from the files have no control characters. Ends with a newline.
std::string describe(const TraceAnalysis& analysis);
/// {"step_ms", "phases", "ranks", "slowest": {"rank", "why"} or null, "operators", "advice", "notes"}; times are ms. Of
/// operators those that take most.
std::string to_json(const TraceAnalysis& analysis);

/// What has changed from `before` to `after`: phases, waiting and hidden communication, the peaks of memory of the ranks with
/// most, the slowest rank, and the operators whose time differs most.
std::string describe_difference(const TraceAnalysis& before, const TraceAnalysis& after);
/// {"before", "after", "change": {"step_ms", "phases", "memory", "slowest", "operators"}}; of the step and its phases ms, after
/// less before, of all else both.
std::string difference_to_json(const TraceAnalysis& before, const TraceAnalysis& after);

}  // namespace lockstep::profiler
