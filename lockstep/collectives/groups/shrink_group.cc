// shrink_group() of process_group.h.

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/groups/internal/device_backends.h>
#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/collectives/groups/internal/group_registry.h>
#include <lockstep/collectives/groups/internal/shrinking.h>
#include <lockstep/collectives/process_group.h>

namespace lockstep {

using namespace collectives::internal;

namespace {

using group_making::GroupPlan;
using shrinking::Shrunk;

/// The new group, but for its ranks. Its name differs from that of all groups before it, for the flight
/// recorder.
GroupPlan plan_shrunk(const RegisteredGroup& old, const ShrinkOptions& options) {
  GroupPlan plan;
  plan.name = old.first_name + ":shrunk:" + std::to_string(old.times_shrunk + 1);
  plan.backend_name = old.backend_name;
  plan.timeout = options.timeout.value_or(old.backend->timeout());
  plan.nccl = old.nccl;
  plan.between_hosts = old.backend->between_hosts();
  return plan;
}

std::shared_ptr<RegisteredGroup> shrunk_group_of(const DefaultWorld& world, const GroupPlan& plan,
                                                 const RegisteredGroup& old, const Shrunk& channels) {
  auto group = group_making::group_of(world, plan, channels.channel);
  group->first_name = old.first_name;
  group->times_shrunk = old.times_shrunk + 1;
  return group;
}

void log_shrunk(const DefaultWorld& world, const RegisteredGroup& old, const RegisteredGroup& made,
                const Shrunk& channels) {
  std::vector<int> survivors;
  for (int rank = 0; rank < channels.channel->size(); ++rank) {
    survivors.push_back(channels.channel->job_rank(rank));
  }
  LOCKSTEP_LOG(kInfo) << "shrank group '" << old.name << "' from " << old.ranks.size() << " ranks to "
                      << name_ranks(survivors) << world.transport->of_the_job() << ", as group '" << made.name
                      << "'";
}

/// All groups of the world but the one that was shrunk, whose ranks mean nothing any more.
void abort_other_groups(DefaultWorld& world, const RegisteredGroup& shrunk) {
  std::string names;
  for (const auto& group : registry::all(world)) {
    if (group.get() == &shrunk) continue;
    names += (names.empty() ? "'" : ", '") + group->name + "'";
    group->backend->channel().abort();
    device_backends::end(*group, /*aborting=*/true);
    group->backend->end();
  }
  if (names.empty()) return;
  LOCKSTEP_LOG(kWarning) << "shrinking the default group destroyed all other process groups: " << names
                         << "; their ranks have other numbers now, so make them anew";
}

/// What is left of a world: the same memory and settings, a key space of its own, fewer ranks, no groups yet.
std::shared_ptr<DefaultWorld> successor_of(const DefaultWorld& world, const Shrunk& channels) {
  auto successor = std::make_shared<DefaultWorld>();
  successor->world = world.world;
  successor->world.rank = channels.channel->rank();
  successor->world.world_size = channels.channel->size();
  successor->world.topology = world.world.topology.among(channels.survivors, channels.channel->rank());
  successor->transport = world.transport;
  successor->members = world.transport_ranks(channels.survivors);
  successor->times_shrunk = world.times_shrunk + 1;
  // Its keys are not those of the world before, in which a rank that was left behind may still write.
  successor->world.store = c10::make_intrusive<c10d::PrefixStore>(
      "generation/" + std::to_string(successor->times_shrunk), world.world.store);
  successor->backend_name = world.backend_name;
  successor->wire_model = world.wire_model;
  successor->control = channels.control;
  return successor;
}

ProcessGroup shrink_default_group(DefaultWorld& world, const std::shared_ptr<RegisteredGroup>& old,
                                  const std::vector<int>& ranks_to_exclude, int shrink_flags,
                                  const ShrinkOptions& options) {
  std::lock_guard making(world.making);
  TORCH_CHECK_VALUE(!world.ended, "shrink_group: the default process group was destroyed meanwhile");
  const auto channels =
      shrinking::shrink(*old->backend, ranks_to_exclude, shrink_flags, /*with_control=*/true);
  const auto successor = successor_of(world, channels);
  GroupPlan plan = plan_shrunk(*old, options);
  plan.description = "default:shrunken";
  plan.ranks = all_ranks(static_cast<int>(channels.survivors.size()));
  successor->timeout_ms = plan.timeout.count();
  const auto group = shrunk_group_of(*successor, plan, *old, channels);
  registry::add(*successor, group, /*is_default=*/true);
  if (successor->members != plan.ranks) world.transport->set_renumbered();
  registry::replace(world, successor);
  log_shrunk(world, *old, *group, channels);
  world.ended = true;
  abort_other_groups(world, *old);
  device_backends::end(*old, /*aborting=*/true);
  old->backend->end();
  world.control->leave();
  return group->handle;
}

ProcessGroup shrink_further_group(DefaultWorld& world, const std::shared_ptr<RegisteredGroup>& old,
                                  const std::vector<int>& ranks_to_exclude, int shrink_flags,
                                  const ShrinkOptions& options) {
  std::lock_guard splitting(old->splitting);
  const auto channels =
      shrinking::shrink(*old->backend, ranks_to_exclude, shrink_flags, /*with_control=*/false);
  GroupPlan plan = plan_shrunk(*old, options);
  plan.description = old->name + ":shrunk";
  for (int rank : channels.survivors) plan.ranks.push_back(old->ranks[static_cast<size_t>(rank)]);
  const auto group = shrunk_group_of(world, plan, *old, channels);
  registry::add(world, group);
  log_shrunk(world, *old, *group, channels);
  registry::remove(old->handle);
  device_backends::end(*old, /*aborting=*/true);
  old->backend->end();
  return group->handle;
}

}  // namespace

ProcessGroup shrink_group(const std::vector<int>& ranks_to_exclude, const ProcessGroup& group,
                          int shrink_flags, const ShrinkOptions& pg_options) {
  const auto world = registry::require_world();
  const auto old = registry::find(group);
  TORCH_CHECK_VALUE(!pg_options.timeout || *pg_options.timeout > std::chrono::milliseconds(0),
                    "shrink_group: the timeout is ", pg_options.timeout->count(),
                    " ms; it must be more than 0");
  return old->handle == world->default_group
             ? shrink_default_group(*world, old, ranks_to_exclude, shrink_flags, pg_options)
             : shrink_further_group(*world, old, ranks_to_exclude, shrink_flags, pg_options);
}

}  // namespace lockstep
