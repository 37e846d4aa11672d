#pragma once

#include <cstdint>
#include <optional>

namespace lockstep {

/// A rank, and of how many.
struct PlaceInWorld {
  int64_t num_replicas = 1;
  int64_t rank = 0;
};

/// This process's rank and the number of ranks: as given, and what is not given as in the default process group. Throws
/// c10::ValueError for a rank outside [0, num_replicas - 1], and where one is not given and there is no default group;
/// its message begins with `who`. Thread-safe.
PlaceInWorld place_in_world(const char* who, std::optional<int64_t> num_replicas,
                            std::optional<int64_t> rank);

}  // namespace lockstep
