#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/device/nccl_options.h>
#include <lockstep/rendezvous/world.h>
#include <lockstep/transport/group_channel.h>

/// The groups that are alive in this process. All functions are thread-safe.
namespace lockstep::collectives::internal {

/// One group that this process is a member of. Constant once it is registered, but for the mutex.
struct RegisteredGroup {
  ProcessGroup handle;
  c10::intrusive_ptr<LockstepBackend> backend;
  /// The backends of devices that `backend` does not serve; the handle has them, too.
  std::map<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>> device_backends;
  NcclOptions nccl;  // they were made with
  std::string name;
  std::string backend_name;   // as asked for, lower case, or as the ranks have chosen
  std::vector<int> ranks;     // global, by group rank
  uint64_t number = 0;        // in order of making, within this process
  uint64_t times_shrunk = 0;  // on the way to this group, and …
  std::string first_name;     // … what it was called before
  /// One split_group() at a time, for it takes several operations of the group.
  std::mutex splitting;
  /// split_group() calls so far (c10d's own counter begins anywhere: it is not initialised).
  std::atomic<uint64_t> splits{0};
};

/// Everything that lives between init_process_group and destroy_process_group.
struct DefaultWorld {
  World world;
  std::shared_ptr<transport::HostTransport> transport;
  /// The transport's ranks, by global rank. They are those of the job, and the same until shrink_group().
  std::vector<int> members;
  uint64_t times_shrunk = 0;
  std::string backend_name;
  hosts::CostModel wire_model = {};  // rank 0's, where the ranks are on several hosts
  std::atomic<std::chrono::milliseconds::rep> timeout_ms{0};  // of the default group

  /// One at a time, in the same order on all ranks: new_group(). Taken before the registry's lock.
  std::mutex making;
  /// A hidden group of all ranks, over which they agree on new groups, so that the default group's operations
  /// know nothing of it. One operation at a time, under `making`; set before the world is installed.
  std::shared_ptr<transport::GroupChannel> control;
  bool ended = false;  // under `making`: this rank has left `control`

  // Under the registry's lock:
  ProcessGroup default_group;
  std::unordered_map<const c10d::ProcessGroup*, std::shared_ptr<RegisteredGroup>> groups;
  std::unordered_set<std::string> names;
  std::map<std::vector<int>, uint64_t> local_meetings;  // by ranks: calls with use_local_synchronization
  uint64_t groups_registered = 0;
  int group_count = 0;  // get_pg_count()

  std::vector<int> transport_ranks(const std::vector<int>& ranks) const {
    std::vector<int> translated;
    for (int rank : ranks) translated.push_back(members.at(rank));
    return translated;
  }
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms.load()); }
};

namespace registry {

/// The current world; null without one.
std::shared_ptr<DefaultWorld> find_world();
/// The same; throws c10::ValueError, with the call that is missing, if there is none.
std::shared_ptr<DefaultWorld> require_world();
/// Makes `world` the current one. Throws c10::ValueError if there is one already.
void install(std::shared_ptr<DefaultWorld> world);
/// Puts `successor`, what is left of a world that was shrunk, into its place. Throws c10::ValueError if the
/// world is no longer the current one.
void replace(const DefaultWorld& world, std::shared_ptr<DefaultWorld> successor);
/// Takes the current world away and returns it; null if there is none.
std::shared_ptr<DefaultWorld> remove_world();

/// The group behind a handle, the default one for an empty handle. Throws c10::ValueError for handles of
/// groups that were destroyed, are not Lockstep's, or that this process is not a member of.
std::shared_ptr<RegisteredGroup> find(const ProcessGroup& handle);
/// Adds a group to a world. Throws c10::ValueError if the world is no longer the current one; with
/// `is_default` it need not be yet.
void add(DefaultWorld& world, std::shared_ptr<RegisteredGroup> group, bool is_default = false);
/// Takes a group out. Throws like find().
std::shared_ptr<RegisteredGroup> remove(const ProcessGroup& handle);
/// All groups of a world, the youngest first.
std::vector<std::shared_ptr<RegisteredGroup>> all(DefaultWorld& world);
/// Whether a living group has the name.
bool has_name(DefaultWorld& world, const std::string& name);

/// The name for the next group that all ranks make together: "1", "2", …, and after shrink_group()
/// "1:shrunk:1", for the flight recorder still knows the groups from before.
std::string next_name(DefaultWorld& world);
/// How often this process has met the others of `ranks` before; counts this time.
uint64_t next_local_meeting(DefaultWorld& world, const std::vector<int>& ranks);
int count(DefaultWorld& world);

}  // namespace registry
}  // namespace lockstep::collectives::internal
