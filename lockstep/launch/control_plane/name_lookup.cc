#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/launch/control_plane/name_lookup.h>

namespace lockstep::launch {

struct NameLookup::Shared {
  enum class Phase : uint8_t { kIdle, kLooking };

  explicit Shared(std::function<std::vector<SocketAddress>()> what) : find(std::move(what)) {}

  void run() {
    std::vector<SocketAddress> addresses;
    try {
      addresses = find();
    } catch (const std::exception&) {  // as where the name has no address: it may have one at the next look
    }
    const std::lock_guard lock(mutex);
    found = std::move(addresses);
    phase = Phase::kIdle;
  }

  const std::function<std::vector<SocketAddress>()> find;
  std::mutex mutex;  // for all that follows
  std::vector<SocketAddress> found;
  Phase phase = Phase::kIdle;
};

NameLookup::NameLookup(std::function<std::vector<SocketAddress>()> find)
    : shared_(std::make_shared<Shared>(std::move(find))) {}

void NameLookup::begin() {
  {
    const std::lock_guard lock(shared_->mutex);
    if (std::exchange(shared_->phase, Shared::Phase::kLooking) == Shared::Phase::kLooking) return;
  }
  try {
    start_detached_thread("lockstep-lookup", [shared = shared_] { shared->run(); });
  } catch (const std::exception&) {  // there is no thread for it now
    const std::lock_guard lock(shared_->mutex);
    shared_->phase = Shared::Phase::kIdle;
  }
}

std::optional<std::vector<SocketAddress>> NameLookup::take() {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->found.empty()) return std::nullopt;
  return std::exchange(shared_->found, {});
}

}  // namespace lockstep::launch
