#include <atomic>

#include <c10/util/Exception.h>

#include <lockstep/base/world_defaults.h>

namespace lockstep {
namespace {

// Both numbers in one atomic, so that no reader sees the rank of one group with the size of another. A world
// size of zero means unset.
std::atomic<uint64_t> packed_defaults{0};

}  // namespace

std::optional<WorldDefaults> world_defaults() {
  const uint64_t packed = packed_defaults.load(std::memory_order_acquire);
  if (packed == 0) return std::nullopt;
  return WorldDefaults{static_cast<int32_t>(packed >> 32), static_cast<int32_t>(packed & 0xffffffffU)};
}

void set_world_defaults(WorldDefaults defaults) {
  TORCH_CHECK_VALUE(defaults.rank >= 0 && defaults.rank < defaults.world_size, "rank ", defaults.rank,
                    " does not lie in a world of ", defaults.world_size, " ranks");
  packed_defaults.store(
      static_cast<uint64_t>(defaults.rank) << 32 | static_cast<uint64_t>(defaults.world_size),
      std::memory_order_release);
}

void clear_world_defaults() {
  packed_defaults.store(0, std::memory_order_release);
}

}  // namespace lockstep
