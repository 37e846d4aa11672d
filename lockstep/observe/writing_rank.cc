#include <algorithm>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/observe/writing_rank.h>
#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep {

WritingRank::WritingRank(std::optional<bool> told) : told_(told) {
  if (told_ || world_defaults()) return;
  try {
    rank_ = std::max(read_launch_environment(environment::text).rank, 0);
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): init_process_group() will report it
  }
}

bool WritingRank::here() {
  if (told_) return *told_;
  if (const auto world = world_defaults()) rank_.store(world->rank, std::memory_order_relaxed);
  return rank_.load(std::memory_order_relaxed) == 0;
}

}  // namespace lockstep
