#include <c10/util/Exception.h>

#include <lockstep/base/place_in_world.h>
#include <lockstep/base/world_defaults.h>

namespace lockstep {

PlaceInWorld place_in_world(const char* who, std::optional<int64_t> num_replicas,
                            std::optional<int64_t> rank) {
  if (!num_replicas || !rank) {
    const auto world = world_defaults();
    TORCH_CHECK_VALUE(world, "Default process group has not been initialized, so ", who,
                      " knows neither rank nor world size: call lockstep::init_process_group() first, or "
                      "give it num_replicas and rank.");
    if (!num_replicas) num_replicas = world->world_size;
    if (!rank) rank = world->rank;
  }
  TORCH_CHECK_VALUE(*num_replicas > 0, "Invalid num_replicas ", *num_replicas, ", it should be at least 1");
  TORCH_CHECK_VALUE(*rank >= 0 && *rank < *num_replicas, "Invalid rank ", *rank,
                    ", rank should be in the interval [0, ", *num_replicas - 1, "]");
  return {*num_replicas, *rank};
}

}  // namespace lockstep
