#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/collectives/groups/internal/group_registry.h>

namespace lockstep::collectives::internal::registry {
namespace {

std::mutex mutex;
// The one singleton; under the mutex. Never destroyed: a process that exits without destroying the group must
// not wait for peers, nor touch torch's own statics, while the runtime takes it down; the peers are told by
// its end note.
std::shared_ptr<DefaultWorld>& current = *new std::shared_ptr<DefaultWorld>;

DefaultWorld& require_locked() {
  TORCH_CHECK_VALUE(
      current != nullptr,
      "Default process group has not been initialized, please make sure to call init_process_group.");
  return *current;
}

std::string shrunk_suffix(uint64_t times) {
  return times == 0 ? "" : ":shrunk:" + std::to_string(times);
}

void publish(const DefaultWorld& world) {
  set_world_defaults({.rank = world.world.rank,
                      .world_size = world.world.world_size,
                      .job_rank = world.transport->job_rank(world.transport->rank()),
                      .job_size = world.transport->world_size(),
                      .generation = static_cast<int64_t>(world.times_shrunk)});
}

auto find_locked(const ProcessGroup& handle) {
  DefaultWorld& world = require_locked();
  TORCH_CHECK_VALUE(!handle || handle->getRank() >= 0, "Invalid process group specified: this process (rank ",
                    world.world.rank, ") is not a member of the group; leave the call to its members");
  auto found = world.groups.find(handle ? handle.get() : world.default_group.get());
  TORCH_CHECK_VALUE(found != world.groups.end(),
                    "Invalid process group specified: it was destroyed, belongs to a default group that was "
                    "destroyed, or is not Lockstep's; make it with new_group()");
  return found;
}

}  // namespace

std::shared_ptr<DefaultWorld> find_world() {
  std::lock_guard lock(mutex);
  return current;
}

std::shared_ptr<DefaultWorld> require_world() {
  std::lock_guard lock(mutex);
  require_locked();
  return current;
}

void install(std::shared_ptr<DefaultWorld> world) {
  std::lock_guard lock(mutex);
  TORCH_CHECK_VALUE(current == nullptr,
                    "trying to initialize the default process group twice! "
                    "init_process_group was called in two threads at once.");
  publish(*world);
  current = std::move(world);
}

void replace(const DefaultWorld& world, std::shared_ptr<DefaultWorld> successor) {
  std::lock_guard lock(mutex);
  TORCH_CHECK_VALUE(current.get() == &world, "the default process group was destroyed while it was shrunk");
  publish(*successor);
  current = std::move(successor);
}

std::shared_ptr<DefaultWorld> remove_world() {
  std::lock_guard lock(mutex);
  clear_world_defaults();
  return std::exchange(current, nullptr);
}

std::shared_ptr<RegisteredGroup> find(const ProcessGroup& handle) {
  std::lock_guard lock(mutex);
  return find_locked(handle)->second;
}

void add(DefaultWorld& world, std::shared_ptr<RegisteredGroup> group, bool is_default) {
  std::lock_guard lock(mutex);
  TORCH_CHECK_VALUE(is_default || current.get() == &world,
                    "the default process group was destroyed while group '", group->name, "' was made");
  if (is_default) {
    world.default_group = group->handle;
    world.group_count = 1;
  }
  group->number = world.groups_registered++;
  world.names.insert(group->name);
  world.groups.emplace(group->handle.get(), std::move(group));
}

std::shared_ptr<RegisteredGroup> remove(const ProcessGroup& handle) {
  std::lock_guard lock(mutex);
  auto found = find_locked(handle);
  std::shared_ptr<RegisteredGroup> group = std::move(found->second);
  current->groups.erase(found);
  current->names.erase(group->name);
  return group;
}

std::vector<std::shared_ptr<RegisteredGroup>> all(DefaultWorld& world) {
  std::vector<std::shared_ptr<RegisteredGroup>> groups;
  {
    std::lock_guard lock(mutex);
    for (const auto& [handle, group] : world.groups) groups.push_back(group);
  }
  std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a->number > b->number; });
  return groups;
}

bool has_name(DefaultWorld& world, const std::string& name) {
  std::lock_guard lock(mutex);
  return world.names.contains(name);
}

std::string next_name(DefaultWorld& world) {
  std::lock_guard lock(mutex);
  return std::to_string(world.group_count++) + shrunk_suffix(world.times_shrunk);
}

uint64_t next_local_meeting(DefaultWorld& world, const std::vector<int>& ranks) {
  std::lock_guard lock(mutex);
  return world.local_meetings[ranks]++;
}

int count(DefaultWorld& world) {
  std::lock_guard lock(mutex);
  return world.group_count;
}

}  // namespace lockstep::collectives::internal::registry
