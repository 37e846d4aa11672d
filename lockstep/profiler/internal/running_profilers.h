#pragma once

#include <atomic>

/// What the Profiler tells the profile of LOCKSTEP_PROFILE, which gives way to those that the program runs itself.
namespace lockstep::profiler::internal {

/// Between start() and stop(). A forked child has those of its parent, as it has the objects.
inline std::atomic<int> running_profilers{0};

/// One is ended in this thread for a reason that the log has: that it has recorded nothing is not told, too.
inline thread_local bool ends_early = false;

/// Called before one starts; null: nothing has to give way.
inline std::atomic<void (*)()> before_profiler_starts{nullptr};

}  // namespace lockstep::profiler::internal
