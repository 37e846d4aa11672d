#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/base/memory.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/collectives/lockstep_backend.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/rendezvous/rendezvous.h>

namespace lockstep {
namespace {

using transport::GroupChannel;
using transport::HostTransport;

struct Group {
  ProcessGroup handle;
  c10::intrusive_ptr<LockstepBackend> backend;
  std::vector<int> ranks;  // global, in group order
};

/// Everything that lives between init_process_group and destroy_process_group.
struct DefaultWorld {
  World world;
  std::shared_ptr<HostTransport> transport;
  std::chrono::milliseconds timeout{};
  std::map<const c10d::ProcessGroup*, Group> groups;
  ProcessGroup default_group;
  uint64_t groups_made = 0;
};

std::mutex world_mutex;
// The one singleton; under world_mutex. Never destroyed: a process that exits without destroying the group
// must not wait for peers, nor touch torch's own statics, while the runtime takes it down; the peers are told
// by its end note.
std::shared_ptr<DefaultWorld>& current_world = *new std::shared_ptr<DefaultWorld>;

DefaultWorld& require_world() {
  TORCH_CHECK(current_world != nullptr,
              "Default process group has not been initialized, please make sure to call init_process_group.");
  return *current_world;
}

void check_backend(const std::string& backend) {
  if (backend == "lockstep" || backend == "cpu:lockstep" || backend.empty()) return;
  TORCH_CHECK_VALUE(
      backend != "gloo" && backend != "cpu:gloo",
      "backend 'gloo' is not part of Lockstep; leave the backend out, or say \"lockstep\", which does the "
      "same for CPU tensors, faster");
  TORCH_CHECK_VALUE(
      backend.find("nccl") == std::string::npos, "backend '", backend,
      "' needs GPU support, which this version of Lockstep does not have yet; use \"lockstep\" with CPU "
      "tensors");
  TORCH_CHECK_VALUE(false, "unknown backend '", backend, "'; Lockstep has \"lockstep\" (CPU tensors)");
}

Group open_group(const DefaultWorld& world, const std::string& key, const std::string& name,
                 std::vector<int> ranks, std::chrono::milliseconds timeout) {
  Group group;
  group.ranks = ranks;
  auto channel = GroupChannel::open(world.transport, *world.world.store, key, std::move(ranks),
                                    Deadline::after(timeout));
  const int rank = channel->rank();
  const int size = channel->size();
  group.backend =
      c10::make_intrusive<LockstepBackend>(std::move(channel), LockstepBackend::Settings{name, timeout});
  auto store = c10::make_intrusive<c10d::PrefixStore>(key, world.world.store);
  group.handle = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  constexpr auto kType = c10d::ProcessGroup::BackendType::CUSTOM;
  group.handle->setBackend(at::kCPU, kType, c10::intrusive_ptr<c10d::Backend>(group.backend));
  group.handle->setDefaultBackend(kType);
  group.handle->setGroupName(name);
  return group;
}

/// The group behind a handle, the default one for an empty handle.
Group& find_group(const ProcessGroup& handle) {
  DefaultWorld& world = require_world();
  auto found = world.groups.find(handle ? handle.get() : world.default_group.get());
  TORCH_CHECK(found != world.groups.end(),
              "Invalid process group specified: it was destroyed, or is not Lockstep's");
  return found->second;
}

/// Takes groups out of the registry, then ends them without holding the lock: an operation may still have to
/// finish.
void end_groups(std::vector<Group> groups, bool abort) {
  for (Group& group : groups) {
    if (abort) group.backend->abort();
    group.backend->shutdown();
  }
}

void destroy_all(bool abort) {
  std::shared_ptr<DefaultWorld> ending;
  {
    std::lock_guard lock(world_mutex);
    ending = std::move(current_world);
    clear_world_defaults();
  }
  if (!ending) return;
  std::vector<Group> groups;
  for (auto& [handle, group] : ending->groups) groups.push_back(std::move(group));
  end_groups(std::move(groups), abort);
}

}  // namespace

DefaultGroup::~DefaultGroup() {
  if (!owned_) return;
  try {
    destroy_all(/*abort=*/std::uncaught_exceptions() > 0);
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "destroying the process group: " << error.what();
  }
}

int DefaultGroup::rank() const {
  return get_rank();
}
int DefaultGroup::size() const {
  return get_world_size();
}

DefaultGroup init_process_group(const InitOptions& options) {
  check_backend(options.backend);
  TORCH_CHECK_VALUE(options.timeout > std::chrono::milliseconds(0), "init_process_group: the timeout is ",
                    options.timeout.count(), " ms; it must be more than 0");
  {
    std::lock_guard lock(world_mutex);
    TORCH_CHECK(current_world == nullptr,
                "trying to initialize the default process group twice! Call destroy_process_group() first.");
  }
  const Deadline deadline = Deadline::after(options.timeout);
  auto world = std::make_shared<DefaultWorld>();
  world->world = rendezvous({.init_method = options.init_method,
                             .store = options.store,
                             .rank = options.rank,
                             .world_size = options.world_size,
                             .timeout = options.timeout});
  log::set_rank(world->world.rank);
  world->timeout = options.timeout;
  HostTransport::Options transport_options;
  if (auto mebibytes = environment::integer("LOCKSTEP_SEGMENT_MB", 1, 1 << 20)) {
    transport_options.segment_bytes = static_cast<size_t>(*mebibytes) << 20;
  }
  world->transport = HostTransport::connect(*world->world.store, world->world.rank, world->world.world_size,
                                            deadline, transport_options);
  std::vector<int> everybody(world->world.world_size);
  std::iota(everybody.begin(), everybody.end(), 0);
  Group group = open_group(*world, "default", options.group_name, everybody, options.timeout);
  world->default_group = group.handle;
  world->groups.emplace(group.handle.get(), std::move(group));
  LOCKSTEP_LOG(kInfo) << "joined " << world->world.world_size << " ranks (" << world->world.launcher << ")";

  std::lock_guard lock(world_mutex);
  TORCH_CHECK(current_world == nullptr, "init_process_group was called in two threads at once");
  set_world_defaults({world->world.rank, world->world.world_size});
  current_world = std::move(world);
  return {};
}

void destroy_process_group(const ProcessGroup& group) {
  if (!is_member(group)) return;
  std::vector<Group> ending;
  {
    std::lock_guard lock(world_mutex);
    if (current_world && group && group != current_world->default_group) {
      find_group(group);
      ending.push_back(std::move(current_world->groups.extract(group.get()).mapped()));
    }
  }
  if (ending.empty()) return destroy_all(/*abort=*/false);
  end_groups(std::move(ending), /*abort=*/false);
}

bool is_initialized() {
  std::lock_guard lock(world_mutex);
  return current_world != nullptr;
}

bool is_member(const ProcessGroup& group) {
  return !group || group->getRank() >= 0;
}

int get_rank(const ProcessGroup& group) {
  if (!is_member(group)) return -1;
  std::lock_guard lock(world_mutex);
  return find_group(group).handle->getRank();
}

int get_world_size(const ProcessGroup& group) {
  if (!is_member(group)) return -1;
  std::lock_guard lock(world_mutex);
  return find_group(group).handle->getSize();
}

int get_node_local_rank() {
  std::lock_guard lock(world_mutex);
  const int local_rank = require_world().world.local_rank;
  TORCH_CHECK(local_rank >= 0, "LOCAL_RANK is not set; a launcher such as `lockstep run` sets it");
  return local_rank;
}

ProcessGroup default_group() {
  std::lock_guard lock(world_mutex);
  return require_world().default_group;
}

ProcessGroup new_group(std::vector<int> ranks, std::optional<std::chrono::milliseconds> timeout,
                       std::string group_name) {
  std::unique_lock lock(world_mutex);
  require_world();
  const auto world = current_world;
  const int world_size = world->world.world_size;
  if (ranks.empty()) {
    ranks.resize(world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  std::vector<bool> seen(world_size, false);
  for (int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "new_group: rank ", rank,
                      " is not in the default group, which has ", world_size, " ranks");
    TORCH_CHECK_VALUE(!seen[rank], "new_group: rank ", rank, " is given twice");
    seen[rank] = true;
  }
  // Counted by everybody, so that all members use one key.
  const std::string key = "group/" + std::to_string(world->groups_made++);
  if (std::find(ranks.begin(), ranks.end(), world->world.rank) == ranks.end()) {
    // A handle of its own, so that using it is an error instead of using the default group.
    return c10::make_intrusive<c10d::ProcessGroup>(-1, static_cast<int>(ranks.size()));
  }
  lock.unlock();  // other threads go on while the members meet
  if (group_name.empty()) group_name = key;
  Group group = open_group(*world, key, group_name, std::move(ranks), timeout.value_or(world->timeout));
  ProcessGroup handle = group.handle;
  lock.lock();
  TORCH_CHECK(current_world == world, "new_group: the default process group was destroyed meanwhile");
  world->groups.emplace(handle.get(), std::move(group));
  return handle;
}

int get_group_rank(const ProcessGroup& group, int global_rank) {
  std::lock_guard lock(world_mutex);
  const auto& ranks = find_group(group).ranks;
  auto found = std::find(ranks.begin(), ranks.end(), global_rank);
  TORCH_CHECK_VALUE(found != ranks.end(), "Global rank ", global_rank, " is not part of group");
  return static_cast<int>(found - ranks.begin());
}

at::Tensor empty_shared(at::IntArrayRef sizes, at::TensorOptions options, const ProcessGroup& group) {
  c10::intrusive_ptr<LockstepBackend> backend;
  {
    std::lock_guard lock(world_mutex);
    backend = find_group(group).backend;
  }
  for (int64_t size : sizes) TORCH_CHECK_VALUE(size >= 0, "empty_shared: negative size in ", sizes);
  return backend->allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
}

}  // namespace lockstep
