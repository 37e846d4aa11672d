#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::profiler {

/// What merge_traces() has done.
struct MergeReport {
  struct Host {
    std::string name;
    /// How far its clock was ahead of the first host's, which has 0, as their operations show, and within what; known is
    /// false where they have none in common, or messages one way alone, so that its times are taken as they are.
    bool known = true;
    int64_t clock_ahead_ns = 0;
    int64_t clock_error_ns = 0;
  };
  std::vector<int64_t> ranks;
  std::vector<Host> hosts;
  int64_t files = 0;
  int64_t events = 0;
  int64_t collectives = 0;  ///< of which several members' parts were there
  int64_t messages = 0;     ///< of which both parts were there
  int64_t arrows = 0;
  int64_t backward = 0;  ///< arrows that are left out, for by the clocks the effect was before its cause
};

/// Makes one trace of those of all ranks in a directory, for Perfetto and chrome://tracing: each rank is a process, on one
/// clock, and arrows show what each part of a group operation has waited for: of a collective the member that came last;
/// of a receive its send. Each part says how long it has waited and how long it has moved ("Waiting (us)",
/// "Moving (us)"). Memory does not grow with the events, only with the group operations. `output` appears as a whole, and is
/// compressed if it ends with .gz. Throws c10::ValueError that names the file or directory that can't be read, is no trace,
/// or has those of several runs, and an output in the directory that is called like a rank's trace (*.pt.trace.json), as
/// TensorBoard's plug-in wants it in a folder of its own; c10::Error for what can't be written.
MergeReport merge_traces(const std::string& directory, const std::string& output);

/// In words; ends with a newline.
std::string describe(const MergeReport& report);

}  // namespace lockstep::profiler
