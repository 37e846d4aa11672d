#pragma once

#include <cstdint>
#include <optional>

namespace lockstep {

/// A rank, and of how many.
struct PlaceInWorld {
  int64_t num_replicas = 1;
  int64_t rank = 0;
};

/// Which of how many ranks this process is: what was told, and for the rest the default process group. Throws
/// c10::ValueError for a rank outside [0, num_replicas - 1], and where something is not told and there is no
/// default group; `who` says so. Thread-safe.
PlaceInWorld place_in_world(const char* who, std::optional<int64_t> num_replicas,
                            std::optional<int64_t> rank);

}  // namespace lockstep
