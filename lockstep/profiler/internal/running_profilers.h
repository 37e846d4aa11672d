#pragma once

#include <atomic>
#include <memory>

#include <lockstep/profiler/profiler.h>

/// What the Profiler tells the profile of LOCKSTEP_PROFILE, which gives way to those that the program runs itself.
namespace lockstep::profiler::internal {

/// Between start() and stop(). A forked child has those of its parent, as it has the objects.
inline std::atomic<int> running_profilers{0};

/// Destroys one for a reason that the log has: that it has recorded nothing is not told, too. Null: nothing.
void end_explained(std::unique_ptr<Profiler> profiler);

/// Called before one starts; null: nothing has to give way.
inline std::atomic<void (*)()> before_profiler_starts{nullptr};

}  // namespace lockstep::profiler::internal
