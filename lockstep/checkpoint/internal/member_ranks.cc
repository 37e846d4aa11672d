#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/objects.h>

namespace lockstep::checkpoint::internal {

MemberRanks::MemberRanks(ProcessGroup group, bool alone) : group_(std::move(group)) {
  if (!group_ && is_initialized()) group_ = default_group();
  if (!group_) return;
  rank_ = get_rank(group_);
  group_size_ = get_world_size(group_);
  TORCH_CHECK_VALUE(rank_ >= 0, "this process is not in the group that saves or loads checkpoints");
  talks_ = !alone && group_size_ > 1;
}

std::chrono::nanoseconds MemberRanks::timeout() const {
  if (!talks_) return std::chrono::nanoseconds::max();
  const auto backend = lockstep_backend_of(*group_);
  return backend ? backend->timeout() : std::chrono::minutes(30);
}

std::vector<c10::IValue> MemberRanks::gather(const c10::IValue& object) const {
  if (!talks_) return {object};
  const CallSite site(CallSite::kCheckpoint);
  std::vector<c10::IValue> objects(leads() ? static_cast<size_t>(group_size_) : 0);
  gather_object(object, leads() ? &objects : nullptr, get_global_rank(group_, 0), group_);
  return objects;
}

c10::IValue MemberRanks::scatter(const std::vector<c10::IValue>& objects) const {
  if (!talks_) return objects.at(0);
  const CallSite site(CallSite::kCheckpoint);
  std::vector<c10::IValue> mine(1);
  scatter_object_list(mine, leads() ? objects : std::vector<c10::IValue>{}, get_global_rank(group_, 0),
                      group_);
  return mine[0];
}

c10::IValue MemberRanks::broadcast(const c10::IValue& object) const {
  if (!talks_) return object;
  const CallSite site(CallSite::kCheckpoint);
  std::vector<c10::IValue> objects = {object};
  broadcast_object_list(objects, get_global_rank(group_, 0), group_);
  return objects[0];
}

std::vector<c10::IValue> MemberRanks::all_gather(const c10::IValue& object) const {
  if (!talks_) return {object};
  const CallSite site(CallSite::kCheckpoint);
  std::vector<c10::IValue> objects(static_cast<size_t>(group_size_));
  all_gather_object(objects, object, group_);
  return objects;
}

}  // namespace lockstep::checkpoint::internal
