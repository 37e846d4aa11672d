#pragma once

#include <cstdint>
#include <optional>

namespace lockstep {

/// This process's place in the default process group, for rooms that know no process groups (a sampler, say).
struct WorldDefaults {
  int32_t rank = 0;
  int32_t world_size = 1;
  /// The place that it had when the job began, which shrink_group() changes nothing about; -1: the same.
  int32_t job_rank = -1;
  int32_t job_size = -1;
  /// How often shrink_group() has made the default group anew.
  int64_t generation = 0;
};

/// What init_process_group() published, or nothing before it and after destroy_process_group(). Thread-safe.
std::optional<WorldDefaults> world_defaults();

/// Publishes the default group's rank and world size; init_process_group() calls it last. Thread-safe.
/// Throws c10::ValueError unless 0 <= rank < world_size.
void set_world_defaults(WorldDefaults defaults);

/// Takes it back; destroy_process_group() calls it first. Thread-safe.
void clear_world_defaults();

}  // namespace lockstep
