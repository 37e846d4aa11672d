#include <mutex>

#include <c10/util/Exception.h>

#include <lockstep/base/world_defaults.h>

namespace lockstep {
namespace {

std::mutex mutex;
std::optional<WorldDefaults> published;  // guarded by mutex

}  // namespace

std::optional<WorldDefaults> world_defaults() {
  std::lock_guard lock(mutex);
  return published;
}

void set_world_defaults(WorldDefaults defaults) {
  TORCH_CHECK_VALUE(defaults.rank >= 0 && defaults.rank < defaults.world_size, "rank ", defaults.rank,
                    " does not lie in a world of ", defaults.world_size, " ranks");
  std::lock_guard lock(mutex);
  published = defaults;
}

void clear_world_defaults() {
  std::lock_guard lock(mutex);
  published.reset();
}

}  // namespace lockstep
