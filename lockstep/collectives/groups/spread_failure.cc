#include <exception>
#include <utility>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/groups/spread_failure.h>

namespace lockstep {

void spread_failure(const std::vector<ProcessGroup>& groups) noexcept try {
  std::vector<c10::intrusive_ptr<LockstepBackend>> backends;
  for (const ProcessGroup& group : groups) {
    if (!group) continue;
    if (auto backend = lockstep_backend_of(*group)) backends.push_back(std::move(backend));
  }
  for (const auto& failed : backends) {
    if (!failed->channel().failed()) continue;
    for (const auto& other : backends) {
      if (other != failed) other->channel().fail_as(failed->channel());
    }
    return;
  }
} catch (const std::exception& error) {
  LOCKSTEP_LOG(kWarning) << "the other groups of this rank don't hear of a group's failure: "
                         << text_of(error);
}

}  // namespace lockstep
