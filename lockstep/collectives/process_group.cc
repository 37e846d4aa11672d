#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include <c10/util/accumulate.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/internal/backend_names.h>
#include <lockstep/collectives/groups/internal/device_backends.h>
#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/collectives/groups/internal/group_registry.h>
#include <lockstep/collectives/groups/internal/transport_options.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/rendezvous/launch_environment.h>
#include <lockstep/rendezvous/rendezvous.h>

namespace lockstep {

using namespace collectives::internal;

namespace {

using transport::HostTransport;

/// Ends groups that are out of the registry already: an operation may still have to finish.
void end_group(RegisteredGroup& group, bool abort) {
  LOCKSTEP_LOG(kInfo) << (abort ? "aborts" : "destroys") << " group '" << group.name << "'";
  if (abort) group.backend->abort();  // first: the others learn of it at once, and NCCL's takes its time
  device_backends::end(group, abort);
  group.backend->end();
}

void destroy_all(bool abort) {
  const auto world = registry::remove_world();
  if (!world) return;
  const bool forked = world->transport->in_forked_child();  // then no thread will ever unlock `making`
  const auto groups = registry::all(*world);
  if (abort) {
    world->control->abort();
    for (const auto& group : groups) group->backend->abort();
  }
  for (const auto& group : groups) end_group(*group, abort);
  // Groups that another thread is making get ready, or fail, first.
  std::unique_lock making(world->making, std::defer_lock);
  if (!forked) making.lock();
  world->ended = true;
  if (forked) return;
  world->control->leave();
  flight::unwatch_signal();
}

/// Everything of a new world but its default group.
std::shared_ptr<DefaultWorld> join_world(const InitOptions& options, Deadline deadline) {
  auto world = std::make_shared<DefaultWorld>();
  world->timeout_ms = options.timeout.count();
  world->world = rendezvous({.init_method = options.init_method,
                             .store = options.store,
                             .rank = options.rank,
                             .world_size = options.world_size,
                             .timeout = options.timeout});
  const auto& [rank, size] = std::pair(world->world.rank, world->world.world_size);
  log::set_rank(rank);
  const bool over_hosts = world->world.topology.spans_hosts();
  if (over_hosts && rank == 0) world->wire_model = hosts::read_cost_model();
  auto to_connect = transport_options(world->world.topology, world->world.meeting_host);
  to_connect.met_at = world->world.met_at;
  world->transport = HostTransport::connect(*world->world.store, rank, size, deadline, to_connect);
  world->members = all_ranks(size);
  world->control = group_making::open_control(*world, options.between_hosts, deadline);
  const auto gather = group_making::over_control(*world, "init_process_group", deadline);
  if (over_hosts) world->wire_model = group_making::agree_on_wire_model(gather, world->wire_model);
  world->backend_name = device_backends::agree(gather, "init_process_group", rank,
                                               backend_names::check(options.backend), {world->members});
  return world;
}

void open_default_group(DefaultWorld& world, const InitOptions& options, Deadline deadline) {
  group_making::GroupPlan plan;
  plan.name = options.group_name;
  plan.description = "default_pg";
  plan.backend_name = world.backend_name;
  plan.timeout = options.timeout;
  plan.nccl = options.nccl;
  plan.between_hosts = options.between_hosts;
  plan.device_id = options.device_id;
  plan.ranks = all_ranks(world.world.world_size);
  const auto gather = group_making::over_control(world, "init_process_group", deadline);
  registry::add(world, group_making::open_together(world, plan, gather, plan.ranks, deadline),
                /*is_default=*/true);
}

/// Both; errors end with where to read what to do.
std::shared_ptr<DefaultWorld> meet(const InitOptions& options, Deadline deadline) try {
  auto world = join_world(options, deadline);
  open_default_group(*world, options, deadline);
  return world;
} catch (c10::Error& error) {
  error.add_context(group_making::kMeetingAdvice);
  throw;
}

}  // namespace

DefaultGroup::~DefaultGroup() {
  if (!owned_) return;
  try {
    destroy_all(/*abort=*/std::uncaught_exceptions() > 0);
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "destroying the process group: " << text_of(error);
  }
}

int DefaultGroup::rank() const {
  return get_rank();
}
int DefaultGroup::size() const {
  return get_world_size();
}

DefaultGroup init_process_group(const InitOptions& options) {
  get_debug_level();  // complains about TORCH_DISTRIBUTED_DEBUG before any rank is waited for
  backend_names::check(options.backend);
  TORCH_CHECK_VALUE(options.timeout > std::chrono::milliseconds(0), "init_process_group: the timeout is ",
                    options.timeout.count(), " ms; it must be more than 0");
  checked_compression(options.between_hosts, "init_process_group: between_hosts");
  TORCH_CHECK_VALUE(
      !is_initialized(),
      "trying to initialize the default process group twice! Call destroy_process_group() first.");
  if (options.device_id) set_device(*options.device_id);
  const Deadline deadline = Deadline::after(options.timeout);
  auto world = meet(options, deadline);
  LOCKSTEP_LOG(kInfo) << "joined " << world->world.world_size << " ranks (" << world->world.launcher
                      << ") in group '" << options.group_name << "', backend "
                      << backend_names::config(world->backend_name) << ", timeout " << options.timeout.count()
                      << " ms";
  flight::watch_signal();
  registry::install(std::move(world));
  return {};
}

void destroy_process_group(const ProcessGroup& group) {
  if (!is_member(group) || !is_initialized()) return;
  if (!group || group == default_group()) {
    for (const auto& one : registry::all(*registry::require_world())) one->backend->check_not_in_callback();
    return destroy_all(/*abort=*/false);
  }
  registry::find(group)->backend->check_not_in_callback();
  end_group(*registry::remove(group), /*abort=*/false);
}

void abort(const ProcessGroup& group) {
  if (!is_member(group)) return;
  const auto world = registry::require_world();
  const auto chosen = registry::find(group);
  LOCKSTEP_LOG(kInfo) << "aborts group '" << chosen->name << "'";
  // Lockstep's first: they tell the other ranks, and NCCL takes its time.
  if (chosen->handle != world->default_group) {
    chosen->backend->abort();
    return device_backends::abort(*chosen);
  }
  world->control->abort();
  const auto groups = registry::all(*world);
  for (const auto& one : groups) one->backend->abort();
  for (const auto& one : groups) device_backends::abort(*one);
}

bool is_available() {
  return true;
}
bool is_initialized() {
  return registry::find_world() != nullptr;
}
bool is_backend_available(const std::string& backend) {
  return backend_names::is_available(backend);
}
bool is_nccl_available() {
  return nccl_is_built();
}
bool is_torchelastic_launched() {
  return environment::text("TORCHELASTIC_RUN_ID").has_value();
}

ProcessGroup default_group() {
  return registry::find({})->handle;
}

bool is_member(const ProcessGroup& group) {
  return !group || group->getRank() >= 0;
}

int get_rank(const ProcessGroup& group) {
  return is_member(group) ? registry::find(group)->handle->getRank() : -1;
}

int get_world_size(const ProcessGroup& group) {
  return is_member(group) ? registry::find(group)->handle->getSize() : -1;
}

int get_node_local_rank(std::optional<int> fallback_rank) {
  // LOCAL_RANK before everything else, as in PyTorch; other launchers have other names for it.
  if (auto rank = environment::integer("LOCAL_RANK", 0, std::numeric_limits<int>::max())) {
    return static_cast<int>(*rank);
  }
  if (const auto world = registry::find_world()) return world->world.local_rank;
  const int local_rank = read_launch_environment(environment::text).local_rank;
  if (local_rank >= 0) return local_rank;
  TORCH_CHECK(fallback_rank.has_value(),
              "LOCAL_RANK is not in the environment; a launcher such as `lockstep run` sets it. Consider "
              "passing fallback_rank, if you want the code to run without one.");
  return *fallback_rank;
}

int get_group_rank(const ProcessGroup& group, int global_rank) {
  const auto members = registry::find(group);
  const auto found = std::find(members->ranks.begin(), members->ranks.end(), global_rank);
  TORCH_CHECK_VALUE(found != members->ranks.end(), "Global rank ", global_rank, " is not part of group '",
                    members->name, "', which has ", name_ranks(members->ranks));
  return static_cast<int>(found - members->ranks.begin());
}

int get_global_rank(const ProcessGroup& group, int group_rank) {
  const auto members = registry::find(group);
  const int size = static_cast<int>(members->ranks.size());
  TORCH_CHECK_VALUE(group_rank >= 0 && group_rank < size, "Group rank ", group_rank,
                    " is not part of group '", members->name, "', which has group ranks 0 to ", size - 1);
  return members->ranks[group_rank];
}

std::vector<int> get_process_group_ranks(const ProcessGroup& group) {
  return registry::find(group)->ranks;
}

Topology get_topology(const ProcessGroup& group) {
  const auto world = registry::require_world();
  const auto members = registry::find(group);
  return world->world.topology.among(members->ranks, members->handle->getRank());
}

std::string get_backend(const ProcessGroup& group) {
  return registry::find(group)->backend_name;
}

std::string get_backend_config(const ProcessGroup& group) {
  return backend_names::config(registry::find(group)->backend_name);
}

std::string get_default_backend_for_device(const at::Device& device) {
  TORCH_CHECK_VALUE(device.is_cpu() || device.is_cuda() || device.is_privateuseone(),
                    "Default backend not registered for device : ", device.str(),
                    "; Lockstep has \"lockstep\" for CPU and device tensors, and \"nccl\" for CUDA");
  return device.is_cuda() && nccl_is_built() ? backend_names::kNccl : backend_names::kLockstep;
}

int get_pg_count() {
  return registry::count(*registry::require_world());
}

c10d::DebugLevel get_debug_level() {
  log::check_environment();  // which reads the environment at its first call
  return c10d::debug_level();
}

void set_group_timeout(std::chrono::milliseconds timeout, const ProcessGroup& group) {
  TORCH_CHECK_VALUE(timeout > std::chrono::milliseconds(0), "set_group_timeout: the timeout is ",
                    timeout.count(), " ms; it must be more than 0");
  const auto world = registry::require_world();
  const auto chosen = registry::find(group);
  chosen->backend->setTimeout(timeout);
  device_backends::set_timeout(*chosen, timeout);
  if (chosen->handle == world->default_group) world->timeout_ms = timeout.count();
}

at::Tensor empty_shared(at::IntArrayRef sizes, at::TensorOptions options, const ProcessGroup& group) {
  const auto backend = registry::find(group)->backend;
  for (int64_t size : sizes) TORCH_CHECK_VALUE(size >= 0, "empty_shared: negative size in ", sizes);
  return backend->allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
}

}  // namespace lockstep
